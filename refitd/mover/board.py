"""What the workers of one lane share: the current round, the state of each edge, and the order to stop."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from refitd.mover.limit import NO_LIMIT, Limit
from refitd.mover.round import Edge, Round


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """Names one lane under one token, and what its edges must prove to each other."""

    job: str
    lane: str
    token: int
    rank: str
    secret: str
    digest: str


class Board:
    """Guarded by the lock of ``cond``, on which the lane's supervisor waits.

    A worker without work waits on a condition of its own over the same lock, ``idle``: whoever is woken for nothing
    takes the interpreter from those that move bytes.
    """

    def __init__(self, facts: LaneFacts, limit: Limit = NO_LIMIT) -> None:
        self.facts, self.limit = facts, limit
        self.lock = threading.RLock()
        self._idle: list[threading.Condition] = []
        self.cond = threading.Condition(self.lock)
        self.stopping = False
        self.store_away = False
        self.round: Round | None = None
        self.warm: set[Edge] = set()
        self.broken: dict[Edge, str] = {}

    def mark_warm(self, edge: Edge) -> None:
        with self.cond:
            self.warm.add(edge)
            self.cond.notify_all()

    def break_edge(self, edge: Edge, reason: str) -> None:
        """Record that ``edge`` is of no more use under this token. Ignored while stopping: that is our own doing."""
        with self.cond:
            if self.stopping:
                return
            self.broken.setdefault(edge, reason)
            if self.round is not None and self.round.needs(edge):
                self.round.fail(edge, reason)
            self.cond.notify_all()

    def idle(self) -> threading.Condition:
        """A condition for one worker; `Worker.rouse` and the lane's end notify it."""
        self._idle.append(threading.Condition(self.lock))
        return self._idle[-1]

    def next_round(self, after: Round | None, idle: threading.Condition) -> Round | None:
        """Wait for a round other than ``after``; None when the lane stops."""
        with idle:
            idle.wait_for(lambda: self.stopping or (self.round is not None and self.round is not after))
            return None if self.stopping else self.round

    def round_for(self, attempt: int, idle: threading.Condition) -> Round | None:
        """Wait until a round of at least ``attempt`` is current and return it; None when the lane stops."""
        with idle:
            idle.wait_for(lambda: self.stopping or (self.round is not None and self.round.options.attempt >= attempt))
            return None if self.stopping else self.round

    def stop(self) -> None:
        with self.cond:
            self.stopping = True
            for cond in (self.cond, *self._idle):
                cond.notify_all()
