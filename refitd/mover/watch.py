"""Tells the daemon about one round: failures at once, landed and done when they come, progress now and then.

Who is done has landed, and says so only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from refitd.mover.round import Edge, Round
from refitd.stamps import stamp

PROGRESS_SECONDS = 0.25


class RoundWatch:
    """``send(kind, **fields)`` adds lane and token. Used by the lane's supervisor only."""

    def __init__(self, round_: Round, send: Callable[..., None]) -> None:
        self.round, self._send = round_, send
        self.told: set[Edge] = set()
        self.done = False
        self._landed = not round_.incoming  # who receives nothing has no news of it
        self._progress_at = time.monotonic()
        self._progress_sum = 0

    def has_news(self) -> bool:
        """Whether `report` would say something other than progress. The lane's condition is held."""
        if self.done or self.round.stopped:
            return False
        new_failure = len(self.told) < len(self.round.failures)
        return new_failure or (self.round.landed() and not self._landed) or self.round.finished()

    def report(self) -> None:
        """Send whatever is new. A round that is done, or was superseded, has nothing more to say."""
        if self.done or self.round.stopped:
            return
        self._report_failures()
        if self.round.finished():
            self.done = True
            stamp("done.told", self.round.rank)
            self._send("done", **state_of(self.round), span=self.round.span, first=self.round.first)
        elif self.round.landed() and not self._landed:
            self._landed = True
            self._send("landed", attempt=self.round.options.attempt)
        elif time.monotonic() - self._progress_at >= PROGRESS_SECONDS:
            self._report_progress()

    def _report_failures(self) -> None:
        with self.round.cond:
            untold = {edge: reason for edge, reason in self.round.failures.items() if edge not in self.told}
        for edge, reason in untold.items():
            self.told.add(edge)
            self._send("failed", edge=list(edge), reason=reason, **state_of(self.round))

    def _report_progress(self) -> None:
        self._progress_at = time.monotonic()
        state = state_of(self.round)
        moved = sum(state["rx"].values()) + sum(state["tx"].values())
        if moved != self._progress_sum:
            self._progress_sum = moved
            self._send("progress", buckets=len(state["verified"]), **state)


def state_of(round_: Round) -> dict[str, Any]:
    """Attempt, verified bucket ids, and payload bytes by link."""
    with round_.cond:
        traffic = {"rx": dict(round_.traffic.rx), "tx": dict(round_.traffic.tx)}
        return {"attempt": round_.options.attempt, "verified": sorted(round_.verified), **traffic}
