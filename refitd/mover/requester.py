"""Asking somebody for a mover: the fork server, or a client's thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from refitd.errors import ProtocolError
from refitd.hook import wire


class Requester:
    """The daemon's end of ``sock``, which it owns. Used in one event loop, one request at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._decoder = sock, wire.Decoder()
        sock.setblocking(False)

    async def fork(self, key: str) -> tuple[socket.socket, int, int]:
        """Our end of the new mover's socket, its pid, and the descriptor that tells its end.

        Raises OSError, EOFError, ProtocolError.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                wire.send(self._sock, {"kind": "fork", "key": key}, [theirs.fileno()])
            message, fds = await self.receive()
            if type(message.get("pid")) is not int or len(fds) != 1:
                raise ProtocolError(
                    "forked", "a pid and one descriptor", f"{str(message)[:80]}, {len(fds)} descriptors"
                )
            return ours, message["pid"], fds[0]
        except BaseException:
            ours.close()
            raise

    async def receive(self) -> tuple[wire.Message, list[int]]:
        """The next frame. Raises EOFError where the other end is gone."""
        while (frame := self._decoder.pop()) is None:
            await self._wait_readable()
            if not wire.receive_into(self._sock, self._decoder):
                raise EOFError("the other end closed its socket")
        return frame

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._sock, _settle, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._sock)

    def hang_up(self) -> None:
        """Let a `receive` that waits find the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._decoder.close()
        self._sock.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
