"""TCP proxies with gates: what lies behind a shut gate waits, and nobody is told. They run in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from refitd.store.spawn import free_port

Whose = Callable[[str], str]  # the node of a rank key
_CHUNK = 1 << 16
_LENGTH = struct.Struct(">I")
_POLL = 0.05
_END = 5.0  # seconds that connections get to end


class Gates:
    """Which directions are shut."""

    def __init__(self) -> None:
        self._shut: frozenset[tuple[str, str]] = frozenset()
        self.closing = False

    def shut(self, source: str, target: str) -> None:
        self._shut |= {(source, target)}

    def open(self, source: str, target: str) -> None:
        self._shut -= {(source, target)}

    async def passed(self, source: str, target: str) -> None:
        """Return once nothing is in the way."""
        while (source, target) in self._shut and not self.closing:
            await asyncio.sleep(_POLL)


class Proxies:
    """All proxies of one network. ``whose`` tells which node a data connection comes from, by the rank in its hello."""

    def __init__(self, gates: Gates, whose: Whose) -> None:
        self._gates, self._whose = gates, whose
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    def to_member(self, node: str, member: str, host: str, port: int) -> int:
        """A port of ``node``'s own that leads to an etcd member."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._join(reader, writer, b"", node, member, host, port)

        front = free_port()
        self._listen(serve, front)
        return front

    def to_node(self, node: str) -> tuple[int, int]:
        """(the port that peers connect to, the port that the node's daemon must bind)."""
        front, behind = free_port(), free_port()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            hello = await _first_frame(reader)
            source = self._source(hello)
            await self._join(reader, writer, hello, source, node, "127.0.0.1", behind)

        self._listen(serve, front)
        return front, behind

    def _source(self, hello: bytes) -> str:
        with contextlib.suppress(ValueError, KeyError):
            return self._whose(json.loads(hello[_LENGTH.size :])["src"])
        return ""  # a request for a document does not say who asks: it passes

    def _listen(self, serve: Callable[[Any, Any], Awaitable[None]], port: int) -> None:
        self._run(self._start(serve, port))

    async def _start(self, serve: Callable[[Any, Any], Awaitable[None]], port: int) -> None:
        self._servers.append(await asyncio.start_server(serve, "127.0.0.1", port))

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        first: bytes,
        source: str,
        target: str,
        host: str,
        port: int,
    ) -> None:
        try:
            await self._gates.passed(source, target)
            theirs, ours = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, ours}
        ours.write(first)
        await asyncio.gather(self._pump(reader, ours, source, target), self._pump(theirs, writer, target, source))
        for each in (writer, ours):
            self._writers.discard(each)
            each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._gates.passed(source, target)
                writer.write(data)
                await writer.drain()
            await self._gates.passed(source, target)
        with contextlib.suppress(OSError):
            writer.write_eof()

    def close(self) -> None:
        """End all proxies and their thread."""
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        """Nothing is cancelled: every connection is cut, and its tasks end by themselves."""
        self._gates.closing = True
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=_END)
        await asyncio.sleep(0)  # transports close in the loop's next turn

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


async def _first_frame(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        head = await reader.readexactly(_LENGTH.size)
        return head + await reader.readexactly(min(_LENGTH.unpack(head)[0], 1 << 20))
    return b""
