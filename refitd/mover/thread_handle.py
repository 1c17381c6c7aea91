"""The daemon's end of a mover that is a thread of its client: what cannot be killed is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat

from refitd.errors import ProtocolError, TransportError
from refitd.mover.handle import MoverHandle
from refitd.mover.requester import Requester

CUT_SECONDS = 3.0  # how long a thread that was cut off may take to let go of everything
GIL_PATIENCE = 5  # a client that holds the interpreter keeps its thread from answering: pings wait that much longer


class ThreadHandle(MoverHandle):
    """As `MoverHandle`. ``pidfd`` is the reading end of a pipe that ends when the thread has let go, or its process.

    `kill` closes the command socket to both sides: nothing that the thread still does is ordered or heard by anybody.
    One that has not ended `CUT_SECONDS` later counts as gone all the same, and is `stuck`.
    """

    in_client = True
    _cut: asyncio.TimerHandle | None = None

    def kill(self) -> None:
        """Cut the thread off. `on_exit` and `gone` follow when it has let go, or is given up."""
        if self.alive and self._cut is None:
            with contextlib.suppress(OSError):  # its process is gone
                self._sock.shutdown(socket.SHUT_RDWR)
            self._cut = self._loop.call_later(CUT_SECONDS, self._give_up)

    def alive_within(self, seconds: float) -> bool:
        return super().alive_within(seconds * GIL_PATIENCE)

    def _give_up(self) -> None:
        if self.alive:
            self.stuck = True
            self._exited()

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            if self._cut is not None:
                self._cut.cancel()


class ClientHost:
    """The client that runs its mover itself, at the other end of ``fd``, which this owns."""

    def __init__(self, fd: int) -> None:
        self._requester = Requester(socket.socket(fileno=fd))
        self._closed = self._busy = False

    async def fork(self, key: str, seconds: float) -> tuple[socket.socket, int, int]:
        """Our end of the new mover's socket, the pid that its process gives itself, the end of its pipe.

        Raises TransportError where the thread does not answer within ``seconds``; then nobody may ask again.
        """
        self._busy = True
        try:
            ours, pid, end = await asyncio.wait_for(self._requester.fork(key), seconds)
            _require_pipe(ours, end)
            return ours, pid, end
        except (OSError, EOFError, TimeoutError, ProtocolError) as error:
            raise TransportError(("client", key), f"its thread did not start a mover: {error!r}") from error
        finally:
            self._busy = False
            if self._closed:
                self._requester.close()

    def close(self) -> None:
        """The client is gone, or runs no mover any more; a request that is under way ends."""
        self._closed = True
        if self._busy:
            self._requester.hang_up()
        else:
            self._requester.close()


def _require_pipe(ours: socket.socket, end: int) -> None:
    """What a client sends us to wait for must be something that can be waited for. Raises ProtocolError."""
    if not stat.S_ISFIFO(os.fstat(end).st_mode):
        ours.close()
        os.close(end)
        raise ProtocolError("forked", "the end of a pipe", "another kind of descriptor")
