"""What moves the weights elsewhere: torch.distributed over gloo on 127.0.0.1, in two ways.

World of four: trainers are ranks 0 and 1, engines 2 and 3. Nothing is checksummed and nobody may fail.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from refitd.bench.models import ENGINES, TRAINERS, Model, Shard, engine_shards, exact, fill, trainer_shards, whole

_TIMEOUT = timedelta(seconds=60)


class _Gloo:
    """One rank. Subclasses move; bytes travel as uint8, which every collective of gloo knows."""

    def __init__(self, model: Model, rank: int, port: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TRAINERS + ENGINES, timeout=_TIMEOUT
        )
        self._rank, self._trains = rank, rank < TRAINERS
        self._sources = [trainer_shards(model, r) for r in range(TRAINERS)]
        self._targets = [engine_shards(model, r) for r in range(ENGINES)]
        self._shards = self._sources[rank] if self._trains else self._targets[rank - TRAINERS]
        self._weights = [torch.zeros(shard.shape, dtype=torch.bfloat16) for shard in self._shards]

    def fill(self, step: int) -> None:
        for shard, weight in zip(self._shards, self._weights, strict=True):
            fill(shard, step, weight)

    def move(self, step: int) -> float:  # noqa: ARG002  the values say which step it is
        dist.barrier()
        began = time.monotonic()
        self._transfer()
        return began if self._trains else time.monotonic()

    def _transfer(self) -> None:
        raise NotImplementedError

    def exact(self, step: int) -> bool:
        return all(exact(shard, step, weight) for shard, weight in zip(self._shards, self._weights, strict=True))

    def close(self) -> None:
        dist.destroy_process_group()


class GatherBroadcast(_Gloo):
    """Trainer 0 gathers every tensor whole and broadcasts it to the engines, each of which copies its part."""

    def __init__(self, model: Model, rank: int, port: int) -> None:
        super().__init__(model, rank, port)
        self._gatherers = dist.new_group([0, 1])
        self._receivers = dist.new_group([0, *range(TRAINERS, TRAINERS + ENGINES)])
        self._full = [torch.zeros(whole(m).shape, dtype=torch.bfloat16) if rank != 1 else torch.empty(0) for m in model]

    def _transfer(self) -> None:
        for at, (shard, weight) in enumerate(zip(self._shards, self._weights, strict=True)):
            if self._trains:
                self._gather(at, weight)
            if self._rank != 1:
                dist.broadcast(_raw(self._full[at]), src=0, group=self._receivers)
            if not self._trains:
                weight.copy_(self._full[at][shard.lo[0] : shard.hi[0], shard.lo[1] : shard.hi[1]])

    def _gather(self, at: int, weight: Tensor) -> None:
        parts = None
        if self._rank == 0:
            parts = [_raw(self._full[at][shards[at].lo[0] : shards[at].hi[0]]) for shards in self._sources]
        dist.gather(_raw(weight), parts, dst=0, group=self._gatherers)


class SendRecv(_Gloo):
    """Each trainer sends each engine the part that it needs, packed; the engine copies it into place."""

    def __init__(self, model: Model, rank: int, port: int) -> None:
        super().__init__(model, rank, port)
        peers = self._targets if self._trains else self._sources
        self._parts: list[tuple[int, int, tuple[slice, slice], Tensor]] = []
        for peer, shards in enumerate(peers):
            for at, (mine, other) in enumerate(zip(self._shards, shards, strict=True)):
                if (common := _agreed(mine, other)) is not None:
                    part = torch.zeros(self._weights[at][common].shape, dtype=torch.bfloat16)
                    self._parts.append((peer, at, common, part))

    def _transfer(self) -> None:
        if self._trains:
            sends = []
            for peer, at, common, part in self._parts:
                part.copy_(self._weights[at][common])
                sends.append(dist.isend(_raw(part), TRAINERS + peer, tag=at))
            for work in sends:
                _wait(work)
            return
        receives = [dist.irecv(_raw(part), peer, tag=at) for peer, at, _common, part in self._parts]
        for work, (_peer, at, common, part) in zip(receives, self._parts, strict=True):
            _wait(work)
            self._weights[at][common].copy_(part)


def _agreed(mine: Shard, other: Shard) -> tuple[slice, slice] | None:
    both = mine.overlap(other)
    return None if both is None else both[0]


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # it is only for ranks outside of the group
    work.wait()


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
