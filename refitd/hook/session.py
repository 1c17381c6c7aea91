"""One client of the daemon: who it is, its control page, and an outbox that never blocks the daemon."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from refitd.failpoints import effect
from refitd.hook.messages import ADMIN
from refitd.hook.page import ControlPage
from refitd.hook.peer import peer_of
from refitd.hook.wire import FD_BATCH, Decoder, Message, encode_spilling, receive_into

OUTBOX_LIMIT = 8 << 20
HELD_FDS_LIMIT = 4096


class Fds(Sequence[int]):
    """Descriptors that came with a request. They are closed after the request, except those that were taken."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)
        self._mine = set(fds)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Borrow: valid until the handler returns."""
        return self._fds[index]

    def __len__(self) -> int:
        return len(self._fds)

    def __iter__(self) -> Iterator[int]:
        return iter(self._fds)

    def take(self, index: int) -> int:
        """The descriptor, now the caller's to close."""
        self._mine.discard(self._fds[index])
        return self._fds[index]

    def take_between(self, start: int, stop: int) -> list[int]:
        """The descriptors from ``start`` to below ``stop``, now the caller's to close."""
        return [self.take(index) for index in range(start, stop)]

    def take_all(self) -> list[int]:
        """All descriptors, now the caller's to close."""
        self._mine.clear()
        return list(self._fds)

    def close(self) -> None:
        """Close what nobody took."""
        while self._mine:
            os.close(self._mine.pop())


@dataclass(slots=True)
class _Chunk:
    data: memoryview
    fds: list[int] = field(default_factory=list)


class Outbox:
    """Frames on their way to one socket; sends what the socket takes and keeps the rest, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._chunks: deque[_Chunk] = deque()
        self.nbytes = 0

    def push(self, message: Message, fds: Sequence[int]) -> None:
        """Add a frame with duplicates of ``fds``."""
        frame, copies = encode_spilling(message, _duplicate(fds))
        view = memoryview(frame)
        self.nbytes += len(view)
        for start in range(0, len(copies), FD_BATCH):
            self._chunks.append(_Chunk(view[:1], copies[start : start + FD_BATCH]))
            view = view[1:]
        self._chunks.append(_Chunk(view))

    def flush(self) -> int:
        """Send without waiting; the number of bytes that went out. OSError other than BlockingIOError passes."""
        sent = 0
        try:
            while self._chunks:
                sent += self._send(self._chunks[0])
        except BlockingIOError:
            pass
        return sent

    def _send(self, chunk: _Chunk) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", chunk.fds))] if chunk.fds else []
        count = self._sock.sendmsg([chunk.data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        _close_all(chunk.fds)
        chunk.data = chunk.data[count:]
        self.nbytes -= count
        if not chunk.data:
            self._chunks.popleft()
        return count

    def close(self) -> None:
        """Drop what was not sent."""
        while self._chunks:
            _close_all(self._chunks.popleft().fds)
        self.nbytes = 0


def _duplicate(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        _close_all(copies)
        raise
    return copies


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


class Session:
    """One connection that said hello. All methods belong to the event loop's thread."""

    def __init__(self, number: int, sock: socket.socket, stall_timeout: float) -> None:
        self.id = number
        self.peer = peer_of(sock)
        self.job = self.side = self.group = self.incarnation = self.client = ""
        self.rank, self.world = 0, 1
        self.page: ControlPage | None = None
        self.closed: str | None = None
        self.on_close: Callable[[], None] = lambda: None
        self._sock, self._outbox, self._stall_timeout = sock, Outbox(sock), stall_timeout
        self._decoder = Decoder()
        self._loop = asyncio.get_running_loop()
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """The process that connected."""
        return self.peer.pid

    @property
    def hung_up(self) -> bool:
        """Whether the other end is closed, though what it sent before may not be read yet."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def key(self) -> str:
        """The rank key (``trainer/<run>/<rank>``, ``engine/<replica>/<rank>``); ``admin/<id>`` for admin."""
        return f"{ADMIN}/{self.id}" if self.side == ADMIN else f"{self.side}/{self.group}/{self.rank}"

    def event(self, name: str, fds: Sequence[int] = (), **fields: Any) -> None:
        """Send an event. Never blocks and never raises for a bad peer; ``fds`` are duplicated and stay the caller's.

        A client whose outbox passes 8 MiB, or that reads nothing for the stall deadline, is disconnected.
        """
        self.send({"event": name, **fields}, fds)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a frame; nothing happens on a session that is closed."""
        if self.closed is not None:
            return
        effect(f"event {message['event']}" if "event" in message else "answer")
        self._outbox.push(message, fds)
        if self._outbox.nbytes > OUTBOX_LIMIT:
            self.close("the client stopped reading: its outbox is full")
        elif self._stalled is None:
            self._flush()

    def close(self, reason: str) -> None:
        """End the connection after a last try to send what is queued; `Handler.disconnected` follows."""
        if self.closed is not None:
            return
        self.closed = reason
        self._unwatch()
        with contextlib.suppress(OSError):  # the peer may be gone, which is what is being recorded
            self._outbox.flush()
        self._outbox.close()
        self._decoder.close()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self.on_close()

    def read(self, deliver: Callable[[Message, list[int]], None]) -> None:
        """Deliver the frames that are waiting. Closes the session at end of file; ProtocolError for garbage."""
        try:
            alive = receive_into(self._sock, self._decoder)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"the connection failed: {error.strerror}")
            return
        while (frame := self._decoder.pop()) is not None:
            deliver(*frame)
        self._decoder.limit_fds(HELD_FDS_LIMIT)
        if not alive:
            self.close("the client closed the connection")

    def _flush(self) -> None:
        try:
            sent = self._outbox.flush()
        except OSError as error:
            self._unwatch()
            self._loop.call_soon(self.close, f"the connection failed: {error.strerror}")
            return
        if not self._outbox.nbytes:
            self._unwatch()
        elif sent or self._stalled is None:
            self._watch()

    def _watch(self) -> None:
        """Wait for room in the socket, and for the deadline by which the client must have read something."""
        self._unwatch()
        self._loop.add_writer(self._sock, self._flush)
        reason = f"the client stopped reading for {self._stall_timeout:g} s"
        self._stalled = self._loop.call_later(self._stall_timeout, self.close, reason)

    def _unwatch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
            self._loop.remove_writer(self._sock)
