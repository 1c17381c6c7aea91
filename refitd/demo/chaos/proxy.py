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


class Gates:
    """Which directions are shut."""

    def __init__(self) -> None:
        self._shut: frozenset[tuple[str, str]] = frozenset()

    def shut(self, source: str, target: str) -> None:
        self._shut |= {(source, target)}

    def open(self, source: str, target: str) -> None:
        self._shut -= {(source, target)}

    async def passed(self, source: str, target: str) -> None:
        """Return once nothing is in the way."""
        while (source, target) in self._shut:
            await asyncio.sleep(_POLL)


class Proxies:
    """All proxies of one network. ``whose`` tells which node a data connection comes from, by the rank in its hello."""

    def __init__(self, gates: Gates, whose: Whose) -> None:
        self._gates, self._whose = gates, whose
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []

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
            writer.close()
            return
        ours.write(first)
        there = asyncio.create_task(self._pump(reader, ours, source, target))
        back = asyncio.create_task(self._pump(theirs, writer, target, source))
        await asyncio.wait([there, back])

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._gates.passed(source, target)
                writer.write(data)
                await writer.drain()
            await self._gates.passed(source, target)
        with contextlib.suppress(OSError):
            writer.close()

    def close(self) -> None:
        """End all proxies and their thread."""
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


async def _first_frame(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        head = await reader.readexactly(_LENGTH.size)
        return head + await reader.readexactly(min(_LENGTH.unpack(head)[0], 1 << 20))
    return b""
