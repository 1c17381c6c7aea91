"""What engines may hold, what they were seen to hold, and what trainers were told: torn, lost, and gone back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from refitd.demo.drawn import Drawn
from refitd.demo.ledger import Ledger
from refitd.demo.shards import TENSOR_PARALLEL, digest, expected_storages
from refitd.demo.weights import Spec


class Mark(NamedTuple):
    """A publication as the trainers know it; later ones are greater, also after an older checkpoint."""

    run: int
    step: int


class Book(Ledger):
    """A ledger that knows every step of every run by the digest of its weights, worked out without refitd."""

    def __init__(self, spec: Spec, weights: Mapping[str, Tensor]) -> None:
        super().__init__({})
        self._spec, self._weights = spec, weights
        self._known: list[dict[str, Mark]] = [{} for _ in range(TENSOR_PARALLEL)]
        self._serving: dict[str, dict[int, Mark]] = {}
        self.best: dict[str, Mark] = {}
        self.back: list[str] = []
        self.told: set[Mark] = set()
        self.since: dict[str, set[Mark]] = {}  # what replicas served since somebody emptied it
        self._drawn: Drawn | None = None

    def expect(self, mark: Mark) -> None:
        """Trainers are about to publish ``mark``: what each engine rank must hold then."""
        drawn = Drawn({name: weight.clone() for name, weight in self._weights.items()}, mark.run)
        drawn.advance(mark.step)
        for rank, known in enumerate(self._known):
            known[digest(expected_storages(drawn.weights, self._spec, rank))] = mark

    # What engines say.

    def hold(self, replica: str) -> None:
        self._serving.pop(replica, None)

    def held(self, replica: str, rank: int, step: int, seen: str) -> None:
        self._mark(replica, rank, step, seen)

    def served(self, replica: str, rank: int, step: int, seen: str) -> None:
        mark = self._mark(replica, rank, step, seen)
        if mark is None:
            return
        serving = self._serving.setdefault(replica, {})
        serving[rank] = mark
        self.since.setdefault(replica, set()).add(mark)
        if len(set(serving.values())) > 1:
            self.torn.append(f"{replica} served {sorted(set(serving.values()))} at once")
        if mark < self.best.get(replica, mark):
            self.back.append(f"{replica}/{rank} went back from {self.best[replica]} to {mark}")
        self.best[replica] = max(mark, self.best.get(replica, mark))

    def _mark(self, replica: str, rank: int, step: int, seen: str) -> Mark | None:
        mark = self._known[rank].get(seen)
        if mark is None or mark.step != step:
            what = f"those of {mark}" if mark else "those of no publication"
            self.torn.append(f"{replica}/{rank} has as step {step} weights that are {what}")
            return None
        return mark

    def serving(self, replica: str) -> Mark | None:
        """What every rank of a replica serves now; None where they do not serve as one."""
        marks = self._serving.get(replica, {})
        whole = len(marks) == TENSOR_PARALLEL and len(set(marks.values())) == 1
        return next(iter(marks.values())) if whole else None

    # What trainers were told.

    def reported(self, mark: Mark, outcome: str, report: Mapping[str, Any] | None) -> None:
        """A trainer's outcome and report of a publish: committed somewhere, or verified by every lane that read it."""
        if (report and report["committed"]) or outcome == "RELEASED":
            self.told.add(mark)

    def lost(self, replicas: Iterable[str]) -> list[Mark]:
        """Publications that were committed or had a holder, and that none of ``replicas`` serves or has passed."""
        reached = max((mark for name in replicas if (mark := self.serving(name))), default=Mark(0, 0))
        return sorted(mark for mark in self.told if mark > reached)
