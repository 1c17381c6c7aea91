"""How long a refit takes when something dies in the middle of it: ``python -m refitd.demo.chaos recovery``.

Publications come one at a time. Each case strikes in one of them and measures from its publish until replicas serve it
or a later one, less the median of refits without a fault. Seconds throughout.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from signal import Signals
from typing import Any

from refitd.demo.chaos.book import Mark
from refitd.demo.chaos.nemesis import send
from refitd.demo.chaos.network import MEMBERS
from refitd.demo.chaos.schedule import NODES
from refitd.demo.chaos.session import Fact, Session, play, rest, say
from refitd.demo.cluster import movers
from refitd.demo.faults import Targets
from refitd.demo.parties import until
from refitd.demo.scene import JOB
from refitd.errors import RefitdError
from refitd.store import open_store

LIMIT_SECONDS = 60.0
CALM = 10  # refits that the baseline is the median of
QUORUM_SECONDS = 30.0
AGAIN_SECONDS = 0.5  # publications that are skipped come again
PAUSE_SECONDS = 1.0  # between two cases
RELEASE_SECONDS = 30.0  # else a trainer takes its memory back before the lease of a lost node has ended

Row = dict[str, float | bool]
Case = Callable[["Recovery"], Awaitable[Row]]


class Recovery:
    """Cases, and what they need."""

    def __init__(self, session: Session) -> None:
        self.session, self.world = session, session.world
        self.usual = 0.0

    async def calm(self) -> None:
        """Measure what a refit takes without a fault."""
        self.usual = statistics.median([max((await self.refit()).values()) for _ in range(CALM)])

    async def refit(self) -> dict[str, float]:
        """One publication: seconds until each replica served it, or a later one that replaced a skipped one."""
        mark, began = await self.world.publish_one(), time.monotonic()
        return await self._served(mark, began, [replica.name for replica in self.world.scene.replicas])

    async def _served(self, mark: Mark, began: float, names: list[str]) -> dict[str, float]:
        """Publishes on while nobody has the publication, as trainers would."""
        found: dict[str, float] = {}

        def look() -> bool:
            for name in names:
                if name not in found and (self.world.book.serving(name) or Mark(0, 0)) >= mark:
                    found[name] = time.monotonic() - began
            return len(found) == len(names)

        while not await until(look, self.world.scene.changed, AGAIN_SECONDS):
            if time.monotonic() - began > LIMIT_SECONDS:
                raise TimeoutError(f"{sorted(set(names) - set(found))} did not reach {tuple(mark)}")
            if self._skipped():
                await self.world.publish_one()
        return found

    def _skipped(self) -> bool:
        step = self.world.step
        there = [t for t in self.world.scene.trainers if t.ready and not t.down]
        return bool(there) and all(step in t.reported for t in there)

    def tokens(self) -> dict[str, int]:
        """Each replica's lane token: another one is another attempt."""
        for daemon in self.world.scene.cluster.daemons.values():
            try:
                lanes = daemon.status()["jobs"][JOB]["lanes"]
            except (RefitdError, KeyError):
                continue
            return {lane["replica"]: lane["token"] for lane in lanes}
        return {}

    def tell_turns(self, before: dict[str, int]) -> None:
        """Why lanes have other tokens now, for whoever asks."""
        for replica, stored in [*self.session.witness.witness.view.lanes.items()]:  # its thread goes on
            if stored.revision != before.get(replica):
                sys.stderr.write(f"{replica} turned at {stored.revision}: {stored.value.reason}\n")

    async def strike(self, act: Callable[[Fact], Any], who: Callable[[Fact], bool] = lambda _fact: True) -> Any:
        """Publish, and act at the first transfer (of those who are wanted), while the mover waits there."""
        waiting = asyncio.create_task(
            self.session.at(lambda f: f["name"] == "transfer" and who(f), lambda f: (act(f), f, time.monotonic()))
        )
        await asyncio.sleep(0)
        mark, began = await self.world.publish_one(), time.monotonic()
        return (*await waiting, mark, began)

    async def timed(self, mark: Mark, began: float, touched: set[str]) -> Row:
        """The slowest touched and the slowest other replica, beyond the usual."""
        names = [replica.name for replica in self.world.scene.replicas]
        served = await self._served(mark, began, names)
        row: Row = {"touched": max(served[name] for name in touched) - self.usual}
        if others := set(names) - touched:
            row["untouched"] = max(served[name] for name in others) - self.usual
        return row


