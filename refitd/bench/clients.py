"""Trainers and engines that use refitd, as a framework would."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refitd.bench.models import (
    ENGINES,
    TRAINERS,
    Model,
    Shard,
    engine_shards,
    exact,
    fill,
    layout,
    nbytes,
    trainer_shards,
)
from refitd.bench.party import BenchFailed
from refitd.hook.engine import connect_engine
from refitd.hook.memory import shared_empty
from refitd.hook.messages import IN_PLACE, RELEASED, Ticket
from refitd.hook.trainer import connect_trainer
from refitd.hook.wire import Connection

JOB, RUN, REPLICA = "bench", "run", "r0"
WAIT_SECONDS = 30.0


def _weights(shards: list[Shard], device: str) -> dict[str, Tensor]:
    make = shared_empty if device == "cpu" else device_empty
    return {shard.matrix.name: make(shard.shape, torch.bfloat16) for shard in shards}


def device_empty(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Uninitialised, in memory of the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def _settle(device: str) -> None:
    """What was begun on a GPU is done."""
    if device != "cpu":
        torch.cuda.synchronize()


def _streams(device: str) -> Sequence[Any]:
    """Where the weights are written."""
    return () if device == "cpu" else (torch.cuda.current_stream(),)


class TrainerParty:
    """One trainer rank; its weights are lent where they are."""

    def __init__(self, model: Model, rank: int, socket_path: str, device: str = "cpu") -> None:
        self._shards, self._device = trainer_shards(model, rank), device
        self._weights = _weights(self._shards, device)
        self._trainer = connect_trainer(job=JOB, run=RUN, rank=rank, world_size=TRAINERS, socket=socket_path)
        self._trainer.register(layout(model, self._shards))
        self._trainer.plan_seconds = WAIT_SECONDS  # the first lane is still being built

    def fill(self, step: int) -> None:
        for shard in self._shards:
            fill(shard, step, self._weights[shard.matrix.name])
        _settle(self._device)

    def move(self, step: int) -> float:
        began = time.monotonic()
        offer = self._trainer.publish(step, self._weights, _streams(self._device))
        if offer.released(WAIT_SECONDS) is not RELEASED:
            raise BenchFailed(f"step {step} was skipped: {offer.reason}")
        report = offer.committed(WAIT_SECONDS)
        if report.committed != [REPLICA]:
            raise BenchFailed(f"step {step} was not committed: {report}")
        return began

    def exact(self, step: int) -> bool:
        return all(exact(shard, step, self._weights[shard.matrix.name]) for shard in self._shards)

    def close(self) -> None:
        self._trainer.close()


class PatientTrainer(TrainerParty):
    """For refits in which movers die: its report may be closed before the replica has a new one."""

    def move(self, step: int) -> float:
        began = time.monotonic()
        self._trainer.publish(step, self._weights, _streams(self._device)).released(WAIT_SECONDS)
        return began


class EngineParty:
    """One engine rank. ``mate`` joins the two ranks: the lead hands the ticket over."""

    def __init__(
        self,
        model: Model,
        rank: int,
        socket_path: str,
        mate: socket.socket,
        device: str = "cpu",
        mode: str = IN_PLACE,
    ) -> None:
        self._rank, self._mate = rank, Connection(mate)
        self._shards = engine_shards(model, rank)
        self._weights = _weights(self._shards, device)
        self._engine = connect_engine(job=JOB, replica=REPLICA, rank=rank, world_size=ENGINES, socket=socket_path)
        self._engine.register(layout(model, self._shards), mode=mode, budget=2 * nbytes(model))
        self._began = 0.0

    def fill(self, step: int) -> None:
        """Engines get theirs by the move."""

    def move(self, step: int) -> float:
        ticket = self._ticket(step)
        self._began = time.monotonic()
        if ticket.kind == "apply":
            self._engine.apply(ticket, self._weights)
        else:
            self._engine.receive(ticket, self._weights, WAIT_SECONDS)
        ended = time.monotonic()
        if ticket.step != step or self._engine.step != step:
            raise BenchFailed(f"expected step {step}, received {self._engine.step} by {ticket}")
        return ended

    def paused(self, step: int) -> float:  # noqa: ARG002  of the last move
        """When this rank stopped serving."""
        return self._began

    def _ticket(self, step: int) -> Ticket:
        if self._rank:
            return Ticket.from_json(self._mate.receive(WAIT_SECONDS)[0])
        ticket = self._engine.pending(wait=WAIT_SECONDS)
        if ticket is None:
            raise BenchFailed(f"no ticket for step {step} within {WAIT_SECONDS:g} s")
        self._mate.send(ticket.to_json())
        return ticket

    def exact(self, step: int) -> bool:
        return all(exact(shard, step, self._weights[shard.matrix.name]) for shard in self._shards)

    def close(self) -> None:
        self._engine.close()
