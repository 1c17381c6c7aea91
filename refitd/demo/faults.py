"""Kill or stop one party at a chosen point of the second refit, bring it back, and say when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from refitd.demo.cluster import Cluster, Daemon, descendants, kill, movers
from refitd.demo.parties import Client

VICTIMS = ("trainer", "engine", "mover", "daemon", "node", "sources")
PLANTS = ("skip-trailer", "early-apply")
STRUCK_REFIT = 2
STOP_SECONDS = 15.0
RESTART_SECONDS = 1.0

Revive = Callable[[Client], Awaitable[None]]


@dataclass
class Targets:
    """What a fault hits: daemons and clients that must come back, and every process that gets the signal."""

    name: str
    daemons: list[Daemon] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    movers: list[int] = field(default_factory=list)

    def mark(self, *, down: bool) -> None:
        """Say of all of them that they are away, or back."""
        for daemon in self.daemons:
            daemon.down = down
        for client in self.clients:
            client.down = down

    def pids(self) -> list[int]:
        below = [pid for daemon in self.daemons for pid in [daemon.pid, *descendants(daemon.pid)]]
        return [*below, *(client.pid for client in self.clients), *self.movers]


def choose(victim: str, fact: dict[str, Any], cluster: Cluster, clients: list[Client]) -> Targets:
    """Whom a fault hits when ``fact`` was reported: the one who reached the point where that is fitting."""
    daemons, pid = cluster.daemons, fact.get("pid")
    match victim:
        case "trainer":
            return Targets("trainer 0", clients=[c for c in clients if c.name == "trainer 0"])
        case "engine":
            return Targets("r0 rank 1", clients=[c for c in clients if c.name == "r0 rank 1"])
        case "sources":
            return Targets("all trainers", clients=[c for c in clients if c.trains])
        case "mover":
            mine = movers(daemons["c"])
            here = [pid] if pid in [*mine, *movers(daemons["d"])] else mine[:1]
            return Targets(f"mover {here}", movers=here)
        case "daemon":
            hit = next((d for d in daemons.values() if d.pid == pid), daemons["c"])
            return Targets(f"daemon {hit.name}", daemons=[hit])
    node = "a" if fact["name"] == "offer" else "d"
    return Targets(f"node {node}", [daemons[node]], [c for c in clients if c.daemon.name == node])


@dataclass
class Fault:
    """A fault that waits for its moment. Without ``phase`` it never comes."""

    phase: str = ""
    victim: str = ""
    signal: str = "KILL"
    plant: str = ""
    struck_at: float = 0.0
    returned_at: float = 0.0
    target: str = ""
    planted: int = 0
    _pids: list[int] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether the victim is away."""
        return bool(self.struck_at) and not self.returned_at

    @property
    def pending(self) -> bool:
        """Whether the fault is still to come."""
        return bool(self.phase) and not self.struck_at

    def strike(self, targets: Targets) -> None:
        """Hit the targets now; on return the signals are sent."""
        self.target, self.struck_at = targets.name, time.monotonic()
        targets.mark(down=True)
        self._pids = targets.pids()
        self._send(Signals.SIGKILL if self.signal == "KILL" else Signals.SIGSTOP)

    async def bring_back(self, targets: Targets, cluster: Cluster, revive: Revive) -> None:
        """Restart what was killed after a second; let what was stopped go on after 15 seconds."""
        if self.signal == "KILL":
            await asyncio.sleep(RESTART_SECONDS)
            await restart(targets, cluster, revive)
        else:
            await asyncio.sleep(STOP_SECONDS)
            self._send(Signals.SIGCONT)
            targets.mark(down=False)
        self.returned_at = time.monotonic()

    def _send(self, number: Signals) -> None:
        for pid in self._pids:
            kill(pid, number)


async def restart(targets: Targets, cluster: Cluster, revive: Revive) -> None:
    """Begin new lives of all targets; on return daemons answer and clients are registered (or ended again)."""
    for daemon in targets.daemons:
        if daemon.process is not None:
            daemon.process.wait()
        daemon.start(cluster.failpoints)
    for daemon in targets.daemons:
        while not daemon.answers() and daemon.exited() is None:
            await asyncio.sleep(0.05)
    await asyncio.gather(*(revive(client) for client in targets.clients))


class FailpointServer:
    """Answers every failpoint of every process: one JSON line in, ``go`` or ``skip`` out.

    ``on_point(fact)`` is called (in the event loop) before the answer, and gives it.
    """

    def __init__(self, path: Path, on_point: Callable[[dict[str, Any]], str]) -> None:
        self.path, self._on_point = path, on_point
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self.path)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            line = await reader.readline()
            if line:
                writer.write(self._on_point(json.loads(line)).encode() + b"\n")
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def close(self) -> None:
        """Stop listening; points that are reached later mean ``go``."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self.path.unlink(missing_ok=True)
