"""Starts movers: a fork server child that has imported torch once, and one forked mover a rank."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping

from refitd.errors import ProtocolError, TransportError
from refitd.mover.handle import MoverHandle, OnExit, OnMessage
from refitd.mover.requester import Requester
from refitd.mover.thread_handle import ClientHost, ThreadHandle

START_SECONDS = 60.0  # importing torch on a busy machine
FORK_SECONDS = 10.0
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class MoverPool:
    """Forks movers for one daemon. All methods are called in one event loop.

    ``python`` runs the fork server; ``environ`` is its environment (default: this process's). The fork server starts
    with the first `spawn` and again with the next one after it died. Movers die with the fork server, and that with us.
    """

    def __init__(self, python: str = sys.executable, environ: Mapping[str, str] | None = None) -> None:
        self._python = python
        self._environ = dict(os.environ if environ is None else environ) | _THREADS
        self._lives: Counter[str] = Counter()
        self._handles: set[MoverHandle] = set()
        self._lock = asyncio.Lock()
        self._server: _ForkServer | None = None

    async def spawn(
        self, key: str, on_message: OnMessage, on_exit: OnExit, host: ClientHost | None = None
    ) -> MoverHandle:
        """Fork a mover for rank ``key``, or have ``host`` run it. Raises TransportError where nobody answers."""
        spawning = asyncio.ensure_future(self._spawn(key, on_message, on_exit, host))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            spawning.add_done_callback(_kill_unwanted)
            raise

    async def _spawn(self, key: str, on_message: OnMessage, on_exit: OnExit, host: ClientHost | None) -> MoverHandle:
        ours, pid, pidfd = await (self._fork(key) if host is None else host.fork(key, FORK_SECONDS))
        self._lives[key] += 1

        def exited(handle: MoverHandle) -> None:
            self._handles.discard(handle)
            on_exit(handle)

        kind = MoverHandle if host is None else ThreadHandle
        handle = kind(key, pid, pidfd, self._lives[key], ours, on_message, exited)
        self._handles.add(handle)
        return handle

    async def _fork(self, key: str) -> tuple[socket.socket, int, int]:
        async with self._lock:
            server = await self._running_server()
            try:
                return await asyncio.wait_for(server.fork(key), FORK_SECONDS)
            except (OSError, EOFError, TimeoutError, ProtocolError) as error:
                await self._stop_server()
                raise TransportError(("daemon", key), f"the fork server did not fork: {error!r}") from error

    async def start(self) -> None:
        """Start the fork server now, so that the first `spawn` is quick. Raises TransportError."""
        async with self._lock:
            await self._running_server()

    async def close(self) -> None:
        """Kill every mover, wait until all are gone, and stop the fork server."""
        handles = list(self._handles)
        for handle in handles:
            handle.kill()
        for handle in handles:
            await handle.gone()
        async with self._lock:
            await self._stop_server()

    async def _running_server(self) -> _ForkServer:
        if self._server is not None and self._server.process.poll() is not None:
            await self._stop_server()
        if self._server is None:
            try:
                self._server = _ForkServer(self._python, self._environ)
                await asyncio.wait_for(self._server.receive(), START_SECONDS)
            except (OSError, EOFError, TimeoutError, ProtocolError) as error:
                await self._stop_server()
                raise TransportError(("daemon", "fork server"), f"it did not start: {error!r}") from error
        return self._server

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.process.kill()
            await asyncio.get_running_loop().run_in_executor(None, server.process.wait)
            server.close()


def _kill_unwanted(spawning: asyncio.Future[MoverHandle]) -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().kill()


class _ForkServer(Requester):
    """The fork server process and our end of its socket."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        with theirs:
            command = [python, "-m", "refitd.mover.forkserver", str(theirs.fileno()), str(os.getpid())]
            try:
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=dict(environ), stdin=subprocess.DEVNULL
                )
            except BaseException:
                self.close()
                raise
