"""The cluster under fire: nodes, trainers that publish all the time, replicas, and the book that is kept of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refitd.demo.chaos.book import Book, Mark
from refitd.demo.chaos.network import Network
from refitd.demo.nursery import Nursery
from refitd.demo.parties import Client, Replica, Trainer, until
from refitd.demo.scene import Scene, Seat

SEATS = (
    Seat("r0", 0, "c", "in_place"),
    Seat("r0", 1, "d", "in_place"),
    Seat("r1", 0, "c", "in_place"),
    Seat("r1", 1, "c", "in_place"),
    Seat("r2", 0, "d", "host_shadow"),
    Seat("r2", 1, "c", "host_shadow"),
)
RELEASE_SECONDS = 8.0
COMMIT_SECONDS = 3.0
STEP_SECONDS = 40.0
PAUSE_SECONDS = 0.3  # between two publications
REWIND = 5  # steps that an older checkpoint goes back


class World:
    """Everything that runs. ``point`` is told of every failpoint that is reached."""

    def __init__(
        self, folder: Path, nursery: Nursery, book: Book, network: Network, point: Callable[[dict[str, Any]], None]
    ) -> None:
        self.book, self.network = book, network
        self._point = point
        self.scene = Scene(folder, nursery, book, self._reached, SEATS, network)
        self.run, self.step = 1, 0
        self.release_seconds = RELEASE_SECONDS  # how long trainers let their readers work
        self.publishing = asyncio.Event()
        self._asked: dict[str, tuple[int, int]] = {}  # trainer: its life, and the step that it has not reported yet
        self._task: asyncio.Task[None] | None = None
        self._by_hand: asyncio.Task[None] | None = None

    def _reached(self, fact: dict[str, Any]) -> str:
        self._point(fact)
        return "go"

    async def start(self) -> None:
        """Start everything, and the publications. Raises TimeoutError, RefitdError."""
        await self.scene.start({"run": "run1", "draws": 1})
        self.publishing.set()
        self._task = asyncio.create_task(self._publish())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.scene.stop()

    # Publications.

    @property
    def newest(self) -> Mark:
        """What was published last."""
        return Mark(self.run, self.step)

    def next_run(self) -> None:
        """Trainers come back with an older checkpoint, as a new run."""
        self.run, self.step = self.run + 1, max(0, self.step - REWIND)

    async def _publish(self) -> None:
        while True:
            await self.publishing.wait()
            mine = [trainer for trainer in self.scene.trainers if self._free(trainer)]
            if mine:
                await self._one(mine)
            await asyncio.sleep(PAUSE_SECONDS)

    async def publish_one(self) -> Mark:
        """One publication, for those who publish by hand (`publishing` is cleared); on return trainers are about it.

        Everything that they say of it is written down meanwhile.
        """
        if self._by_hand:
            await self._by_hand
        while not (mine := [t for t in self.scene.trainers if t.ready and not t.down]) or not all(
            map(self._free, mine)
        ):
            await asyncio.sleep(0.01)  # one that is still about the step before would miss this one
        self._by_hand = asyncio.create_task(self._one(mine))
        await asyncio.sleep(0)
        return self.newest

    @property
    def told(self) -> bool:
        """Whether everybody has said how the last publication by hand went."""
        return self._by_hand is None or self._by_hand.done()

    def _free(self, trainer: Trainer) -> bool:
        """Whether it runs, belongs to the present run, and has said how the step before went."""
        life, step = self._asked.get(trainer.name, (0, 0))
        late = life == trainer.lives and step not in trainer.reported
        return trainer.ready and not trainer.down and trainer.options["draws"] == self.run and not late

    async def _one(self, trainers: list[Trainer]) -> None:
        self.step += 1
        mark = self.newest
        self.book.expect(mark)
        for trainer in trainers:
            self._asked[trainer.name] = trainer.lives, mark.step
            trainer.tell(do="step", step=mark.step, release=self.release_seconds, commit=COMMIT_SECONDS)
        waiting = {trainer.name: trainer for trainer in trainers}
        await until(lambda: self._heard(mark, waiting), self.scene.changed, STEP_SECONDS)

    def _heard(self, mark: Mark, waiting: dict[str, Trainer]) -> bool:
        """Write down who has spoken; whether nobody is left to wait for."""
        for name, trainer in list(waiting.items()):
            same = self._asked[name] == (trainer.lives, mark.step) and self.run == mark.run
            if same and mark.step in trainer.reported:
                self.book.reported(mark, trainer.released[mark.step], trainer.reported[mark.step])
            if not same or mark.step in trainer.reported or not trainer.ready or trainer.down:
                del waiting[name]
        return not waiting

    # How it stands.

    @property
    def live(self) -> list[Replica]:
        return [replica for replica in self.scene.replicas if replica.live]

    def at_least(self, mark: Mark) -> bool:
        """Whether every replica lives and serves ``mark`` or a later one."""
        serving = [self.book.serving(r.name) if r.live else None for r in self.scene.replicas]
        return all(mark_ is not None and mark_ >= mark for mark_ in serving)

    def holders(self, mark: Mark) -> list[str]:
        """Live replicas that serve ``mark`` or a later one."""
        return [r.name for r in self.live if (self.book.serving(r.name) or Mark(0, 0)) >= mark]

    async def reaches(self, mark: Callable[[], Mark], seconds: float) -> float | None:
        """Seconds until every replica serves ``mark()``; None where they do not in time, or somebody died."""
        began = time.monotonic()
        await until(lambda: self.at_least(mark()) or bool(self.scene.dead()), self.scene.changed, seconds)
        return None if self.scene.dead() or not self.at_least(mark()) else time.monotonic() - began

    def describe(self) -> str:
        """Who serves what, for a failed wave."""
        parts = [f"published {tuple(self.newest)}"]
        for replica in self.scene.replicas:
            mark = self.book.serving(replica.name)
            away = [e.name for e in replica.engines if not e.usable]
            parts.append(f"{replica.name} serves {tuple(mark) if mark else None}" + f" (away: {away})" * bool(away))
            parts += replica.failures[-1:]
        return "; ".join(parts)

    async def revive(self, client: Client) -> None:
        """Begin another life of a client, of the present run and step where it trains."""
        if isinstance(client, Trainer):
            client.options |= {"step": self.step, "run": f"run{self.run}", "draws": self.run}
            client.released.clear()
            client.reported.clear()
        await self.scene.revive(client)
