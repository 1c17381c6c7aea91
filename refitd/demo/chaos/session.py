"""One cluster's share of a chaos run: wave after wave until the last one or the first failure. JSON lines on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from refitd.demo import text, weights
from refitd.demo.chaos.book import Book, Mark
from refitd.demo.chaos.nemesis import Nemesis
from refitd.demo.chaos.network import open_network
from refitd.demo.chaos.schedule import SEATS, Strike, Wave, waves
from refitd.demo.chaos.witness import Listener
from refitd.demo.chaos.world import World
from refitd.demo.model import settle
from refitd.demo.nursery import Nursery
from refitd.demo.scene import JOB, client_body, keep_logs
from refitd.store import open_store

T = TypeVar("T")
Work = Callable[["Session"], Coroutine[Any, Any, bool]]
Fact = dict[str, Any]  # what a failpoint says of itself

CONVERGE_SECONDS = 60.0  # I7
WARM_SECONDS = 60.0
SKIPPED_SECONDS = 5.0  # until a publication that no trainer has heard of by then counts as skipped
PHASE_SECONDS = 5.0  # a phase that nobody reaches is not waited for any longer


@dataclass
class Outcome:
    """How a wave went. ``why`` is empty where all was well; ``recovery``: seconds from the end of its last fault.

    ``records``: how many of each kind the witness has seen since the wave before, and gaps in what it saw.
    """

    wave: int
    strikes: list[dict[str, Any]]
    quiet: bool
    recovery: float | None = None
    torn: int = 0
    lost: int = 0
    back: int = 0
    why: list[str] = field(default_factory=list)
    name: str = ""  # of a case, in a journal
    records: dict[str, int] = field(default_factory=dict)


class Session:
    """Runs waves on one world."""

    def __init__(self, folder: Path, nursery: Nursery, spec: weights.Spec, start: weights.Weights) -> None:
        self.network = open_network(_node_of)
        self.book = Book(spec, start)
        self.world = World(folder, nursery, self.book, self.network, self._point)
        self.seen: Callable[[Fact], None] = lambda _fact: None
        self._store = open_store(self.network.etcd.url)
        self.witness = Listener(self._store, JOB)
        self._waiting: list[tuple[Callable[[Fact], bool], Callable[[Fact], None]]] = []

    async def start(self) -> str:
        """Start the world; why it does not refit, or nothing. Raises TimeoutError, RefitdError."""
        await self.world.start()
        good = await self.world.reaches(lambda: Mark(1, 2), WARM_SECONDS)
        return "" if good is not None else f"it never refitted: {self.world.describe()}"

    async def wave(self, wave: Wave) -> Outcome:
        """All faults of a wave, and what became of it."""
        outcome = Outcome(wave.number, [asdict(strike) for strike in wave.strikes], wave.quiet)
        begun = [asyncio.Event() for _ in wave.strikes]
        strikes = [self._strike(strike, event) for strike, event in zip(wave.strikes, begun, strict=True)]
        if wave.quiet:
            strikes.append(self._hush(begun))
        await self.suffer(strikes, outcome)
        return outcome

    async def suffer(self, faults: Sequence[Coroutine[Any, Any, None]], outcome: Outcome) -> None:
        """Let faults happen, side by side; they end by themselves. Then all must be well again."""
        outcome.why += [repr(e) for e in await asyncio.gather(*faults, return_exceptions=True) if e]
        undone = time.monotonic()
        if outcome.quiet:
            outcome.why += await self._quiet_end(undone)
        outcome.why += await self.assert_i7_fresh()
        outcome.recovery = round(time.monotonic() - undone, 2)
        await self.judge(outcome)

    async def _strike(self, strike: Strike, begun: asyncio.Event) -> None:
        nemesis = Nemesis(self.world, strike)
        try:
            if strike.phase:
                end = await self.at(lambda fact: fact["name"] == strike.phase, lambda _fact: nemesis.begin())
            else:
                await asyncio.sleep(strike.delay)
                end = nemesis.begin()
        finally:
            begun.set()
        _say(f"  {strike} {nemesis.done}")
        await asyncio.sleep(strike.hold)
        await end()

    async def at(self, wanted: Callable[[Fact], bool], act: Callable[[Fact], T], seconds: float = PHASE_SECONDS) -> T:
        """Call ``act`` while a process waits at the first point that is ``wanted``; at the latest after ``seconds``."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def reached(fact: Fact) -> None:
            try:
                done.set_result(act(fact))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits
                done.set_exception(error)

        entry = wanted, reached
        self._waiting.append(entry)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await asyncio.shield(done)
        if entry in self._waiting:
            self._waiting.remove(entry)
            reached({"name": "", "pid": 0})
        return await done

    def _point(self, fact: Fact) -> None:
        self.seen(fact)
        for entry in [entry for entry in self._waiting if entry[0](fact)]:
            self._waiting.remove(entry)
            entry[1](fact)

    async def _hush(self, begun: list[asyncio.Event]) -> None:
        for event in begun:
            await event.wait()
        self.world.publishing.clear()

    async def _quiet_end(self, undone: float) -> list[str]:
        """Nothing is published: whoever lives must reach what was committed last, as long as anybody holds it."""
        world, end = self.world, undone + CONVERGE_SECONDS

        def told() -> Mark:
            return max(self.book.told, default=Mark(0, 0))

        reached = None
        if told() != world.newest:  # to come still, or skipped: then there is nothing to reach but what is there
            reached = await world.reaches(told, SKIPPED_SECONDS)
        if told() == world.newest:
            reached = await world.reaches(told, end - time.monotonic())
        why, mark = [], told()
        if reached is None and mark == world.newest and world.holders(mark):
            text = f"I7: in silence not all reached {tuple(mark)}, which {world.holders(mark)} hold"
            why.append(f"{text}: {world.describe()}")
        self.world.publishing.set()
        return why

    async def assert_i7_fresh(self) -> list[str]:
        """Whoever lives must reach a publication that began after the last fault's end."""
        began = self.world.newest
        seconds = await self.world.reaches(lambda: Mark(began.run, began.step + 1), CONVERGE_SECONDS)
        return (
            [] if seconds is not None else [f"I7: not all reached {began.run, began.step + 1}: {self.world.describe()}"]
        )

    async def judge(self, outcome: Outcome) -> None:
        """What the book, the records and the processes say: I1 to I6, I9 and I10, and nothing lost."""
        await asyncio.to_thread(self.witness.catch_up)
        book, world = self.book, self.world
        lost = book.lost(replica.name for replica in world.live)
        outcome.torn, outcome.lost, outcome.back = len(book.torn), len(lost), len(book.back)
        outcome.why += [f"I1, I5, I6: {line}" for line in book.torn[:3]] + [f"I3: {line}" for line in book.back[:3]]
        outcome.why += self.witness.broken[:3]
        outcome.records = self.witness.news()
        outcome.why += [f"lost: {tuple(mark)}" for mark in lost[:3]] + [
            f"I9: {name} died" for name in world.scene.dead()
        ]

    async def stop(self) -> None:
        self.witness.close()
        self._store.close()
        await self.world.stop()


