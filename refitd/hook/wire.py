"""Frames on a Unix stream socket: 4 bytes length, a JSON object, and the file descriptors that came with it.

Standard library only: the client side of the hook runs inside trainers and engines. A frame is at most 1 MiB; a larger
message is *spilled*: its JSON travels in a sealed memfd, the last descriptor of the frame ``{"spilled": true}``.
Descriptors travel in batches of at most `FD_BATCH` (the kernel's limit for one
message is 253), each batch attached to one byte of the frame.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from refitd.errors import ProtocolError
from refitd.hook.memfd import create_document, read_document

MAX_FRAME = 1 << 20
MAX_SPILLED = 32 << 20
FD_BATCH = 64
MAX_FDS = 4096
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


def _dump(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def encode(message: Message, fds: int = 0) -> bytes:
    """One frame. Raises ProtocolError where it would exceed `MAX_FRAME`."""
    body = _dump({**message, "fds": fds} if fds else message)
    if len(body) > MAX_FRAME:
        raise ProtocolError("frame length", f"at most {MAX_FRAME} bytes", str(len(body)))
    return _LENGTH.pack(len(body)) + body


def encode_spilling(message: Message, fds: Sequence[int] = ()) -> tuple[bytes, list[int]]:
    """A frame and its descriptors, with one more descriptor (the caller closes it too) where the message is large."""
    body = _dump({**message, "fds": len(fds)} if fds else message)
    if len(body) <= MAX_FRAME:
        return _LENGTH.pack(len(body)) + body, list(fds)
    if len(body) > MAX_SPILLED:
        raise ProtocolError("message length", f"at most {MAX_SPILLED} bytes", str(len(body)))
    return encode({"spilled": True}, len(fds) + 1), [*fds, create_document("refitd-message", body)]


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a frame and its descriptors on a blocking socket. The caller keeps (and closes) its own descriptors."""
    data, all_fds = encode_spilling(message, fds)
    try:
        _send_frame(sock, memoryview(data), all_fds)
    finally:
        for spilled in all_fds[len(fds) :]:
            os.close(spilled)


def _send_frame(sock: socket.socket, frame: memoryview, fds: Sequence[int]) -> None:
    for start in range(0, len(fds), FD_BATCH):
        batch = array.array("i", fds[start : start + FD_BATCH])
        sock.sendmsg([frame[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, batch)])
        frame = frame[1:]
    sock.sendall(frame)


class Decoder:
    """Turns received bytes and descriptors into (message, descriptors) pairs, whatever the chunking was."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> None:
        self._bytes += data
        self._fds.extend(fds)

    def pop(self) -> tuple[Message, list[int]] | None:
        """The next whole frame, or None. Raises ProtocolError on garbage; the connection must then be closed."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_FRAME:
            raise ProtocolError("frame length", f"at most {MAX_FRAME} bytes", str(length))
        if len(self._bytes) < _LENGTH.size + length:
            return None
        message = _parse(bytes(self._bytes[_LENGTH.size : _LENGTH.size + length]))
        del self._bytes[: _LENGTH.size + length]
        fds = self._take_fds(message)
        return (_unspill(fds), fds) if message.get("spilled") is True else (message, fds)

    def holds_some(self) -> bool:
        """Whether there is more than was popped, a whole frame or part of one."""
        return bool(self._bytes)

    def limit_fds(self, most: int) -> None:
        """Raises ProtocolError where more than ``most`` descriptors wait for a frame that claims them."""
        if len(self._fds) > most:
            raise ProtocolError("fds", f"at most {most} descriptors ahead of their frame", str(len(self._fds)))

    def _take_fds(self, message: Message) -> list[int]:
        count = message.get("fds", 0)
        if type(count) is not int or not 0 <= count <= MAX_FDS:
            raise ProtocolError("fds", f"a count from 0 to {MAX_FDS}", repr(count)[:80])
        if count > len(self._fds):
            raise ProtocolError("fds", f"{count} descriptors", str(len(self._fds)))
        return [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close descriptors that nobody took."""
        while self._fds:
            os.close(self._fds.popleft())


def _unspill(fds: list[int]) -> Message:
    """The message in the last of ``fds``, which is removed and closed; closes all of them when it raises."""
    try:
        if not fds:
            raise ProtocolError("spilled", "a sealed memfd", "no descriptor")
        message = _parse(read_document(fds[-1], "spilled", MAX_SPILLED))
    except ProtocolError:
        for fd in fds:
            os.close(fd)
        raise
    os.close(fds.pop())
    return message


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("frame", "a JSON object in UTF-8", f"{body[:40]!r} ({error})") from None
    if not isinstance(message, dict):
        raise ProtocolError("frame", "a JSON object", type(message).__name__)
    return message


def receive_into(sock: socket.socket, decoder: Decoder) -> bool:
    """Read once from a socket into a decoder; False at end of file. BlockingIOError passes through."""
    space = socket.CMSG_SPACE(FD_BATCH * array.array("i").itemsize)
    data, ancillary, _flags, _address = sock.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    decoder.feed(data, fds)
    return bool(data)


class Connection:
    """A blocking, single-threaded end of a frame socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        send(self.sock, message, fds)

    def receive(self, timeout: float | None = None) -> tuple[Message, list[int]]:
        """The next frame. Raises EOFError when the peer is gone, TimeoutError after ``timeout`` silent seconds."""
        while (frame := self._decoder.pop()) is None:
            self.sock.settimeout(timeout)
            try:
                alive = receive_into(self.sock, self._decoder)
            except BlockingIOError:
                raise TimeoutError("no frame is waiting") from None
            finally:
                with contextlib.suppress(OSError):
                    self.sock.settimeout(None)
            if not alive:
                raise EOFError("the peer closed the connection")
        return frame

    def has_more(self) -> bool:
        """Whether `receive` would find something, if only the peer's end. Does not wait."""
        return self._decoder.holds_some() or bool(self._poll.poll(0))

    def close(self) -> None:
        self._decoder.close()
        self.sock.close()
