"""``memory://``: the store in this process. State is gone with it; for one node, and for tests."""

from __future__ import annotations

import builtins
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from refitd.errors import InputError, LeaseLost, StoreUnavailable
from refitd.store.base import (
    Compare,
    Counts,
    CreateRevision,
    Deleted,
    DeleteOp,
    Event,
    GetOp,
    Item,
    Keys,
    Lease,
    ModRevision,
    Op,
    Put,
    PutOp,
    Resync,
    Span,
    TxnResult,
    check_key,
    check_txn,
    span_of,
)

Clock = Callable[[], float]
_REST = 0.005  # seconds by which a watcher may be late
_POLL = 0.02  # how late a watcher notices that an injected clock moved, seconds of real time


class MemoryLease:
    """A lease of a MemoryStore."""

    def __init__(self, store: MemoryStore, lease_id: int, ttl: float) -> None:
        self._store, self.id, self.ttl = store, lease_id, ttl

    def keepalive(self) -> float:
        """Renew; the seconds now left. Raises LeaseLost."""
        self._store._renew(self.id, self.ttl)
        return self.ttl

    def revoke(self) -> None:
        """Give the lease up, with its keys."""
        self._store._revoke(self.id)

    def __repr__(self) -> str:
        return f"MemoryLease({self.id}, ttl={self.ttl})"


class MemoryWatch:
    """Reads the store's history from a revision on; the waiting reader also ends leases that are due."""

    def __init__(self, store: MemoryStore, keys: Keys, from_revision: int) -> None:
        self._store = store
        self._next = {span_of(keys): from_revision}
        self._pending: deque[Event] = deque()
        self._closed = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._store._changed:
            while not self._closed:
                if not self._pending:
                    self._fill()
                if self._pending:
                    return self._pending.popleft()
                self._store._wait()
        raise StopIteration

    def add(self, keys: Keys, from_revision: int) -> None:
        """Follow more keys. Raises InputError without a revision to begin at."""
        if from_revision < 1:
            raise InputError("add.from_revision", "at least 1", str(from_revision))
        with self._store._changed:
            self._next[span_of(keys)] = from_revision
            self._store._changed.notify_all()

    def drop(self, keys: Keys) -> None:
        """Follow some keys no more."""
        with self._store._changed:
            self._next.pop(span_of(keys), None)

    def close(self) -> None:
        """End the iterator, from any thread."""
        with self._store._changed:
            self._closed = True
            self._store._watches.discard(self)
            self._store._changed.notify_all()

    def _fill(self) -> None:
        for span, first in self._next.items():
            events, revision = self._store._since(span, first)
            self._pending.extend(events)
            self._next[span] = revision + 1


