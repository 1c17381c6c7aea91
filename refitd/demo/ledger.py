"""What engines must hold after each step, worked out by the driver alone; and what they were seen to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refitd.demo.model import Training, embed
from refitd.demo.shards import TENSOR_PARALLEL, digest, expected_storages, gather
from refitd.demo.weights import Spec


@dataclass
class Oracle:
    """The driver's own copy of the training, and what it says about step after step."""

    spec: Spec
    training: Training
    ids: Any
    mask: Any
    digests: dict[int, list[str]] = field(default_factory=dict)
    _expected: list[dict[str, Tensor]] = field(default_factory=list)

    def advance(self, step: int) -> None:
        """Train up to ``step`` and remember what each engine rank must hold then."""
        self.training.advance(step)
        ranks = range(TENSOR_PARALLEL)
        self._expected = [expected_storages(self.training.weights, self.spec, rank) for rank in ranks]
        self.digests[step] = [digest(storages) for storages in self._expected]

    def compare(self, dumps: Mapping[int, Path]) -> list[str]:
        """How the ranks' dumped weights differ from the newest step's, bit for bit, and by a sentence embedding."""
        held = {rank: self._read(rank, path) for rank, path in dumps.items()}
        faults = [
            f"rank {rank}: {name} differs"
            for rank, storages in held.items()
            for name, tensor in storages.items()
            if not torch.equal(_bits(tensor), _bits(self._expected[rank][name]))
        ]
        expected = gather(dict(enumerate(self._expected)), self.spec)
        ours, theirs = (embed(w, self.spec, self.ids, self.mask) for w in (expected, gather(held, self.spec)))
        return faults if torch.equal(ours, theirs) else [*faults, "a sentence embedding differs"]

    def _read(self, rank: int, path: Path) -> dict[str, Tensor]:
        data, start, out = torch.from_numpy(np.fromfile(path, dtype=np.uint8)), 0, {}
        for name in sorted(self._expected[rank]):
            model = self._expected[rank][name]
            out[name] = data[start : start + model.nbytes].clone().view(model.dtype)
            start += model.nbytes
        return out


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@dataclass
class Ledger:
    """Counts what must never be seen: weights of no publication, and ranks of one replica at different steps."""

    digests: Mapping[int, list[str]]
    torn: list[str] = field(default_factory=list)
    _now: dict[str, dict[int, int]] = field(default_factory=dict)

    def hold(self, replica: str) -> None:
        """The replica stopped serving as a whole."""
        self._now.pop(replica, None)

    def held(self, replica: str, rank: int, step: int, seen: str) -> None:
        """Rank ``rank`` is free to serve weights with digest ``seen`` and says that they are those of ``step``."""
        expected = self.digests.get(step)
        if expected is None or expected[rank] != seen:
            found = [str(s) for s, ranks in self.digests.items() if ranks[rank] == seen]
            what = f"those of step {found[0]}" if found else "those of no step"
            self.torn.append(f"{replica}/{rank} has as step {step} weights that are {what}")

    def served(self, replica: str, rank: int, step: int, seen: str) -> None:
        """The same, while the replica computes with them."""
        self.held(replica, rank, step, seen)
        now = self._now.setdefault(replica, {})
        now[rank] = step
        if len(set(now.values())) > 1:
            self.torn.append(f"{replica} served steps {sorted(set(now.values()))} at once")
