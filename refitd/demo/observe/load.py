"""The cluster of the demo with trainers that publish all the time, and what it takes to break and mend it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refitd.demo.chaos.book import Book, Mark
from refitd.demo.cluster import Daemon
from refitd.demo.nursery import Nursery
from refitd.demo.observe.stage import THROTTLED, Holder, Sluice, Wires
from refitd.demo.parties import Trainer, until
from refitd.demo.scene import Scene

PAUSE_SECONDS = 0.7  # between two publications
RELEASE_SECONDS = 45.0  # longer than the slowest transfer of the run
COMMIT_SECONDS = 5.0
CALM_SECONDS = 90.0  # a parked node comes back once it has been quiet for `job.park`
HELD = THROTTLED  # the node whose daemon may be held still

Fact = dict[str, Any]


class Load:
    """Everything that runs. ``on_point``, where it is set, is told of each failpoint that any other node reaches."""

    def __init__(self, folder: Path, nursery: Nursery, book: Book) -> None:
        self.book, self.folder = book, folder
        self.sluice, self.holder = Sluice(), Holder(folder / "held.sock")
        self.wires = Wires(self.sluice, {HELD: self.holder.path})
        self.scene = Scene(folder, nursery, book, self._point, wiring=self.wires)
        self.on_point: Callable[[Fact], None] | None = None
        self.step = 0
        self._life: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def _point(self, fact: Fact) -> str:
        if self.on_point:
            self.on_point(fact)
        return "go"

    async def start(self) -> None:
        """Start everything, and the publications. Raises TimeoutError, RefitdError."""
        await self.sluice.start()
        await self.holder.start()
        await self.scene.start({"run": "run1", "draws": 1})
        self._task = asyncio.create_task(self._publish())
        await self.calm()

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.wires.thaw()
        await self.holder.close()
        await self.scene.stop()
        await self.sluice.close()

    async def _publish(self) -> None:
        while True:
            await self._one()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _one(self) -> None:
        self.step += 1
        self.book.expect(Mark(1, self.step))
        asked = [trainer for trainer in self.scene.trainers if trainer.ready and not trainer.down]
        for trainer in asked:
            trainer.tell(do="step", step=self.step, release=RELEASE_SECONDS, commit=COMMIT_SECONDS)
        await until(lambda: all(self._heard(trainer) for trainer in asked), self.scene.changed, CALM_SECONDS)

    def _heard(self, trainer: Trainer) -> bool:
        return self.step in trainer.reported or not trainer.ready or trainer.down

    async def calm(self) -> None:
        """Return when every replica serves something that was published from now on. Raises TimeoutError."""
        mark = Mark(1, self.step + 1)
        if not await until(lambda: self._all_at(mark), self.scene.changed, CALM_SECONDS):
            raise TimeoutError(f"not every replica serves step {mark.step}; died: {self.scene.dead() or 'nobody'}")

    def _all_at(self, mark: Mark) -> bool:
        serving = [self.book.serving(replica.name) for replica in self.scene.replicas if replica.live]
        return len(serving) == len(self.scene.replicas) and all(each is not None and each >= mark for each in serving)

    def daemon(self, node: str) -> Daemon:
        """The daemon of a node."""
        return self.scene.cluster.daemons[node]
