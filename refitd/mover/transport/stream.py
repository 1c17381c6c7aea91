"""A data connection whose blocking calls wake up every tick, so that a silent peer and an order to stop are noticed."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable

from refitd.errors import ProtocolError
from refitd.hook import wire
from refitd.mover.frames import HELLO_LIMIT, LENGTH_BYTES

TICK_SECONDS = 0.1
BUFFER_BYTES = 4 << 20
CHUNK_BYTES = 512 << 10  # still in the cache when it is hashed
LOW_WATER_BYTES = 512 << 10  # the kernel wakes us when so much is there, not at every segment
_TIMEVAL = struct.pack("@ll", 0, round(TICK_SECONDS * 1e6))


def _drop_pacing(sock: socket.socket) -> None:
    """Between two processes of one host a paced congestion control (BBR) only costs: it halves the loopback's rate.

    Connections that leave the host keep what the operator chose for them.
    """
    if sock.getpeername()[0] in ("127.0.0.1", "::1") or sock.getpeername()[0] == sock.getsockname()[0]:
        with contextlib.suppress(OSError):  # not built in: the default does
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


class Stream:
    """One end of an edge. ``on_tick(ticks)`` is called after each silent tick and raises to give up.

    Ticks are counted, not clocked: a process that was itself stopped does not blame its peer for the time.
    """

    def __init__(self, sock: socket.socket, on_tick: Callable[[int], None]) -> None:
        self._sock, self._on_tick = sock, on_tick
        self._lock = threading.Lock()
        self._silent, self._mark = 0, 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _drop_pacing(sock)

    def receive_into(self, view: memoryview, seen: Callable[[memoryview], None] | None = None) -> None:
        """Fill ``view``; ``seen`` is given every chunk as it comes. Raises EOFError when the peer is gone, OSError."""
        while view:
            got = self.receive_some(view[:CHUNK_BYTES])
            self.tick(got)
            if got and seen is not None:
                seen(view[:got])
            view = view[got:]

    def receive_some(self, view: memoryview) -> int:
        """Fill ``view``, or its front where a tick passes before all is there: 0 to ``len(view)`` bytes.

        Raises EOFError when the peer is gone, OSError. `tick` is to be called after it.
        """
        mark = min(len(view), LOW_WATER_BYTES)
        if mark != self._mark:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            self._mark = mark
        self._poll.poll(TICK_SECONDS * 1000)
        try:
            got = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)  # after a tick also less than the mark: it is life
        except BlockingIOError:
            return 0
        if got == 0:
            raise EOFError("connection closed by peer")
        return got

    def tick(self, got: int) -> None:
        """Count ticks in which nothing came; ``on_tick`` may raise."""
        self._silent = 0 if got else self._silent + 1
        if self._silent:
            self._on_tick(self._silent)

    def receive(self, nbytes: int) -> bytearray:
        """Exactly ``nbytes``. Raises EOFError, OSError."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return data

    def send(self, *parts: memoryview) -> None:
        """Send buffers as one, without copying them together. Raises OSError when the peer is gone."""
        left, silent = [part for part in parts if part], 0
        while left:
            try:
                sent = self._sock.sendmsg(left)
            except BlockingIOError:
                silent += 1
                self._on_tick(silent)
                continue
            silent = 0
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def receive_frame(self) -> wire.Message:
        """One JSON frame and not a byte more. Raises ProtocolError, EOFError, OSError."""
        length = int.from_bytes(self.receive(LENGTH_BYTES), "big")
        if length > HELLO_LIMIT:
            raise ProtocolError("edge frame length", f"at most {HELLO_LIMIT} bytes", str(length))
        decoder = wire.Decoder()
        decoder.feed(length.to_bytes(LENGTH_BYTES, "big") + bytes(self.receive(length)))
        frame = decoder.pop()
        if frame is None:
            raise ProtocolError("edge frame", "one whole frame", f"{length} bytes")
        return frame[0]

    def shutdown(self) -> None:
        """Wake whoever is blocked on this stream, here and at the peer. Any thread may call it."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:  # or a shutdown could meet another socket under the same descriptor
            self._sock.close()
