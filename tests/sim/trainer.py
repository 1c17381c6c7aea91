"""Simulated trainers: a group whose ranks step together, offer each step, and go on whatever becomes of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from refitd.errors import DaemonUnavailable, RefitdError
from refitd.layout import Layout

from .client import Message, SimClient
from .loop import loop

if TYPE_CHECKING:
    from .world import Machine, World

SLACK = 0.75  # seconds beyond its bound that a call may take: the last slices of waiting


class TrainerGroup:
    """One run. A rank waits for the others before each step, as a collective would have it."""

    def __init__(self, world: World, run: str, machines: list[Machine], layouts: list[Layout], step: int) -> None:
        self.world, self.run, self.machines, self.layouts = world, run, machines, layouts
        self.step = step
        self.weights: dict[int, int] = {}
        self.ranks: dict[int, SimTrainer] = {}
        self.over = False
        self._waiting: dict[int, asyncio.Future[int]] = {}

    @property
    def world_size(self) -> int:
        return len(self.machines)

    def start(self, rank: int) -> None:
        """A new process for a rank, under the same run."""
        present = self.ranks.get(rank)
        if not self.over and self.machines[rank].up and (present is None or present.process.dead):
            self.ranks[rank] = SimTrainer(self, rank)

    def alive(self) -> bool:
        return all(rank in self.ranks and not self.ranks[rank].process.dead for rank in range(self.world_size))

    async def next_step(self, rank: int) -> int:
        """Return when every rank has come here."""
        future: asyncio.Future[int] = loop().create_future()
        self._waiting[rank] = future
        self._waiting = {r: f for r, f in self._waiting.items() if r in self.ranks and not self.ranks[r].process.dead}
        if len(self._waiting) == self.world_size:
            self.step += 1
            self.weights[self.step] = self.world.new_weights()
            waiting, self._waiting = self._waiting, {}
            for other in waiting.values():
                other.set_result(self.step)
        return await future

    def end(self) -> None:
        """The whole run is over: its processes end."""
        self.over = True
        for trainer in list(self.ranks.values()):
            trainer.process.kill()


class SimTrainer(SimClient):
    """One rank: its memory is lent live, and changes only after its loan word has."""

    side = "trainer"

    def __init__(self, group: TrainerGroup, rank: int) -> None:
        self.of = group
        self.seq = 0
        self.planned: set[int] = set()
        self.outcomes: dict[int, tuple[str, str]] = {}
        self.reports: dict[int, Message] = {}
        self._told: Any = None
        super().__init__(group.machines[rank], group.run, rank, group.world_size, group.layouts[rank], "trainer")

    async def main(self) -> None:
        rng = self.world.rng
        await asyncio.sleep(rng.uniform(0, 0.3))
        await self.advance(loop().time() + 5.0)
        while self.world.silent:
            await asyncio.sleep(0.2)
            await self.advance(loop().time() + 0.2)
        while True:
            await asyncio.sleep(self.world.train_seconds * rng.uniform(0.5, 1.5))
            step = await self.of.next_step(self.rank)
            await self._update(self.of.weights[step])
            seq = await self._publish(step)
            await self._released(seq, self.world.patience)
            if rng.random() < 0.3:
                await self._committed(seq, rng.uniform(0.5, 5.0), step)
            while self.world.still:
                await asyncio.sleep(0.2)
                self._hear()

    async def _update(self, weights: int) -> None:
        """The weights change, one half after the other: whoever reads meanwhile reads a mix."""
        self.memory.fill(weights, second=False)
        await asyncio.sleep(self.world.rng.uniform(0.01, 0.1))
        self.memory.fill(weights, first=False)

    async def _publish(self, step: int) -> int:
        started = loop().time()
        seconds = 0.2 if self.seq else 5.0
        self.page.bump_loan()
        self.seq += 1
        seq = self.seq
        self.world.oracle.offered(self, seq, step, self.of.weights[step])
        self._hear()
        self.check_alive()
        if not (self.ready or await self.advance(started + seconds)):
            self.outcomes[seq] = "SKIPPED", self.failure
            return seq
        known, self._told = self._told == self.life, self.life
        memory = None if known else self.memory.described()
        try:
            await self.call("publish", [] if known else [self.memory.fd], within=seconds, seq=seq, step=step,
                            word=self.page.loan_word, memory=memory)  # fmt: skip
        except RefitdError as error:
            self._told = None
            self.outcomes.setdefault(seq, ("SKIPPED", str(error)))
        self._bounded("publish", started, seconds)
        return seq

    async def _released(self, seq: int, timeout: float) -> None:
        started, life = loop().time(), self.life
        while seq not in self.outcomes:
            try:
                if life != self.life:
                    raise DaemonUnavailable("the daemon that took the offer is gone")
                await self.listen(started + timeout - loop().time())
            except RefitdError as error:
                self.outcomes.setdefault(seq, ("SKIPPED", str(error)))
            self._hear()
            waited = loop().time() - started
            if seq not in self.outcomes and seq not in self.planned and waited > 2.0:
                self._withdraw(seq, "no lane has planned it")
            elif seq not in self.outcomes and waited >= timeout:
                self._withdraw(seq, "its readers had not finished")
        self.page.bump_loan()
        self.world.say("trainer_released", rank=self.key, seq=seq, outcome=self.outcomes[seq])
        self.world.counts[f"offers {self.outcomes[seq][0]}"] += 1
        self._bounded("released", started, timeout)

    def _withdraw(self, seq: int, reason: str) -> None:
        self.outcomes[seq] = "SKIPPED", reason
        self.page.bump_loan()
        self.tell("withdraw", seq=seq, reason=reason)

    async def _committed(self, seq: int, timeout: float, step: int) -> None:
        started = loop().time()
        try:
            await self._ask(seq, close=False, within=0.2)
            while seq not in self.reports and loop().time() - started < timeout:
                await self.listen(timeout)
                self._hear()
            if seq not in self.reports:
                await self._ask(seq, close=True, within=5.0)
        except RefitdError:
            return
        if seq in self.reports:
            self.world.oracle.reported(self, seq, step, self.reports[seq])
        self._bounded("committed", started, timeout + 5.2)

    async def _ask(self, seq: int, close: bool, within: float) -> None:
        answer = await self.call("report", within=within, seq=seq, close=close, min_replicas=None)
        if answer is not None and answer[0]["report"] is not None:
            self.reports.setdefault(seq, answer[0]["report"])

    def _hear(self) -> None:
        while self.events:
            event = self.events.popleft()
            seq = event.get("seq", 0)
            if event["event"] == "planned":
                self.planned.add(seq)
            elif event["event"] == "released":
                self.outcomes.setdefault(seq, (event["outcome"], event["reason"]))
            elif event["event"] == "report":
                self.reports.setdefault(seq, event["report"])

    def _bounded(self, what: str, started: float, seconds: float) -> None:
        took = loop().time() - started
        if took > seconds + SLACK and self.process.resumed_at < started:
            self.world.oracle.fault("I9", f"{self.key}: {what} took {took:.2f} s where {seconds:g} s was its bound")
