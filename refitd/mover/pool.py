"""Starts movers: a fork server child that has imported torch once, and one forked mover a rank."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping

from refitd.errors import TransportError
from refitd.hook import wire
from refitd.mover.handle import MoverHandle, OnExit, OnMessage

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

    async def spawn(self, key: str, on_message: OnMessage, on_exit: OnExit) -> MoverHandle:
        """Fork a mover for rank ``key``. Raises TransportError where no fork server will start or answer."""
        spawning = asyncio.ensure_future(self._spawn(key, on_message, on_exit))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            spawning.add_done_callback(_kill_unwanted)
            raise

    async def _spawn(self, key: str, on_message: OnMessage, on_exit: OnExit) -> MoverHandle:
        async with self._lock:
            server = await self._running_server()
            try:
                ours, pid, pidfd = await asyncio.wait_for(server.fork(key), FORK_SECONDS)
            except (OSError, EOFError, TimeoutError) as error:
                await self._stop_server()
                raise TransportError(("daemon", key), f"the fork server did not fork: {error!r}") from error
        self._lives[key] += 1

        def exited(handle: MoverHandle) -> None:
            self._handles.discard(handle)
            on_exit(handle)

        handle = MoverHandle(key, pid, pidfd, self._lives[key], ours, on_message, exited)
        self._handles.add(handle)
        return handle

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
            self._server = _ForkServer(self._python, self._environ)
            try:
                await asyncio.wait_for(self._server.receive(), START_SECONDS)
            except (OSError, EOFError, TimeoutError) as error:
                await self._stop_server()
                raise TransportError(("daemon", "fork server"), f"it did not start: {error!r}") from error
        return self._server

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.process.kill()
            await asyncio.get_running_loop().run_in_executor(None, server.process.wait)
            server.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _kill_unwanted(spawning: asyncio.Future[MoverHandle]) -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().kill()


class _ForkServer:
    """The fork server process and our end of its socket."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        self._decoder = wire.Decoder()
        with theirs:
            command = [python, "-m", "refitd.mover.forkserver", str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=dict(environ), stdin=subprocess.DEVNULL
            )

    async def fork(self, key: str) -> tuple[socket.socket, int, int]:
        """Our end of the new mover's socket, its pid, its pidfd."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                wire.send(self._sock, {"kind": "fork", "key": key}, [theirs.fileno()])
            message, fds = await self.receive()
        except BaseException:
            ours.close()
            raise
        return ours, int(message["pid"]), fds[0]

    async def receive(self) -> tuple[wire.Message, list[int]]:
        while (frame := self._decoder.pop()) is None:
            await self._wait_readable()
            if not wire.receive_into(self._sock, self._decoder):
                raise EOFError("the fork server closed its socket")
        return frame

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._sock, _settle, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._sock)

    def close(self) -> None:
        self._decoder.close()
        self._sock.close()