class MemoryStore:
    """A Store in this process. ``clock``: monotonic seconds; ``history``: how many changes a watch can go back."""

    away = False  # it is here

    def __init__(self, clock: Clock = time.monotonic, history: int = 10_000) -> None:
        self._clock = clock
        self._poll = None if clock is time.monotonic else _POLL
        self._changed = threading.Condition(threading.RLock())
        self._items: dict[str, Item] = {}
        self._revision = 1
        self._deadlines: dict[int, float] = {}
        self._lease_ids = itertools.count(1)
        self._history: deque[tuple[int, Put | Deleted]] = deque()
        self._history_limit = history
        self._compacted = 0  # the newest revision that a watch can no longer read
        self._watches: set[MemoryWatch] = set()
        self._closed = False
        self.counts = Counts()

    # the Store protocol

    def get(self, key: str) -> Item | None:
        """The key as it is now, or None."""
        check_key("get.key", key)
        with self._open("get"):
            return self._items.get(key)

    def list(self, keys: Keys) -> tuple[list[Item], int]:
        """All items of a prefix or a span, by key, and the revision."""
        with self._open("list"):
            return self._within(span_of(keys)), self._revision

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write; the revision it got. Raises LeaseLost."""
        check_key("put.key", key)
        with self._open("put"):
            self._apply((PutOp(key, value, lease),))
            return self._revision

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        """Do ``then`` when every compare holds, else ``otherwise``, as one change with one revision."""
        check_txn(compares, then, otherwise)
        with self._open("txn"):
            ok = all(self._holds(compare) for compare in compares)
            items = self._apply(then if ok else otherwise)
            return TxnResult(ok, self._revision, items)

    def grant(self, ttl_seconds: float) -> MemoryLease:
        """A new lease of exactly ``ttl_seconds``."""
        if ttl_seconds <= 0:
            raise InputError("grant.ttl_seconds", "more than 0", str(ttl_seconds))
        with self._open("grant"):
            lease = MemoryLease(self, next(self._lease_ids), ttl_seconds)
            self._deadlines[lease.id] = self._clock() + ttl_seconds
            self._changed.notify_all()
            return lease

    def watch(self, keys: Keys, from_revision: int = 0) -> MemoryWatch:
        """Changes with revision ``from_revision`` and later; 0 starts with a Resync."""
        with self._open("watch"):
            watch = MemoryWatch(self, keys, from_revision)
            self._watches.add(watch)
            return watch

    def close(self) -> None:
        """End all watches; later calls raise StoreUnavailable."""
        with self._changed:
            self._closed = True
            for watch in tuple(self._watches):
                watch.close()

    def compact(self, revision: int) -> None:
        """Forget the history up to and including ``revision``."""
        with self._open("compact"):
            self._compacted = max(self._compacted, min(revision, self._revision))
            while self._history and self._history[0][0] <= self._compacted:
                self._history.popleft()

    # leases

    def _renew(self, lease_id: int, ttl: float) -> None:
        with self._open("keepalive"):
            self._need_lease(lease_id)
            self._deadlines[lease_id] = self._clock() + ttl

    def _revoke(self, lease_id: int) -> None:
        with self._open("revoke"):
            if self._deadlines.pop(lease_id, None) is not None:
                self._drop(lease_id)

    def _need_lease(self, lease_id: int) -> None:
        if lease_id not in self._deadlines:
            raise LeaseLost(f"lease {lease_id} expired or was revoked")

    def _expire(self) -> None:
        now = self._clock()
        for lease_id in [i for i, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[lease_id]
            self._drop(lease_id)

    def _drop(self, lease_id: int) -> None:
        self._apply([DeleteOp(key) for key, item in self._items.items() if item.lease == lease_id])

    # everything below runs under the lock

    @contextmanager
    def _open(self, kind: str) -> Iterator[None]:
        """The lock, after leases that are due have ended. Raises StoreUnavailable after close()."""
        with self._changed:
            if self._closed:
                raise StoreUnavailable("the store was closed")
            self.counts.add(kind)
            self._expire()
            yield

    def _wait(self) -> None:
        waits = [deadline - self._clock() for deadline in self._deadlines.values()]
        if self._poll is not None:
            waits.append(self._poll)
        if self._changed.wait(max(0.0, min(waits)) if waits else None) and self._poll is None:
            self._rest()

    def _rest(self) -> None:
        """Let a burst of changes end: a reader that is woken by each would take the interpreter from their writer."""
        self._changed.release()
        try:
            time.sleep(_REST)
        finally:
            self._changed.acquire()

    def _within(self, span: Span) -> builtins.list[Item]:
        return [self._items[key] for key in sorted(self._items) if span.holds(key)]

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        match compare:
            case CreateRevision(_, revision):
                return revision == (item.create_revision if item else 0)
            case ModRevision(_, revision):
                return revision == (item.mod_revision if item else 0)
            case _:
                return item is not None and item.value == compare.value

    def _apply(self, ops: Sequence[Op]) -> tuple[Item | None, ...]:
        for op in ops:
            if isinstance(op, PutOp) and op.lease is not None:
                self._need_lease(op.lease.id)
        revision = self._revision + 1
        items: list[Item | None] = []
        events: list[Put | Deleted] = []
        for op in ops:
            match op:
                case GetOp(key):
                    items.append(self._items.get(key))
                case PutOp(key, value, lease):
                    events.append(Put(self._write(key, value, lease, revision)))
                case DeleteOp(key) if self._items.pop(key, None) is not None:
                    events.append(Deleted(key, revision))
        if events:
            self._publish(revision, events)
        return tuple(items)

    def _write(self, key: str, value: bytes, lease: Lease | None, revision: int) -> Item:
        old = self._items.get(key)
        created = old.create_revision if old else revision
        self._items[key] = Item(key, bytes(value), created, revision, lease.id if lease else 0)
        return self._items[key]

    def _publish(self, revision: int, events: Sequence[Put | Deleted]) -> None:
        self._revision = revision
        self._history.extend((revision, event) for event in events)
        while len(self._history) > self._history_limit:
            self._compacted = max(self._compacted, self._history.popleft()[0])
        while self._history and self._history[0][0] <= self._compacted:
            self._history.popleft()
        self._changed.notify_all()

    def _since(self, span: Span, from_revision: int) -> tuple[Iterable[Event], int]:
        """The events of a span from a revision on, and the revision that they reach."""
        self._expire()
        if from_revision <= self._compacted or from_revision > self._revision + 1:
            self.counts.add("list")
            return [Resync(tuple(self._within(span)), self._revision, span)], self._revision
        found: deque[Event] = deque()
        for revision, event in reversed(self._history):
            if revision < from_revision:
                break
            key = event.item.key if isinstance(event, Put) else event.key
            if span.holds(key):
                found.appendleft(event)
        return found, self._revision
