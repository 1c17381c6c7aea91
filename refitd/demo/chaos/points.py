"""A kill and a pause at every effect boundary: ``python -m refitd.demo.chaos points``.

A clean run, with the disturbances that some points need, lists every point that a process passes before it has an
effect on another: who passes it, and its name. Then each of them is struck, once with SIGKILL and once with SIGSTOP
(a daemon past its lease), in the process that passes it, while it waits there; and all must be well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from signal import Signals
from typing import NamedTuple

from refitd.demo.chaos.nemesis import End, older_checkpoint, send
from refitd.demo.chaos.schedule import STOPPED
from refitd.demo.chaos.session import Fact, Outcome, Session, play, rest, say
from refitd.demo.chaos.world import World
from refitd.demo.faults import Targets

CALM_SECONDS = 4.0  # what a disturbance is given to show its points
REACH_SECONDS = 60.0
STILL_SECONDS = 5.0  # of a mover or a client, which has no lease: its deadlines are shorter
DOWN_SECONDS = 1.0


class Point(NamedTuple):
    """Who passes it (daemon, mover, trainer, engine), and its name."""

    role: str
    name: str


def _nothing(_world: World) -> End:
    async def end() -> None:
        return

    return end


def _client(name: str) -> Callable[[World], End]:
    def disturb(world: World) -> End:
        victims = [client for client in world.scene.clients if client.name == name]
        return send(world, Signals.SIGKILL, Targets(name, clients=victims))

    return disturb


def _daemon(node: str) -> Callable[[World], End]:
    return lambda world: send(world, Signals.SIGKILL, Targets(node, daemons=[world.scene.cluster.daemons[node]]))


# What brings a point about, the least first.
DISTURBANCES: dict[str, Callable[[World], End]] = {
    "nothing": _nothing,
    "an engine dies": _client("r0 rank 0"),
    "a trainer dies": _client("trainer 3"),
    "an older checkpoint": older_checkpoint,
    "daemon c dies": _daemon("c"),
    "daemon b dies": _daemon("b"),
}


def case_name(point: Point, signal: Signals) -> str:
    """What a journal calls a signal at a point."""
    return f"{signal.name} {' '.join(point)}"


class Points:
    """The two halves: list, then strike."""

    def __init__(self, session: Session, armed: Path) -> None:
        """``armed``: the file that says which effects are reported."""
        self._armed = armed
        self._session, self._world = session, session.world
        self._seen: set[Point] = set()
        self.found: dict[Point, str] = {}  # with the least disturbance that brings it about
        session.seen = self._see

    def _see(self, fact: Fact) -> None:
        self._seen.add(Point(self._role(fact["pid"]), fact["name"]))

    def _role(self, pid: int) -> str:
        targets = self._owner(pid)
        if targets.clients:
            return "trainer" if targets.clients[0].trains else "engine"
        return "daemon" if targets.daemons else "mover"

    def _owner(self, pid: int) -> Targets:
        scene = self._world.scene
        daemons = [daemon for daemon in scene.cluster.daemons.values() if daemon.pid == pid]
        clients = [client for client in scene.clients if client.pid == pid]
        return Targets(f"process {pid}", daemons, clients, [] if daemons or clients else [pid])

    async def list(self) -> None:
        """Fill `found`."""
        self._armed.write_text("*")
        for name, disturb in DISTURBANCES.items():
            self._seen.clear()
            end = disturb(self._world)
            await asyncio.sleep(DOWN_SECONDS)
            await end()
            await asyncio.sleep(CALM_SECONDS)
            for point in sorted(self._seen):
                self.found.setdefault(point, name)
        self._armed.write_text("")

    async def strike(self, number: int, point: Point, signal: Signals) -> Outcome:
        """Hit the process that passes ``point`` there, and see that all is well again."""
        told = {"kind": f"{signal.name} at a point", "victim": " ".join(point), "phase": self.found[point]}
        outcome = Outcome(number, [told], quiet=False, name=case_name(point, signal))
        self._armed.write_text(point.name.removeprefix("effect:"))
        reached = asyncio.Event()
        await self._session.suffer(
            [self._hit(point, signal, reached), self._disturb(self.found[point], reached)], outcome
        )
        return outcome

    async def _disturb(self, name: str, reached: asyncio.Event) -> None:
        """Again, until the point is passed: some are where two things meet, and not each disturbance makes them."""
        while not reached.is_set():
            end = DISTURBANCES[name](self._world)
            await asyncio.sleep(DOWN_SECONDS)
            await end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALM_SECONDS):
                    await reached.wait()

    async def _hit(self, point: Point, signal: Signals, reached: asyncio.Event) -> None:
        def wanted(fact: Fact) -> bool:
            return fact["name"] == point.name and self._role(fact["pid"]) == point.role

        def act(fact: Fact) -> tuple[End, bool]:
            if not fact["pid"]:
                raise TimeoutError(f"nobody passed {' '.join(point)} within {REACH_SECONDS:g} s")
            targets = self._owner(fact["pid"])
            return send(self._world, signal, targets), bool(targets.daemons)

        try:
            end, leased = await self._session.at(wanted, act, REACH_SECONDS)
        finally:
            reached.set()
        self._armed.write_text("")
        await asyncio.sleep(DOWN_SECONDS if signal is Signals.SIGKILL else STOPPED if leased else STILL_SECONDS)
        await end()


def main(
    only: str, signals: list[Signals], first: int, logs: Path | None, hold: Path | None, passed: Collection[str] = ()
) -> int:
    """Strike every point whose role and name contain ``only``, from number ``first`` on, until one fails; those whose
    names have ``passed`` are left out."""
    handle, armed = tempfile.mkstemp(prefix="refitd-effects-")
    os.close(handle)
    os.environ["REFITD_EFFECTS"] = armed

    async def work(session: Session) -> bool:
        points = Points(session, Path(armed))
        await points.list()
        chosen = [point for point in sorted(points.found) if only in " ".join(point)]
        say({"points": [[*point, points.found[point]] for point in chosen]})
        cases = [(point, signal) for signal in signals for point in chosen]
        for number, case in enumerate(cases, 1):
            if number >= first and case_name(*case) not in passed:
                await rest(session, hold)
                outcome = await points.strike(number, *case)
                say(asdict(outcome))
                if outcome.why:
                    return False
        return True

    try:
        return play(work, logs)
    finally:
        os.unlink(armed)
