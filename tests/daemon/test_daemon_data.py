"""The data port: who may speak, what is handed over, what is served, and that lies are found out."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from refitd.daemon import data
from refitd.daemon.data import MAX_HELLO, DataServer, digest_of, fetch_blob
from refitd.daemon.secret import Secret
from refitd.errors import ConfigError, TransportError
from refitd.hook.wire import encode

SECRET, OTHER = Secret(b"the job's secret"), Secret(b"another job's secret")
DOCUMENT = b"a layout" * 1000
Body = Callable[[DataServer, list[dict[str, Any]]], Awaitable[None]]


def with_server(body: Body, served: bytes | None = DOCUMENT) -> None:
    """Run ``body`` with a server that has one document and closes the edges that it is handed."""

    async def main() -> None:
        edges: list[dict[str, Any]] = []

        def on_edge(hello: dict[str, Any], sock: socket.socket) -> None:
            edges.append({**hello, "next": sock.recv(8)})
            sock.sendall(b"taken")
            sock.close()

        server = DataServer(
            "127.0.0.1", 0, SECRET, on_edge, lambda digest: served if digest == digest_of(DOCUMENT) else None
        )
        server.start()
        try:
            await body(server, edges)
        finally:
            await server.stop()

    asyncio.run(main())


async def talk(server: DataServer, sent: bytes, close: bool = True) -> bytes:
    """What the server says to a connection until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    if close:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


EDGE = {
    "kind": "edge", "secret": SECRET.edge("j", "r0", 3, "a"),
    "job": "j", "lane": "r0", "token": 3, "src": "a", "dst": "b",
}  # fmt: skip


def test_an_edge_is_handed_over_with_its_next_byte_unread() -> None:
    """What follows the hello belongs to the mover."""

    async def body(server: DataServer, edges: list[dict[str, Any]]) -> None:
        assert await talk(server, encode(EDGE) + b"buckets!") == b"taken"
        assert edges == [{**EDGE, "next": b"buckets!"}]

    with_server(body)


@pytest.mark.parametrize(
    "sent",
    [
        encode({**EDGE, "secret": OTHER.edge("j", "r0", 3, "a")}),
        encode({**EDGE, "secret": "the job's secret"}),
        encode({**EDGE, "job": "k"}),
        encode({**EDGE, "lane": "r1"}),
        encode({**EDGE, "token": 4}),
        encode({**EDGE, "src": "b"}),
        encode({**EDGE, "kind": "blob", "digest": digest_of(DOCUMENT)}),
        encode({key: value for key, value in EDGE.items() if key != "secret"}),
        encode({**EDGE, "kind": "gossip"}),
        encode({**EDGE, "secret": 17}),
        struct.pack(">I", 4) + b"\xff\xff\xff\xff",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", MAX_HELLO + 1) + b"x",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
    ids=["another secret", "the secret itself", "proof of another job", "of another lane", "of another token",
         "of another rank", "of another kind", "no secret", "unknown kind", "no text", "garbage", "a list", "oversized",
         "http", "nothing"],
)  # fmt: skip
def test_strangers_are_dropped_without_a_word(sent: bytes) -> None:
    """They learn nothing, nobody else is told, and the next one is served."""

    async def body(server: DataServer, edges: list[dict[str, Any]]) -> None:
        assert await talk(server, sent) == b""
        assert edges == []
        address = f"127.0.0.1:{server.port}"
        assert await fetch_blob(address, SECRET, digest_of(DOCUMENT)) == DOCUMENT

    with_server(body)


def test_silence_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says nothing, or half a hello, ends by itself."""
    monkeypatch.setattr(data, "HELLO_SECONDS", 0.2)

    async def body(server: DataServer, edges: list[dict[str, Any]]) -> None:
        assert await talk(server, b"", close=False) == b""
        assert await talk(server, encode(EDGE)[:9], close=False) == b""
        assert edges == []

    with_server(body)


def test_a_crowd_that_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many may be unproven at once: the oldest goes, and whoever has the secret comes in."""
    monkeypatch.setattr(data, "MAX_STRANGERS", 8)

    async def body(server: DataServer, edges: list[dict[str, Any]]) -> None:
        crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(40)]
        for reader, _writer in crowd[:32]:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        assert len(server._strangers) == 8
        assert not any(reader.at_eof() for reader, _writer in crowd[32:])
        address = f"127.0.0.1:{server.port}"
        assert await fetch_blob(address, SECRET, digest_of(DOCUMENT)) == DOCUMENT
        assert await talk(server, encode(EDGE) + b"buckets!") == b"taken"
        assert len(server._strangers) < 8
        for _reader, writer in crowd:
            writer.close()

    with_server(body)


def test_a_document_is_served_by_digest() -> None:
    """8 bytes of length, then the bytes."""

    async def body(server: DataServer, edges: list[dict[str, Any]]) -> None:
        request = {"kind": "blob", "secret": SECRET.blob(digest_of(DOCUMENT)), "digest": digest_of(DOCUMENT)}
        assert await talk(server, encode(request)) == struct.pack(">Q", len(DOCUMENT)) + DOCUMENT
        assert await talk(server, encode({**request, "digest": "0" * 32})) == b""

    with_server(body)


def test_fetching_fails_for_unknown_documents_and_secrets() -> None:
    """TransportError names address and document."""

    async def body(server: DataServer, edges: list[dict[str, Any]]) -> None:
        address = f"127.0.0.1:{server.port}"
        for secret, digest in ((SECRET, "0" * 32), (OTHER, digest_of(DOCUMENT))):
            with pytest.raises(TransportError, match=digest) as caught:
                await fetch_blob(address, secret, digest)
            assert caught.value.edge == (address, "here")

    with_server(body)


def test_a_document_that_is_not_what_was_asked_for_is_refused() -> None:
    """A peer that lies is found out by the digest."""

    async def body(server: DataServer, edges: list[dict[str, Any]]) -> None:
        with pytest.raises(TransportError, match="other bytes came"):
            await fetch_blob(f"127.0.0.1:{server.port}", SECRET, digest_of(DOCUMENT))

    with_server(body, served=b"lies")


def test_a_document_without_end_is_refused_by_its_length() -> None:
    """No memory is set aside for what a stranger promises."""

    async def main() -> None:
        async def promise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            (length,) = struct.unpack(">I", await reader.readexactly(4))
            assert json.loads(await reader.readexactly(length))["kind"] == "blob"
            writer.write(struct.pack(">Q", 1 << 60))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(promise, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(TransportError, match="document length"):
                await fetch_blob(f"127.0.0.1:{port}", SECRET, "0" * 32)

    asyncio.run(main())


def test_a_port_in_use_is_a_configuration_error() -> None:
    """data.port is named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            DataServer("127.0.0.1", port, SECRET, lambda _hello, _sock: None, lambda _digest: None)
    assert caught.value.field == "data.port"