async def mover_dies(recovery: Recovery) -> Row:
    """A mover of r1, whose ranks are on one node. The lane of r2 reads from it there, so it turns, too."""
    world = recovery.world

    def kill(fact: Fact) -> None:
        send(world, Signals.SIGKILL, Targets("a mover", movers=[fact["pid"]]))

    _, _, _, mark, began = await recovery.strike(kill, lambda fact: str(fact.get("key")).startswith("engine/r1/"))
    return await recovery.timed(mark, began, {"r1", "r2"})


async def trainer_dies(recovery: Recovery) -> Row:
    """A trainer process: every lane reads from it. It comes back after the refit."""
    victims = [client for client in recovery.world.scene.clients if client.name == "trainer 0"]
    end, _, _, mark, began = await recovery.strike(
        lambda _fact: send(recovery.world, Signals.SIGKILL, Targets("trainer 0", clients=victims))
    )
    row = await recovery.timed(mark, began, {"r0", "r1", "r2"})
    await end()
    return row


async def engine_dies(recovery: Recovery) -> Row:
    """An engine process of r1, back at once; from its return until its replica serves. Only r0 never reads from it."""
    world = recovery.world
    victims = [client for client in world.scene.clients if client.name == "r1 rank 0"]
    end, _, _, mark, began = await recovery.strike(
        lambda _fact: send(world, Signals.SIGKILL, Targets("r1 rank 0", clients=victims))
    )
    others = asyncio.create_task(recovery._served(mark, began, ["r0"]))
    await end()
    back = time.monotonic()
    served = await recovery._served(mark, back, ["r1"])
    return {"touched": served["r1"] - recovery.usual, "untouched": max((await others).values()) - recovery.usual}


async def node_lost(recovery: Recovery) -> Row:
    """Node a, with two trainers, cut off from everybody: from the cut until all replicas serve something newer."""
    network = recovery.world.network
    cuts = [cut for other in (*NODES, *MEMBERS) for cut in (("a", other), (other, "a")) if network.can_cut(*cut)]

    def cut_off(_fact: Fact) -> None:
        for cut in cuts:
            network.cut(*cut)

    _, _, struck, mark, _ = await recovery.strike(cut_off)
    served = await recovery._served(Mark(mark.run, mark.step), struck, ["r0", "r1", "r2"])
    for cut in cuts:
        network.heal(*cut)
    await recovery.session.world.reaches(lambda: mark, LIMIT_SECONDS)
    await _all_back(recovery)
    return {"touched": max(served.values())}


async def leader_dies(recovery: Recovery) -> Row:
    """The etcd leader, in the middle of a transfer: the refit ends under the tokens that it began with."""
    etcd = recovery.world.network.etcd
    before, leader = await asyncio.to_thread(recovery.tokens), await asyncio.to_thread(etcd.leader)
    _, _, _, mark, began = await recovery.strike(lambda _fact: etcd.kill(leader))
    row = await recovery.timed(mark, began, {"r0", "r1", "r2"})
    row["same attempt"] = before == await asyncio.to_thread(recovery.tokens)
    if not row["same attempt"]:
        recovery.tell_turns(before)
    await asyncio.to_thread(etcd.restart, leader)
    await _all_back(recovery)
    return row


async def quorum_lost(recovery: Recovery) -> Row:
    """Two of three etcd members stand still for 30 s; from the first write that etcd takes until a replica has more."""
    world, etcd = recovery.world, recovery.world.network.etcd
    before = [pid for daemon in world.scene.cluster.daemons.values() for pid in [daemon.pid, *movers(daemon)]]
    world.publishing.set()
    for i in (1, 2):
        etcd.freeze(i)
    await asyncio.sleep(QUORUM_SECONDS)
    serving = all(world.book.serving(replica.name) for replica in world.scene.replicas)
    mark = world.newest
    for i in (1, 2):
        etcd.thaw(i)
    written = await asyncio.to_thread(_first_write, etcd.url)
    await until(lambda: bool(world.holders(mark)), world.scene.changed, LIMIT_SECONDS)
    row: Row = {"first commit": time.monotonic() - written, "engines served": serving}
    after = [pid for daemon in world.scene.cluster.daemons.values() for pid in [daemon.pid, *movers(daemon)]]
    row["nothing restarted"] = before == after
    world.publishing.clear()
    await _all_back(recovery)
    return row


