"""Trainers and engines of a scene that use refitd, each on its card."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from refitd.bench.cards import card
from refitd.bench.cards.layouts import Model, Scene, Seat, held, layout, sizes
from refitd.bench.models import exact, fill
from refitd.bench.party import BenchFailed
from refitd.hook.engine import connect_engine
from refitd.hook.messages import RELEASED, Ticket
from refitd.hook.trainer import connect_trainer
from refitd.hook.wire import Connection

JOB = "bench"
WAIT_SECONDS = 45.0


class _Party:
    """A rank's weights: flat storages, and its shards as views of them."""

    def __init__(self, scene: Scene, model: Model, seat: Seat) -> None:
        self.seat, self.parts = seat, held(scene, model, seat)
        where = card.use(seat.card)
        self.weights = {name: card.lent(numel, where) for name, numel in sizes(self.parts).items()}

    def fill(self, step: int) -> None:
        """Trainers: write the values of ``step``; engines get theirs by the move."""
        if self.seat.side == "trainer":
            for part in self.parts:
                fill(part.shard, step, part.view(self.weights[part.storage]))
        card.settle()

    def exact(self, step: int) -> bool:
        found = all(exact(part.shard, step, part.view(self.weights[part.storage])) for part in self.parts)
        card.flush()
        return found


class Trainer(_Party):
    """``patient``: a report that lacks a replica is no failure; there are faults in the refit."""

    def __init__(self, scene: Scene, model: Model, seat: Seat, socket_path: str, patient: bool = False) -> None:
        super().__init__(scene, model, seat)
        self._replicas, self._patient = scene.replicas, patient
        self._trainer = connect_trainer(
            job=JOB, run=seat.group, rank=seat.number, world_size=seat.world, socket=socket_path
        )
        self._trainer.register(layout(self.parts))
        self._trainer.plan_seconds = WAIT_SECONDS  # the first lane is still being built

    def move(self, step: int) -> float:
        began = time.monotonic()
        offer = self._trainer.publish(step, self.weights)
        outcome = offer.released(WAIT_SECONDS)
        if self._patient:
            return began
        if outcome is not RELEASED:
            raise BenchFailed(f"step {step} was skipped: {offer.reason}")
        report = offer.committed(WAIT_SECONDS)
        if sorted(report.committed) != self._replicas:
            raise BenchFailed(f"step {step} was not committed by all: {report}")
        return began

    def close(self) -> None:
        self._trainer.close()


class Engine(_Party):
    """In place. ``mates``: the lead's sockets to the other ranks of its replica, or another rank's to its lead."""

    def __init__(
        self, scene: Scene, model: Model, seat: Seat, socket_path: str, mates: Sequence[socket.socket]
    ) -> None:
        super().__init__(scene, model, seat)
        self._mates = [Connection(mate) for mate in mates]
        self._engine = connect_engine(
            job=JOB, replica=seat.group, rank=seat.number, world_size=seat.world, socket=socket_path
        )
        self._engine.register(layout(self.parts), mode="in_place")

    def move(self, step: int) -> float:
        ticket = self._ticket(step)
        self._engine.receive(ticket, self.weights, WAIT_SECONDS)
        ended = time.monotonic()
        if ticket.step != step or self._engine.step != step:
            raise BenchFailed(f"expected step {step}, received {self._engine.step} by {ticket}")
        return ended

    def _ticket(self, step: int) -> Ticket:
        if self.seat.number:
            return Ticket.from_json(self._mates[0].receive(WAIT_SECONDS)[0])
        ticket = self._engine.pending(wait=WAIT_SECONDS)
        if ticket is None:
            raise BenchFailed(f"no ticket for step {step} within {WAIT_SECONDS:g} s")
        for mate in self._mates:
            mate.send(ticket.to_json())
        return ticket

    def close(self) -> None:
        self._engine.close()
