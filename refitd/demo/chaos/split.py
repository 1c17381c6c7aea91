"""A replica across two nodes, struck between verify and the last apply: ``python -m refitd.demo.chaos split``.

A calm publication lists the points that the replica's parties pass from the first ``verify`` to the last ``applied``:
failpoints, and every effect on another process. Then, at each of them, each party is killed and the two nodes are cut
apart, one at a time and with nothing newer published meanwhile; at the phases themselves the other node is also cut off
from everybody until its lease has ended. The replica may serve what it had or the publication, never a mix, and must
end with the publication wherever somebody holds it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals
from typing import NamedTuple

from refitd.demo.chaos.book import Mark
from refitd.demo.chaos.nemesis import End, both_ways, cut, send
from refitd.demo.chaos.network import MEMBERS
from refitd.demo.chaos.schedule import NODES, STOPPED
from refitd.demo.chaos.session import CONVERGE_SECONDS, Fact, Outcome, Session, play, rest, say
from refitd.demo.chaos.world import World
from refitd.demo.cluster import Daemon
from refitd.demo.faults import Targets
from refitd.demo.parties import Client, Engine, until
from refitd.failpoints import PHASES

REPLICAS = ("r0", "r2")  # in_place and host_shadow; each has a rank on c and one on d
ENDS = ("lead", "other")
ROLES = ("engine", "mover", "daemon")
APART, CUT_OFF = "nodes apart", "other node cut off"
LAST = "effect:request applied"
REACH_SECONDS = 20.0
DEAD_SECONDS, APART_SECONDS = 0.5, 2.0
_LISTINGS = 3  # a publication may be skipped


class Case(NamedTuple):
    """At ``point`` of ``party`` (``lead daemon`` and so on), ``fault`` (``kill lead daemon`` and so on)."""

    replica: str
    party: str
    point: str
    fault: str


@dataclass
class Cast:
    """Who is who in a replica now. Movers by pid; they change with each life."""

    engines: dict[str, Client]
    daemons: dict[str, Daemon]
    movers: dict[str, int]

    @classmethod
    def of(cls, world: World, name: str) -> Cast:
        """Asks the daemons. Raises RefitdError, KeyError where a rank has no mover now."""
        replica = next(replica for replica in world.scene.replicas if replica.name == name)
        engines = dict(zip(ENDS, replica.engines, strict=True))
        movers = {}
        for end, engine in engines.items():
            mine = {rank["key"]: rank["mover"] for rank in engine.daemon.status()["ranks"]}
            movers[end] = int(mine[f"engine/{name}/{engine.rank}"])
        return cls(dict(engines), {end: engine.daemon for end, engine in engines.items()}, movers)

    def party(self, pid: int) -> str:
        """What a process is in the replica; empty where it has no part in it."""
        for end in ENDS:
            mine = (self.engines[end].pid, self.movers[end], self.daemons[end].pid)
            if pid in mine:
                return f"{end} {ROLES[mine.index(pid)]}"
        return ""

    def targets(self, party: str) -> Targets:
        end, role = party.split()
        if role == "mover":
            return Targets(party, movers=[self.movers[end]])
        if role == "engine":
            return Targets(party, clients=[self.engines[end]])
        return Targets(party, daemons=[self.daemons[end]])


@dataclass
class Split:
    """The two halves: list, then strike."""

    session: Session
    armed: Path
    points: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @property
    def world(self) -> World:
        return self.session.world

    # The points.

    async def look(self, replica: str) -> None:
        """Fill `points` with what a calm publication passes. Raises TimeoutError."""
        await self._calm()
        cast, seen = await self._cast(replica), list[Fact]()
        self.session.seen = seen.append
        self.armed.write_text("*")
        try:
            for _ in range(_LISTINGS):
                seen.clear()
                mark = await self.world.publish_one()
                await self.world.reaches(partial(_itself, mark), REACH_SECONDS)
                await asyncio.sleep(0.2)  # what is said after the switch
                if found := _window(seen, replica, cast):
                    self.points[replica] = found
                    return
        finally:
            self.armed.write_text("")
            self.session.seen = lambda _fact: None
        raise TimeoutError(f"{replica}: no publication went through without a fault")

    async def _calm(self) -> Mark:
        """Publications come one by one from now on; the one that all serve. Raises TimeoutError."""
        self.world.publishing.clear()
        for _ in range(_LISTINGS):
            mark = await self.world.publish_one()
            if await self.world.reaches(partial(_itself, mark), REACH_SECONDS) is not None:
                return mark
        raise TimeoutError(f"not all serve {tuple(mark)} without a fault: {self.world.describe()}")

    async def _cast(self, replica: str) -> Cast:
        deadline = time.monotonic() + CONVERGE_SECONDS
        while True:
            try:
                return await asyncio.to_thread(Cast.of, self.world, replica)
            except (KeyError, TypeError, OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{replica} has no movers: {error!r}") from error
                await asyncio.sleep(0.1)

    def cases(self) -> Iterator[Case]:
        """Every fault at every point."""
        kills = [f"kill {end} {role}" for role in ROLES for end in ENDS]
        for replica, points in self.points.items():
            for party, name in points:
                for fault in (*kills, APART, *([CUT_OFF] if name in PHASES else [])):
                    yield Case(replica, party, name, fault)

    # The faults.

    async def strike(self, number: int, case: Case) -> Outcome:
        """One fault in one publication; what became of it."""
        told = {"kind": f"{case.replica}: {case.fault}", "victim": case.party, "phase": case.point}
        outcome, world = Outcome(number, [told], quiet=True, name=", ".join(case)), self.world
        before, cast = await self._calm(), await self._cast(case.replica)
        world.book.since.clear()
        hit = asyncio.create_task(self._hit(case, cast))
        await asyncio.sleep(0)
        self.armed.write_text(case.point.removeprefix("effect:"))
        mark = await world.publish_one()
        try:
            await hit
        except TimeoutError as error:
            outcome.why.append(str(error))
        undone = time.monotonic()
        outcome.why += await self.assert_one_end(case.replica, before, mark)
        world.publishing.set()
        outcome.why += await self.session.assert_i7_fresh()
        outcome.recovery = round(time.monotonic() - undone, 2)
        await self.session.judge(outcome)
        return outcome

    async def _hit(self, case: Case, cast: Cast) -> None:
        def wanted(fact: Fact) -> bool:
            return fact["name"] == case.point and cast.party(fact["pid"]) == case.party

        def act(fact: Fact) -> End:
            if not fact["pid"]:
                raise TimeoutError(f"nobody passed {case.party} {case.point} within {REACH_SECONDS:g} s")
            return self._begin(case, cast)

        try:
            end = await self.session.at(wanted, act, REACH_SECONDS)
        finally:
            self.armed.write_text("")
        held = {APART: APART_SECONDS, CUT_OFF: STOPPED}.get(case.fault, DEAD_SECONDS)
        await asyncio.sleep(held)
        await end()

    def _begin(self, case: Case, cast: Cast) -> End:
        if case.fault.startswith("kill "):
            return send(self.world, Signals.SIGKILL, cast.targets(case.fault.removeprefix("kill ")))
        lead, other = (cast.daemons[end].name for end in ENDS)
        others = [lead] if case.fault == APART else [*NODES, *MEMBERS]
        return cut(self.world.network, [way for one in others for way in both_ways(one, other)])

    # What must hold.

    async def assert_one_end(self, replica: str, before: Mark, mark: Mark) -> list[str]:
        """I1, I2: before or after, as a whole, and after wherever a live replica has what trainers were told of."""
        world = self.world

        def ended() -> bool:
            lost = world.told and mark not in world.book.told and not world.holders(mark)
            return lost or world.book.serving(replica) == mark  # lost: it has what it had, or waits for the next one

        await until(lambda: ended() or bool(world.scene.dead()), world.scene.changed, CONVERGE_SECONDS)
        why = []
        if not ended() and await asyncio.to_thread(self._there_is, mark):
            why.append(f"I1: {replica} did not end at {tuple(mark)}, which is there: {world.describe()}")
        if others := world.book.since.get(replica, set()) - {before, mark}:
            why.append(f"I1: {replica} served {sorted(others)} between {tuple(before)} and {tuple(mark)}")
        return why

    def _there_is(self, mark: Mark) -> bool:
        """Whether trainers were told of it, and a live replica that serves it can be read: a daemon that came anew has
        an in_place rank's memory only when that one lends it again."""
        holders = self.world.holders(mark) if mark in self.world.book.told else []
        replicas = [replica for replica in self.world.scene.replicas if replica.name in holders]
        return any(all(_lends(replica.name, engine) for engine in replica.engines) for replica in replicas)