def _first_write(url: str) -> float:
    store = open_store(url)
    try:
        while True:
            try:
                store.put("/chaos/first", b"")
            except RefitdError:
                continue
            return time.monotonic()
    finally:
        store.close()


async def joiner(recovery: Recovery) -> Row:
    """r1 comes back while no trainer runs: what it gets, it gets from neighbours."""
    world = recovery.world
    newest = world.newest
    trainers = Targets("trainers", clients=[client for client in world.scene.clients if client.trains])
    engines = Targets("r1", clients=[client for client in world.scene.clients if client.name.startswith("r1 ")])
    back, end = send(world, Signals.SIGKILL, trainers), send(world, Signals.SIGKILL, engines)
    world.book.hold("r1")
    await end()
    began = time.monotonic()
    if not await until(lambda: world.at_least(newest), world.scene.changed, LIMIT_SECONDS):
        raise TimeoutError(f"r1 did not reach {tuple(newest)} without trainers: {world.describe()}")
    row: Row = {"from neighbours": time.monotonic() - began}
    await back()
    return row


async def _all_back(recovery: Recovery) -> None:
    """Whole again before the next run: everybody serves a refit of its own, and no lane turns any more for the last."""
    for _ in range(3):
        await recovery.refit()
    before, now = dict[str, int](), await asyncio.to_thread(recovery.tokens)
    while now != before:
        await asyncio.sleep(PAUSE_SECONDS)
        await recovery.refit()
        before, now = now, await asyncio.to_thread(recovery.tokens)


CASES: dict[str, Case] = {
    "mover dies": mover_dies,
    "trainer dies": trainer_dies,
    "engine dies": engine_dies,
    "node lost": node_lost,
    "etcd leader dies": leader_dies,
    "etcd quorum lost for 30 s": quorum_lost,
    "joiner": joiner,
}


def main(only: str, runs: int, logs: Path | None, hold: Path | None) -> int:
    """``runs`` rounds of the cases whose name contains ``only``; says the medians, and the worst.

    Each round has every case once: a mover that dies more often than its daemon finds usual is started later each time.
    """
    cases = {name: case for name, case in CASES.items() if only in name}

    async def work(session: Session) -> bool:
        session.world.publishing.clear()
        session.world.release_seconds = RELEASE_SECONDS
        recovery = Recovery(session)
        rows: dict[str, list[Row]] = {name: [] for name in cases}
        await asyncio.sleep(1.0)
        await recovery.calm()
        say({"usual": round(recovery.usual, 3)})
        for number in range(1, runs + 1):
            for name, case in cases.items():
                await rest(session, hold, publish=False)
                rows[name].append(await case(recovery))
                _tell(number, name, rows[name][-1])
                await asyncio.sleep(PAUSE_SECONDS)
        for name, found in rows.items():
            say({"case": name, "runs": runs, **_medians(found)})
        await asyncio.to_thread(session.witness.catch_up)
        book, witness, dead = session.book, session.witness, session.world.scene.dead()
        say({"torn": len(book.torn), "back": len(book.back), "died": dead, "violations": witness.broken[:3]})
        say({"records": witness.news()})
        return not (book.torn or book.back or dead or witness.broken)

    return play(work, logs)


def _tell(number: int, name: str, row: Row) -> None:
    """How a case went, for whoever waits."""
    shown = ", ".join(f"{key} {value:.3f}" if type(value) is float else f"{key} {value}" for key, value in row.items())
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {number} {name}: {shown}\n")


def _medians(rows: list[Row]) -> dict[str, Any]:
    """Of each measure the median and the worst; of each yes-or-no how often it was yes."""
    found: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        if isinstance(values[0], bool):
            found[name] = f"{sum(values)} of {len(values)}"
        else:
            found[name] = {"median": round(statistics.median(values), 3), "worst": round(max(values), 3)}
    return found
