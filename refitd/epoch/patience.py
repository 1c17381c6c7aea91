"""What time adds to the records. Pure: the clock is passed in.

A leader shows `Patience` its picture whenever that changes and whenever `due` has come; what it gets are the `Facts`
that decisions need. A new leader begins to count anew, so nothing is done too early.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from refitd.epoch.cleanup import durable
from refitd.epoch.facts import Facts
from refitd.epoch.holders import Covers
from refitd.epoch.publish import unpublished
from refitd.epoch.records import Member
from refitd.epoch.reports import stranded
from refitd.epoch.stage import committed, said, started
from refitd.epoch.view import Stored, View

EMPTY_SECONDS = 60.0  # a job that has no records any more is given up sooner


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and counts of `refitd.config`; ``silence``: how long a node may say nothing under a lane's token."""

    grace: float = 1.0
    join_debounce: float = 0.5
    join_limit: float = 3.0
    flaps: int = 6
    flap_window: float = 60.0
    park: float = 30.0
    silence: float = 20.0
    pause: float = 10.0
    ttl: float = 3600.0
    max_dirty: int = 0


@dataclass
class Timers:
    """Since when each of some conditions has held, and when the first of them will have held long enough."""

    since: dict[object, float] = field(default_factory=dict)
    due: float = math.inf

    def over(self, name: object, now: float, seconds: float) -> bool:
        """Whether the condition has held for so long; it holds now."""
        end = self.since.setdefault(name, now) + seconds
        if now < end:
            self.due = min(self.due, end)
        return now >= end

    def keep(self, names: Iterable[object]) -> None:
        """These conditions hold; all others do not."""
        held = set(names)
        self.since = {name: since for name, since in self.since.items() if name in held}


class Patience:
    """The clocks of one leader."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._timers = Timers()
        self._members: dict[str, Stored[Member]] | None = None  # at the last look
        self._joins: tuple[float, float] | None = None  # the first and the last join that lanes have not let in yet
        self._came: dict[str, collections.deque[float]] = {}  # when each node joined, within the window

    @property
    def due(self) -> float:
        """When the facts will change although no record does; infinity where they will not."""
        return self._timers.due

    def look(self, view: View, now: float, settled: bool, covers: Covers) -> Facts:
        """The facts at ``now`` (monotonic seconds). ``settled``: the store has answered for long enough."""
        self._timers.due = math.inf
        self._note_joins(view, now)
        conditions = dict(self._conditions(view, settled, covers))
        self._timers.keep(conditions)
        over = {name for name, seconds in conditions.items() if self._timers.over(name, now, seconds)}
        calm = _of("calm", over)
        for node in calm:
            self._came.pop(node, None)  # it was parked for these joins, and they are not held against it again
        return Facts(
            grace_over="grace" in over, joins_settled=self._settled(now), store_settled=settled,
            flapping=tuple(self._flapping(now)), calm=calm,
            slow=_of("slow", over), unheld=("unheld", view.newest) in over, gone=_of("gone", over),
            silent=frozenset(name[1:] for name in over if isinstance(name, tuple) and name[0] == "silent"),
            ended="ended" in over, max_dirty=self._limits.max_dirty,
        )  # fmt: skip

    def _conditions(self, view: View, settled: bool, covers: Covers) -> Iterator[tuple[object, float]]:
        """What holds now, and how long it must hold to become a fact."""
        limits = self._limits
        if unpublished(view):
            yield "grace", limits.grace
        for node in view.parked:
            created = view.created_of(f"members/{node}")
            yield ("calm", node, created), limits.park if created else 10 * limits.park
        if settled:
            yield from ((("silent", *pair), limits.silence) for pair in _unheard(view))
        for replica, revision in _pausing(view):
            yield ("slow", replica, revision), limits.pause
        newest = view.newest
        if newest and f"{newest.revision}" not in view.reports and stranded(view, newest, covers):
            yield ("unheld", newest), limits.silence  # a holder that is away may come back, as after a mover's death
        replicas = view.replicas()
        yield from ((("gone", replica), limits.ttl) for replica in view.lanes if replica not in replicas)
        if not any(stored.value.ranks for stored in view.members.values()):
            yield "ended", limits.ttl if durable(view) else min(limits.ttl, EMPTY_SECONDS)

    def _note_joins(self, view: View, now: float) -> None:
        """Only member records that are new are looked at; at the first look everybody has been here for long."""
        known, joined = self._members or {}, False
        for node, stored in view.members.items():
            before = known.get(node)
            if before is stored:
                continue
            joined = joined or not _lives(stored) <= _lives(before)
            if before is None or before.created != stored.created:
                self._came.setdefault(node, collections.deque()).append(now)
        if joined and self._members is not None:
            self._joins = (self._joins[0] if self._joins else now), now
        self._members = dict(view.members)

    def _settled(self, now: float) -> bool:
        if self._joins is None:
            return True
        first, last = self._joins
        end = min(last + self._limits.join_debounce, first + self._limits.join_limit)
        if now >= end:
            self._joins = None
            return True
        self._timers.due = min(self._timers.due, end)
        return False

    def _flapping(self, now: float) -> Iterator[tuple[str, int]]:
        for node, times in list(self._came.items()):
            while times and times[0] < now - self._limits.flap_window:
                times.popleft()
            if not times:
                del self._came[node]
            elif len(times) >= self._limits.flaps:
                yield node, len(times)


def _lives(member: Stored[Member] | None) -> set[tuple[str, int]]:
    """(rank, membership) of the ranks that a node has at work."""
    return {(info.key, member.created) for info in member.value.ranks if info.mover} if member else set()


def _of(kind: str, over: set[object]) -> frozenset[str]:
    return frozenset(str(name[1]) for name in over if isinstance(name, tuple) and name[0] == kind)


def _unheard(view: View) -> Iterator[tuple[str, str]]:
    """(replica, node) pairs whose node has not said a word under the lane's present token."""
    return ((replica, node) for replica in view.open_lanes() for node in said(view, replica).silent)


def _pausing(view: View) -> Iterator[tuple[str, int]]:
    """Replicas whose present ranks have not committed their refit while no bytes move, and that refit's revision."""
    for replica, lane in view.open_lanes().items():
        stored = view.refits.get(replica)
        if stored and not committed(view, lane, stored.value.id) and not started(view, lane, stored.value.id):
            yield replica, stored.revision
