"""What the run needs of a cluster: known metrics ports, an etcd to freeze, a link to throttle, a loop to hold still."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refitd.demo.cluster import NODES, kill
from refitd.store.spawn import free_port, spawn_etcd

THROTTLED = "d"  # the node whose way in the sluice is
FLAPS = 4  # `job.flaps`: a busy machine does not start a daemon six times within a minute
PARK_SECONDS = 20  # `job.park`: an alert must have time to see it
_CHUNK_SECONDS = 0.1


class Wires:
    """Everything on loopback (a `refitd.demo.cluster.Wiring`).

    Each daemon serves metrics on a port known before it runs, so that it keeps it over restarts, and reaches the
    failpoints of `held` where it is one of them.
    """

    def __init__(self, sluice: Sluice, held: dict[str, Path]) -> None:
        self._etcd, self._sluice, self._held = spawn_etcd(prefer="distro"), sluice, held
        self.metrics = {f"node-{node}": f"127.0.0.1:{free_port()}" for node in NODES}

    def store(self, node: str) -> str:
        del node
        return self._etcd.url

    def data(self, node: str) -> dict[str, str | int]:
        if node != THROTTLED:
            return {"host": "127.0.0.1", "port": 0}
        front, behind = self._sluice.ports
        return {"host": "127.0.0.1", "port": behind, "advertise": f"127.0.0.1:{front}"}

    def enter(self, node: str) -> Sequence[str]:
        """The daemon's environment says what its file does not."""
        more = {"METRICS__LISTEN": self.metrics[f"node-{node}"], "JOB__FLAPS": FLAPS, "JOB__PARK": PARK_SECONDS}
        known = [f"REFITD_{key}={value}" for key, value in more.items()]
        return ["env", *known, *([f"REFITD_FAILPOINTS={self._held[node]}"] if node in self._held else [])]

    def freeze(self) -> None:
        """etcd stands still."""
        kill(self._etcd.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """etcd goes on."""
        kill(self._etcd.pid, signal.SIGCONT)

    def close(self) -> None:
        self.thaw()
        self._etcd.stop()


class Sluice:
    """A TCP relay in the caller's event loop. ``rate``: bytes a second that pass to the daemon; None: all."""

    def __init__(self) -> None:
        self.ports = free_port(), free_port()
        self.rate: float | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self.ports[0])

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.ports[1])
        except OSError:
            writer.transport.abort()
            return
        both = {writer, ours}
        self._writers |= both
        await asyncio.gather(self._pump(reader, ours, slow=True), self._pump(theirs, writer, slow=False))
        self._writers -= both
        for each in both:
            each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(max(1, int(self.rate * _CHUNK_SECONDS)) if slow and self.rate else 1 << 16):
                writer.write(data)
                await writer.drain()
                if slow and self.rate:
                    await asyncio.sleep(len(data) / self.rate)
            writer.write_eof()

    async def close(self) -> None:
        """Cut every connection and stop listening."""
        for writer in self._writers:
            writer.transport.abort()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


class Holder:
    """Answers the failpoints of one daemon and its movers; while `hold` is in force the daemon gets no answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._go = asyncio.Event()
        self._go.set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self.path)

    def hold(self) -> None:
        """The daemon's loop stands still at the next point that it reaches."""
        self._go.clear()

    def release(self) -> None:
        """It goes on."""
        self._go.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            fact: dict[str, Any] = json.loads(await reader.readline() or b"{}")
            if fact.get("role") == "daemon":
                await self._go.wait()
            writer.write(b"go\n")
            await writer.drain()
        writer.close()

    async def close(self) -> None:
        """Nobody is held any more."""
        self.release()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