def _lends(replica: str, engine: Engine) -> bool:
    key = f"engine/{replica}/{engine.rank}"
    return any(rank["lends"] for rank in engine.daemon.status()["ranks"] if rank["key"] == key)


def _itself(mark: Mark) -> Mark:
    return mark


def _window(seen: list[Fact], replica: str, cast: Cast) -> list[tuple[str, str]]:
    """Points of the replica's parties from its first ``verify`` to its last word that weights are applied."""
    engines = [engine.pid for engine in cast.engines.values()]
    first = next((i for i, fact in enumerate(seen) if fact["name"] == "verify" and fact.get("lane") == replica), None)
    last = max((i for i, fact in enumerate(seen) if fact["name"] == LAST and fact["pid"] in engines), default=0)
    if first is None or last < first:
        return []
    found = [(cast.party(fact["pid"]), str(fact["name"])) for fact in seen[first : last + 1]]
    return list(dict.fromkeys(point for point in found if point[0]))


def main(only: str, first: int, logs: Path | None, hold: Path | None, passed: Collection[str] = ()) -> int:
    """All cases whose words contain ``only``, from number ``first`` on, until one fails; those whose names have
    ``passed`` are left out."""
    handle, armed = tempfile.mkstemp(prefix="refitd-effects-")
    os.close(handle)
    os.environ["REFITD_EFFECTS"] = armed

    async def work(session: Session) -> bool:
        split = Split(session, Path(armed))
        for replica in REPLICAS:
            await split.look(replica)
        chosen = [case for case in split.cases() if only in ", ".join(case)]
        say({"points": [[replica, *point] for replica, points in split.points.items() for point in points]})
        for number, case in enumerate(chosen, 1):
            if number >= first and ", ".join(case) not in passed:
                await rest(session, hold, publish=False)
                outcome = await split.strike(number, case)
                say(asdict(outcome))
                if outcome.why:
                    return False
        return bool(chosen)

    try:
        return play(work, logs)
    finally:
        os.unlink(armed)
