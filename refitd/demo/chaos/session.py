"""One cluster's share of a chaos run: wave after wave until the last one or the first failure. JSON lines on stdout."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from refitd.demo import text, weights
from refitd.demo.chaos.book import Book, Mark
from refitd.demo.chaos.nemesis import Nemesis
from refitd.demo.chaos.network import open_network
from refitd.demo.chaos.schedule import SEATS, Wave, waves
from refitd.demo.chaos.world import World
from refitd.demo.model import settle
from refitd.demo.nursery import Nursery
from refitd.demo.scene import client_body, keep_logs

CONVERGE_SECONDS = 60.0  # I7
WARM_SECONDS = 60.0
PHASE_SECONDS = 5.0  # a phase that nobody reaches is not waited for any longer


@dataclass
class Outcome:
    """How a wave went. ``why`` is empty where all was well; ``recovery``: seconds from the end of its last fault."""

    wave: int
    strikes: list[dict[str, Any]]
    quiet: bool
    recovery: float | None = None
    torn: int = 0
    lost: int = 0
    back: int = 0
    why: list[str] = field(default_factory=list)


class Session:
    """Runs waves on one world."""

    def __init__(self, folder: Path, nursery: Nursery, spec: weights.Spec, start: weights.Weights) -> None:
        self.network = open_network(_node_of)
        self.book = Book(spec, start)
        self.world = World(folder, nursery, self.book, self.network, self._point)
        self._waiting: list[tuple[str, asyncio.Event]] = []

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
        outcome.why += [repr(e) for e in await asyncio.gather(*strikes, return_exceptions=True) if e]
        undone = time.monotonic()
        if wave.quiet:
            outcome.why += await self._quiet_end(undone)
        outcome.why += await self._fresh()
        outcome.recovery = round(time.monotonic() - undone, 2)
        self._judge(outcome)
        return outcome

    async def _strike(self, strike: Any, begun: asyncio.Event) -> None:
        await self._moment(strike.phase, strike.delay)
        nemesis = Nemesis(self.world, strike)
        try:
            end = nemesis.begin()
        finally:
            begun.set()
        _say(f"  {strike} {nemesis.done}")
        await asyncio.sleep(strike.hold)
        await end()

    async def _moment(self, phase: str, delay: float) -> None:
        if not phase:
            return await asyncio.sleep(delay)
        reached = asyncio.Event()
        self._waiting.append((phase, reached))
        try:
            async with asyncio.timeout(PHASE_SECONDS):
                await reached.wait()
        except TimeoutError:
            self._waiting.remove((phase, reached))
        return None

    def _point(self, fact: dict[str, Any]) -> None:
        due = [entry for entry in self._waiting if entry[0] == fact["name"]]
        for entry in due:
            self._waiting.remove(entry)
            entry[1].set()

    async def _hush(self, begun: list[asyncio.Event]) -> None:
        for event in begun:
            await event.wait()
        self.world.publishing.clear()

    async def _quiet_end(self, undone: float) -> list[str]:
        """Nothing is published: whoever lives must reach what was committed last, as long as anybody holds it."""
        world, told = self.world, max(self.book.told, default=Mark(0, 0))
        left = CONVERGE_SECONDS - (time.monotonic() - undone)
        if told != world.newest:  # the last offer was skipped: there is nothing to reach but what is there
            left = min(left, 5.0)
        reached = await world.reaches(lambda: max(self.book.told, default=Mark(0, 0)), left)
        why = []
        told = max(self.book.told, default=Mark(0, 0))
        if reached is None and told == world.newest and world.holders(told):
            why.append(
                f"in silence not all reached {tuple(told)}, which {world.holders(told)} hold: {world.describe()}"
            )
        self.world.publishing.set()
        return why

    async def _fresh(self) -> list[str]:
        """Whoever lives must reach a publication that began after the last fault's end."""
        began = self.world.newest
        seconds = await self.world.reaches(lambda: Mark(began.run, began.step + 1), CONVERGE_SECONDS)
        return [] if seconds is not None else [f"not all reached {began.run, began.step + 1}: {self.world.describe()}"]

    def _judge(self, outcome: Outcome) -> None:
        book, world = self.book, self.world
        lost = book.lost(replica.name for replica in world.live)
        outcome.torn, outcome.lost, outcome.back = len(book.torn), len(lost), len(book.back)
        outcome.why += [f"torn: {line}" for line in book.torn[:3]] + [f"went back: {line}" for line in book.back[:3]]
        outcome.why += [f"lost: {tuple(mark)}" for mark in lost[:3]] + [f"{name} died" for name in world.scene.dead()]

    async def stop(self) -> None:
        await self.world.stop()


def _node_of(key: str) -> str:
    """The node of a rank key."""
    side, group, rank = key.split("/")
    return "ab"[int(rank) // 2] if side == "trainer" else SEATS[f"{group} rank {rank}"]


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


async def _run(session: Session, mine: Sequence[Wave], logs: Path | None) -> bool:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    good = False
    try:
        why = await session.start()
        if why:
            print(json.dumps({"broken": why}), flush=True)  # noqa: T201
            return False
        print(json.dumps({"network": session.network.name}), flush=True)  # noqa: T201
        for wave in mine:
            outcome = await session.wave(wave)
            print(json.dumps(asdict(outcome)), flush=True)  # noqa: T201
            if outcome.why:
                return False
        good = True
    finally:
        if logs and not good:
            keep_logs(session.world.scene.folder, logs)
        await session.stop()
    return good


def main(seed: int, count: int, only: str, first: int, logs: Path | None) -> int:
    """Waves of (``seed``, ``count``, ``only``) from number ``first`` on; 1 where one failed, which was the last then.

    Its logs go to ``logs``.
    """
    settle()
    spec = weights.SMALL
    start = weights.make(spec)
    ids, _mask = text.encode(text.SENTENCES, None, spec.vocab)
    nursery = Nursery.start(client_body(spec, start, ids))
    folder = Path(tempfile.mkdtemp(prefix="refitd-chaos-"))
    try:
        mine = [wave for wave in waves(seed, count, only) if wave.number >= first]
        return 0 if asyncio.run(_run(Session(folder, nursery, spec, start), mine, logs)) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
