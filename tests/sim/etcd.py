"""A simulated etcd: one state machine with revisions, leases, transactions, history and compaction, in virtual time.

It is checked against the real one, and against refitd's store in memory, with the same sequences of operations
(tests/sim/test_sim_etcd.py). What a cluster of three does to its users is played by `leaderless` (no leader: nothing is
decided, leases stand still and begin anew with the next leader) and by the network in front of it (`SimStore`).
"""

from __future__ import annotations

import bisect
import builtins
import math
from collections import Counter
from collections.abc import Callable, Sequence

from refitd.errors import InputError, LeaseLost
from refitd.store.base import (
    Compare,
    CreateRevision,
    Deleted,
    DeleteOp,
    Event,
    GetOp,
    Item,
    Keys,
    ModRevision,
    Op,
    Put,
    PutOp,
    Resync,
    Span,
    TxnResult,
    check_key,
    check_ops,
    span_of,
)

from .loop import Process

MIN_TTL = 2  # seconds: what etcd grants at least where its elections take the second that is the default
Later = Callable[[float, Callable[[], None]], object]
Heard = Callable[[int, Sequence[Event]], None]
Told = Callable[[int, Event], None]


class SimEtcd:
    """The server. ``clock`` gives seconds, ``later(seconds, callback)`` runs something then."""

    def __init__(self, clock: Callable[[], float], later: Later) -> None:
        self._clock, self._later = clock, later
        self.items: dict[str, Item] = {}
        self.revision = 1
        self.compacted = 0
        self.leaderless = False
        self.writer: Process | None = None  # whose request is being carried out, where somebody still hears the answer
        self.writes: Counter[str] = Counter()  # transactions that changed something, by kind of record
        self.on_change: list[Heard] = []  # told of each change before anybody else
        self._leases: dict[int, tuple[int, float]] = {}  # id -> ttl, deadline
        self._lease_ids = 0
        self._revisions: list[int] = []
        self._history: list[tuple[int, Event]] = []
        self._watchers: dict[Span, dict[Told, None]] = {}
        self._spans: dict[str, list[Span]] = {}  # which of them a key is in
        self.told: Counter[str] = Counter()  # events that watches have carried, by host

    # What clients ask for.

    def get(self, key: str) -> Item | None:
        check_key("get.key", key)
        return self.items.get(key)

    def list(self, keys: Keys) -> tuple[builtins.list[Item], int]:
        span = span_of(keys)
        return [self.items[key] for key in sorted(filter(span.holds, self.items))], self.revision

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        """As etcd does it: all compares, then one branch, at one revision."""
        check_ops("then", then)
        check_ops("otherwise", otherwise)
        for part in (*compares, *then, *otherwise):
            check_key("txn.key", part.key)
        ok = all(self._holds(compare) for compare in compares)
        ops = then if ok else otherwise
        for op in ops:
            if isinstance(op, PutOp) and op.lease is not None:
                self._need(op.lease.id)
        return TxnResult(ok, *self._apply(ops))

    def grant(self, ttl: float) -> tuple[int, float]:
        """(id, seconds granted)."""
        if ttl <= 0:
            raise InputError("grant.ttl_seconds", "more than 0", str(ttl))
        self._lease_ids += 1
        granted = max(math.ceil(ttl), MIN_TTL)
        self._leases[self._lease_ids] = granted, 0.0
        self._renew(self._lease_ids)
        return self._lease_ids, float(granted)

    def keepalive(self, lease: int) -> float:
        self._need(lease)
        self._renew(lease)
        return float(self._leases[lease][0])

    def revoke(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            self._drop(lease)

    def compact(self, revision: int) -> None:
        """Forget the history up to and including a revision."""
        self.compacted = max(self.compacted, min(revision, self.revision))
        gone = bisect.bisect_right(self._revisions, self.compacted)
        del self._revisions[:gone], self._history[:gone]

    def since(self, keys: Keys, revision: int) -> tuple[Sequence[Event], int]:
        """Events from a revision on, and the revision that they reach; a Resync where the history is gone."""
        span = span_of(keys)
        if revision <= self.compacted or revision > self.revision + 1:
            items, now = self.list(span)
            return [Resync(tuple(items), now, span)], now
        first = bisect.bisect_left(self._revisions, revision)
        return [event for _revision, event in self._history[first:] if span.holds(key_of(event))], self.revision

    def watch(self, span: Span, heard: Told) -> Callable[[], None]:
        """Call ``heard`` with each change in a span; returns what ends that."""
        if span not in self._watchers:
            self._watchers[span] = {}
            self._spans.clear()
        self._watchers[span][heard] = None
        return lambda: self._watchers[span].pop(heard, None)

    def _watched(self, key: str) -> builtins.list[Span]:
        if key not in self._spans:
            self._spans[key] = [span for span in self._watchers if span.holds(key)]
        return self._spans[key]

    def elect(self) -> None:
        """A new leader: everything goes on, and every lease has its whole time again."""
        self.leaderless = False
        for lease in self._leases:
            self._renew(lease)

    # Leases.

    def _renew(self, lease: int) -> None:
        ttl = self._leases[lease][0]
        first = self._leases[lease][1] == 0.0
        self._leases[lease] = ttl, self._clock() + ttl
        if first:
            self._later(ttl, lambda: self._expire(lease))

    def _expire(self, lease: int) -> None:
        if lease not in self._leases:
            return
        left = self._leases[lease][1] - self._clock()
        if self.leaderless or left > 1e-9:
            self._later(max(left, 0.5), lambda: self._expire(lease))
        else:
            self.revoke(lease)

    def _need(self, lease: int) -> None:
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease} expired or was revoked")

    def _drop(self, lease: int) -> None:
        self._apply([DeleteOp(key) for key, item in sorted(self.items.items()) if item.lease == lease])

    # Changes.

    def _holds(self, compare: Compare) -> bool:
        item = self.items.get(compare.key)
        match compare:
            case CreateRevision(_, revision):
                return revision == (item.create_revision if item else 0)
            case ModRevision(_, revision):
                return revision == (item.mod_revision if item else 0)
            case _:
                return item is not None and item.value == compare.value

    def _apply(self, ops: Sequence[Op]) -> tuple[int, tuple[Item | None, ...]]:
        revision, events, got = self.revision + 1, list[Event](), list[Item | None]()
        for op in ops:
            match op:
                case GetOp(key):
                    got.append(self.items.get(key))
                case PutOp(key, value, lease):
                    old = self.items.get(key)
                    created = old.create_revision if old else revision
                    self.items[key] = Item(key, bytes(value), created, revision, lease.id if lease else 0)
                    events.append(Put(self.items[key]))
                case DeleteOp(key):
                    if self.items.pop(key, None) is not None:
                        events.append(Deleted(key, revision))
        if events:
            self._publish(revision, events)
        return self.revision, tuple(got)

    def _publish(self, revision: int, events: Sequence[Event]) -> None:
        self.revision = revision
        for event in events:
            self._revisions.append(revision)
            self._history.append((revision, event))
            self.writes[kind_of(key_of(event))] += 1
        for told in self.on_change:
            told(revision, events)
        for event in events:
            for span in self._watched(key_of(event)):
                for heard in tuple(self._watchers[span]):
                    heard(revision, event)


def key_of(event: Event) -> str:
    assert not isinstance(event, Resync)
    return event.item.key if isinstance(event, Put) else event.key


def kind_of(key: str) -> str:
    """``lanes`` of ``/refitd/job/lanes/r0``, ``acks`` of ``/refitd/job/_acks/r0/n0``."""
    parts = key.split("/")
    return parts[3].removeprefix("_") if len(parts) > 3 else key
