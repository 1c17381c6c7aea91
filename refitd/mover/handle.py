"""The daemon's end of one mover: messages out, messages in, pings, and its death. Lives in the daemon's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from refitd.errors import ProtocolError
from refitd.failpoints import effect
from refitd.hook import wire
from refitd.hook.session import Outbox
from refitd.hook.wire import Message

PING_SECONDS = 0.5
SEND_SECONDS = 1.0  # a mover that leaves our messages unread for longer is as good as dead

OnMessage = Callable[["MoverHandle", Message, list[int]], None]
OnExit = Callable[["MoverHandle"], None]


class MoverHandle:
    """One mover process. All methods are called in the event loop, and none of them blocks.

    `in_client`: it is a thread of its client (`refitd.mover.thread_handle`); `stuck`: it counts as gone and is not.
    ``key`` is the rank key, ``pid`` the process, ``life`` counts the movers that this key has had (from 1).
    ``pidfd`` stays open until ``on_exit`` has returned. Descriptors given to ``on_message`` belong to the callee.
    """

    in_client = False
    stuck = False

    def __init__(
        self, key: str, pid: int, pidfd: int, life: int, sock: socket.socket, on_message: OnMessage, on_exit: OnExit
    ) -> None:
        self.key, self.pid, self.pidfd, self.life = key, pid, pidfd, life
        self._sock = sock
        self._decoder = wire.Decoder()
        self._on_message, self._on_exit = on_message, on_exit
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._outbox = Outbox(sock)
        self._blocked_since: float | None = None
        self._pings: deque[tuple[int, float]] = deque()  # sent and not answered
        self._ping_count = 0
        self._last_tick = time.monotonic()
        self._reading = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)
        self._loop.add_reader(pidfd, self._exited)
        self._timer = self._loop.call_later(PING_SECONDS, self._tick)

    @property
    def alive(self) -> bool:
        """Whether the process has not been seen to end."""
        return not self._gone.done()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message and copies of its descriptors. Messages to a dead mover are dropped: `on_exit` tells."""
        if not self.alive or not self._reading:
            return
        if message["kind"] != "ping":
            effect(f"command {message['kind']}")
        self._outbox.push(message, fds)
        self._flush()

    def ping(self) -> None:
        """Ask the mover's control thread for a sign of life."""
        self._ping_count += 1
        self._pings.append((self._ping_count, time.monotonic()))
        self.send({"kind": "ping", "n": self._ping_count})

    def alive_within(self, seconds: float) -> bool:
        """Whether no ping has waited longer than ``seconds`` for its answer."""
        now = time.monotonic()
        if now - self._last_tick > 2 * PING_SECONDS:
            return self.alive  # this loop itself was away: answers may be waiting unread
        return self.alive and not (self._pings and now - self._pings[0][1] > seconds)

    def kill(self) -> None:
        """SIGKILL. `on_exit` and `gone` follow once the kernel has ended the process."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def gone(self) -> None:
        """Return once the process has ended: from then on it maps and writes nothing."""
        await asyncio.shield(self._gone)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._last_tick > 2 * PING_SECONDS:
            self._pings.clear()
            self._blocked_since = now if self._blocked_since else None
        self._last_tick = now
        if self._blocked_since is not None and now - self._blocked_since > SEND_SECONDS:
            self.kill()
        self._timer = self._loop.call_later(PING_SECONDS, self._tick)
        self.ping()

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except OSError:
            self._hang_up()
            return
        if not self._outbox.nbytes:
            self._blocked_since = None
            self._loop.remove_writer(self._sock)
        elif self._blocked_since is None:
            self._blocked_since = time.monotonic()
            self._loop.add_writer(self._sock, self._flush)

    def _readable(self) -> bool:
        """Take what has arrived; False when there was nothing to take."""
        try:
            alive = wire.receive_into(self._sock, self._decoder)
            while (frame := self._decoder.pop()) is not None:
                self._dispatch(*frame)
        except BlockingIOError:
            return False
        except (OSError, ProtocolError):
            alive = False
        if not alive:
            self._hang_up()
        return alive

    def _dispatch(self, message: Message, fds: list[int]) -> None:
        if message.get("kind") == "pong":
            while self._pings and self._pings[0][0] <= int(message.get("n", 0)):
                self._pings.popleft()
            _close_all(fds)
        else:
            self._on_message(self, message, fds)

    def _hang_up(self) -> None:
        """The mover cannot talk to us any more: end it, and wait for its pidfd."""
        self.kill()
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)

    def _exited(self) -> None:
        self._loop.remove_reader(self.pidfd)
        try:
            while self._reading and self._readable():  # what it said before it died still counts
                pass
        finally:
            self._release()

    def _release(self) -> None:
        self._hang_up()
        self._timer.cancel()
        self._sock.close()
        self._decoder.close()
        self._outbox.close()
        self._gone.set_result(None)
        try:
            self._on_exit(self)
        finally:
            os.close(self.pidfd)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
