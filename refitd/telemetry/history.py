"""The last refits in which this node took part: what they moved, how long each phase took, how they ended and why."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from refitd.failpoints import PHASES

KEPT, FAULTS = 40, 20
_LEFT = "superseded"


class Refit(NamedTuple):
    """Which refit: a replica's way to one publication."""

    job: str
    replica: str
    generation: int
    revision: int


@dataclass(frozen=True, slots=True)
class RefitRecord:
    """One refit. ``began_at``: seconds since the epoch; ``phases``: seconds by phase; ``moved``: bytes by link.

    ``outcome`` is empty while it goes on. ``failures``: attempts that came to nothing; ``why``: the reason of the last
    failure, or of the end.
    """

    refit: Refit
    began_at: float
    phases: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    outcome: str = ""
    failures: int = 0
    why: str = ""

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(self.phases.values())


class Fault(NamedTuple):
    """Something that broke on this node, at seconds since the epoch."""

    at: float
    job: str
    what: str


class History:
    """The last `KEPT` refits and `FAULTS` faults. Every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: deque[RefitRecord] = deque(maxlen=KEPT)
        self._faults: deque[Fault] = deque(maxlen=FAULTS)

    def phase(self, refit: Refit, phase: str, seconds: float) -> None:
        """The refit has left a phase after ``seconds``; a phase that comes again adds up."""
        with self._lock:
            record = self._open(refit, seconds)
            record.phases[phase] = record.phases.get(phase, 0.0) + seconds

    def moved(self, refit: Refit, link: str, nbytes: int) -> None:
        """The refit brought in ``nbytes`` over a link."""
        with self._lock:
            record = self._open(refit, 0.0)
            record.moved[link] = record.moved.get(link, 0) + nbytes

    def failed(self, refit: Refit, why: str) -> None:
        """An attempt came to nothing; the refit goes on."""
        with self._lock:
            record = self._open(refit, 0.0)
            self._put(replace(record, failures=record.failures + 1, why=why))

    def ended(self, refit: Refit, outcome: str, why: str = "") -> None:
        """The refit is over; one of which nothing was heard, or that had ended, is left as it is."""
        with self._lock:
            for record in [each for each in self._records if each.refit == refit and each.outcome in ("", _LEFT)]:
                self._put(replace(record, outcome=outcome, why=why or record.why))

    def fault(self, job: str, what: str) -> None:
        """Something broke, in one sentence that names it."""
        with self._lock:
            self._faults.append(Fault(self._clock(), job, what))

    def faults(self) -> list[Fault]:
        """The last things that broke, the newest first."""
        with self._lock:
            return list(reversed(self._faults))

    def last(self) -> list[RefitRecord]:
        """Copies of the records, the newest first, phases in their order."""
        with self._lock:
            return [replace(r, phases=_ordered(r.phases), moved=dict(r.moved)) for r in reversed(self._records)]

    def _open(self, refit: Refit, spent: float) -> RefitRecord:
        """The record of a refit, begun now (less what it has spent already) where there is none yet."""
        for record in reversed(self._records):
            if record.refit == refit:
                return record
        for old in [r for r in self._records if not r.outcome and r.refit[:2] == refit[:2] and r.refit < refit]:
            self._put(replace(old, outcome=_LEFT))  # nobody tells a node that a lane went on without its end
        record = RefitRecord(refit, self._clock() - spent)
        self._records.append(record)
        return record

    def _put(self, record: RefitRecord) -> None:
        index = next(i for i, old in enumerate(self._records) if old.refit == record.refit)
        self._records[index] = record


def _ordered(phases: dict[str, float]) -> dict[str, float]:
    return {phase: phases[phase] for phase in PHASES if phase in phases}