def _node_of(key: str) -> str:
    """The node of a rank key."""
    side, group, rank = key.split("/")
    return "ab"[int(rank) // 2] if side == "trainer" else SEATS[f"{group} rank {rank}"]


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


async def _run(session: Session, mine: Work, logs: Path | None) -> bool:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    good = False
    try:
        why = await session.start()
        say({"broken": why} if why else {"network": session.network.name})
        good = not why and await mine(session)
    finally:
        if logs and not good:
            keep_logs(session.world.scene.folder, logs)
        await session.stop()
    return good


def say(fact: dict[str, Any]) -> None:
    """A line for whoever started us."""
    print(json.dumps(fact), flush=True)


def play(work: Work, logs: Path | None) -> int:
    """Start a cluster, do ``work`` on it, end it; 0 where that returned True. Logs of others go to ``logs``."""
    settle()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for `say`
    spec = weights.SMALL
    start = weights.make(spec)
    ids, _mask = text.encode(text.SENTENCES, None, spec.vocab)
    nursery = Nursery.start(client_body(spec, start, ids))
    folder = Path(tempfile.mkdtemp(prefix="refitd-chaos-"))
    try:
        return 0 if asyncio.run(_run(Session(folder, nursery, spec, start), work, logs)) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def rest(session: Session, hold: Path | None, publish: bool = True) -> None:
    """Nothing happens as long as the file ``hold`` is there; then publications go on where they do (``publish``)."""
    while hold and hold.exists():
        session.world.publishing.clear()
        await asyncio.sleep(0.5)
    if publish:
        session.world.publishing.set()


def main(seed: int, count: int, only: str, first: int, logs: Path | None, hold: Path | None) -> int:
    """Waves of (``seed``, ``count``, ``only``) from number ``first`` on; 1 where one failed, which was the last then.

    Its logs go to ``logs``. Between two waves it waits while the file ``hold`` is there.
    """
    mine = [wave for wave in waves(seed, count, only) if wave.number >= first]

    async def work(session: Session) -> bool:
        for wave in mine:
            await rest(session, hold)
            outcome = await session.wave(wave)
            say(asdict(outcome))
            if outcome.why:
                return False
        return True

    return play(work, logs)
