"""The data port: one TCP port a daemon. Edges are handed to movers; documents are served by digest.

The first frame of a connection says what it is for and shows the proof of it (`refitd.daemon.secret`). Nothing else is
read here, so that a handed over socket carries the peer's next byte. Until the proof is good a connection costs one
task and at most `MAX_HELLO` bytes, for at most `HELLO_SECONDS`, and there are at most `MAX_STRANGERS` of them: a new
one takes the place of the oldest, so that a crowd that says nothing keeps nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from refitd.daemon.secret import Secret
from refitd.errors import ConfigError, ProtocolError, TransportError
from refitd.hook import wire

HELLO_SECONDS = 5.0
MAX_HELLO = 4096
MAX_STRANGERS = 256
BLOB_SECONDS = 5.0
MAX_BLOB = 1 << 28
_LENGTH = struct.Struct(">I")
_BLOB_LENGTH = struct.Struct(">Q")

# Takes an edge's hello and its socket; the socket is the callee's from then on.
OnEdge = Callable[[dict[str, Any], socket.socket], None]
FindBlob = Callable[[str], bytes | None]


def digest_of(data: bytes) -> str:
    """The name under which a document is asked for."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class DataServer:
    """Accepts data connections on ``host:port`` (0: any free port)."""

    def __init__(self, host: str, port: int, secret: Secret, on_edge: OnEdge, find_blob: FindBlob) -> None:
        self._secret, self._on_edge, self._find_blob = secret, on_edge, find_blob
        try:
            self._listener = socket.create_server((host, port), backlog=512)
        except OSError as error:
            raise ConfigError("data.port", "a free port on this host", f"{host}:{port} ({error.strerror})") from None
        self._listener.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}  # not yet proven, oldest first
        self._accepting: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _address = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors: the backlog waits
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.pop(next(iter(self._strangers))).cancel()
            task = self._strangers[sock] = asyncio.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # each one gets a look before the next comes, also when many wait

    async def _serve(self, sock: socket.socket) -> None:
        """One connection; a stranger, garbage or silence ends it without a word."""
        sock.setblocking(False)
        handed = False
        try:
            hello = await self._greeted(sock)
            if hello is None:
                return
            if hello.get("kind") == "edge":
                handed = True
                self._on_edge(hello, sock)
            elif hello.get("kind") == "blob":
                async with asyncio.timeout(BLOB_SECONDS):
                    await self._send_blob(sock, str(hello.get("digest")))
        except (OSError, EOFError, TimeoutError, ProtocolError):
            return
        finally:
            if not handed:
                sock.close()

    async def _greeted(self, sock: socket.socket) -> dict[str, Any] | None:
        """The connection's hello once it has proved itself; None where it does not."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await _read_hello(sock)
            return hello if self._secret.proves(hello) else None
        finally:
            self._strangers.pop(sock, None)

    async def _send_blob(self, sock: socket.socket, digest: str) -> None:
        data = self._find_blob(digest)
        if data is not None:
            await asyncio.get_running_loop().sock_sendall(sock, _BLOB_LENGTH.pack(len(data)) + data)


async def fetch_blob(address: str, secret: Secret, digest: str) -> bytes:
    """A document from a peer's data port, checked against its digest. Raises TransportError."""
    host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(BLOB_SECONDS):
            data = await _ask_blob(sock, (host.strip("[]"), int(port)), secret, digest)
    except (OSError, EOFError, TimeoutError, ProtocolError, ValueError) as error:
        raise TransportError((address, "here"), f"document {digest}: {error!r}") from error
    finally:
        sock.close()
    if digest_of(data) != digest:
        raise TransportError((address, "here"), f"document {digest}: other bytes came ({digest_of(data)})")
    return data


async def _ask_blob(sock: socket.socket, address: tuple[str, int], secret: Secret, digest: str) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address)
    await loop.sock_sendall(sock, wire.encode({"kind": "blob", "secret": secret.blob(digest), "digest": digest}))
    (length,) = _BLOB_LENGTH.unpack(await _read_exactly(sock, _BLOB_LENGTH.size))
    if length > MAX_BLOB:
        raise ProtocolError("document length", f"at most {MAX_BLOB}", str(length))
    return await _read_exactly(sock, length)


async def _read_hello(sock: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(await _read_exactly(sock, _LENGTH.size))
    if length > MAX_HELLO:
        raise ProtocolError("hello length", f"at most {MAX_HELLO} bytes", str(length))
    with contextlib.suppress(ValueError, RecursionError):
        hello = json.loads(await _read_exactly(sock, length))
        if isinstance(hello, dict):
            return hello
    raise ProtocolError("hello", "a JSON object", "something else")


async def _read_exactly(sock: socket.socket, count: int) -> bytes:
    loop, chunks = asyncio.get_running_loop(), bytearray()
    while len(chunks) < count:
        chunk = await loop.sock_recv(sock, min(count - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError("the peer closed the connection")
        chunks += chunk
    return bytes(chunks)
