"""The simulated etcd, refitd's store in memory and a real etcd answer the same operations in the same way."""

from __future__ import annotations

import heapq
import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from refitd.errors import LeaseLost
from refitd.store import (
    Compare,
    CreateRevision,
    Deleted,
    DeleteOp,
    Event,
    GetOp,
    Item,
    MemoryStore,
    ModRevision,
    Op,
    Put,
    PutOp,
    Resync,
    TxnResult,
    Value,
    open_store,
    spawn_etcd,
)

from .etcd import MIN_TTL, SimEtcd

KEYS = [f"{kind}/{name}" for kind in ("a", "b") for name in "xyz"]


class Direct:
    """The simulated server as a store, without a network in between."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.etcd = SimEtcd(lambda: self.now, self._later)
        self.get, self.list, self.txn, self.compact = self.etcd.get, self.etcd.list, self.etcd.txn, self.etcd.compact

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), callback))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _number, callback = heapq.heappop(self._timers)
            callback()
        self.now = end

    def grant(self, ttl: float) -> DirectLease:
        return DirectLease(self.etcd, *self.etcd.grant(ttl))

    def watch(self, prefix: str, from_revision: int) -> Iterator[Event]:
        return iter(self.etcd.since(prefix, from_revision)[0])

    def close(self) -> None:
        """Nothing is held."""


class DirectLease:
    def __init__(self, etcd: SimEtcd, number: int, ttl: float) -> None:
        self._etcd, self.id, self.ttl = etcd, number, ttl

    def keepalive(self) -> float:
        return self._etcd.keepalive(self.id)

    def revoke(self) -> None:
        self._etcd.revoke(self.id)


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    process = spawn_etcd(prefer="path")
    yield process.url
    process.stop()


class Trial:
    """One sequence of operations on one store, told in terms that no store chooses."""

    def __init__(self, store: Any, seed: int) -> None:
        self.store, self.rng = store, random.Random(seed)
        self.prefix = f"/{uuid.uuid4().hex}/"
        self.base = store.list(self.prefix)[1]
        self.leases: list[Any] = []
        self.told: list[Any] = []

    def run(self, count: int) -> list[Any]:
        for _ in range(count):
            self.told.append(self._step())
        self.told.append(in_order([self._event(event) for event in self._events(self.base + 1)]))
        return self.told

    def _step(self) -> Any:
        kind = self.rng.choice(["txn", "txn", "txn", "put", "get", "list", "grant", "revoke", "keepalive"])
        if kind == "grant":
            self.leases.append(self.store.grant(60))
            return "granted", self.leases[-1].ttl
        try:
            return kind, getattr(self, "_" + kind)()
        except LeaseLost:
            return kind, "lease lost"

    def _txn(self) -> Any:
        rng = self.rng
        compares = [self._compare() for _ in range(rng.randrange(3))]
        branches = [self._ops(rng.randrange(4)) for _ in range(2)]
        result: TxnResult = self.store.txn(compares, *branches)
        return result.ok, result.revision - self.base, [self._item(item) for item in result.items]

    def _compare(self) -> Compare:
        key = self._key()
        item = self.store.get(key)
        guess = self.rng.random() < 0.6
        choice = self.rng.randrange(3)
        if choice == 2:
            return Value(key, item.value if item and guess else b"other")
        kind, now = (
            (CreateRevision, item.create_revision if item else 0),
            (ModRevision, item.mod_revision if item else 0),
        )
        make, revision = (kind, now)[choice]
        return make(key, revision if guess else revision + 1)

    def _ops(self, count: int) -> list[Op]:
        keys = self.rng.sample(KEYS, count)
        made: list[Op] = []
        for name in keys:
            key, choice = self.prefix + name, self.rng.randrange(4)
            if choice == 0:
                made.append(DeleteOp(key))
            elif choice == 1:
                made.append(GetOp(key))
            else:
                made.append(PutOp(key, self._value(), self._lease() if choice == 3 else None))
        return made

    def _put(self) -> Any:
        result = self.store.txn((), [PutOp(self._key(), self._value(), self._lease())])
        return result.revision - self.base

    def _get(self) -> Any:
        return self._item(self.store.get(self._key()))

    def _list(self) -> Any:
        items, revision = self.store.list(self.prefix + self.rng.choice(["", "a/", "b/"]))
        return [self._item(item) for item in items], revision - self.base

    def _revoke(self) -> Any:
        lease = self._lease()
        return lease.revoke() if lease else None

    def _keepalive(self) -> Any:
        lease = self._lease()
        return lease.keepalive() if lease else None

    def _key(self) -> str:
        return self.prefix + self.rng.choice(KEYS)

    def _value(self) -> bytes:
        return b"%d" % self.rng.randrange(4)

    def _lease(self) -> Any:
        return self.rng.choice([None, *self.leases])

    # In common terms.

    def _item(self, item: Item | None) -> Any:
        if item is None:
            return None
        lease = next((i for i, lease in enumerate(self.leases) if lease.id == item.lease), None)
        name = item.key.removeprefix(self.prefix)
        return name, item.value, item.create_revision - self.base, item.mod_revision - self.base, lease

    def _event(self, event: Event) -> Any:
        if isinstance(event, Put):
            return "put", self._item(event.item)
        if isinstance(event, Deleted):
            return "deleted", event.key.removeprefix(self.prefix), event.revision - self.base
        return "resync", [self._item(item) for item in event.items]

    def _events(self, revision: int) -> Sequence[Event]:
        """Everything since a revision: a last write of our own says where the end is."""
        end = self.prefix + "zzz"
        self.store.txn((), [PutOp(end, b"end")])
        found: list[Event] = []
        watch = self.store.watch(self.prefix, revision)
        for event in watch:
            found.append(event)
            last = event.items[-1].key if isinstance(event, Resync) else None
            if last == end or (isinstance(event, Put) and event.item.key == end):
                break
        if hasattr(watch, "close"):
            watch.close()
        return found


def in_order(events: list[Any]) -> list[Any]:
    """Events of one revision in a fixed order: what a lease takes with it goes in none."""
    return sorted(events, key=lambda e: (e[2], e[1]) if e[0] == "deleted" else (e[1][3], e[1][0]))


def same(store: Any, seed: int, count: int) -> None:
    expected = Trial(Direct(), seed).run(count)
    found = Trial(store, seed).run(count)
    first = next((i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), None)
    assert first is None, f"seed {seed}, operation {first}: simulated {expected[first]}, real {found[first]}"


def test_the_store_in_memory_does_the_same() -> None:
    """200 sequences of 60 operations: answers, revisions, leases, and the events that a watch tells afterwards."""
    for seed in range(200):
        store = MemoryStore()
        same(store, seed, 60)
        store.close()


def test_a_real_etcd_does_the_same(etcd: str) -> None:
    """25 of these sequences against etcd."""
    store = open_store(etcd, request_timeout=20.0)
    for seed in range(25):
        same(store, seed, 60)
    store.close()


def test_history_that_was_compacted_is_told_as_a_resync(etcd: str) -> None:
    """All three: a watch from before the compaction begins with everything that is there."""
    told = []
    for store in (Direct(), MemoryStore(), open_store(etcd, request_timeout=20.0)):
        trial = Trial(store, 7)
        trial.run(30)
        store.compact(store.list(trial.prefix)[1] - 1)
        told.append([trial._event(event) for event in trial._events(trial.base + 1)])
        store.close()
    assert told[0] == told[1] == told[2]
    assert told[0][0][0] == "resync"


def test_a_lease_ends_with_its_keys_when_nobody_renews_it() -> None:
    """At its time and not before; a renewal moves it; an election gives it its whole time again."""
    store = Direct()
    lease = store.grant(0.5)
    assert lease.ttl == MIN_TTL
    store.txn((), [PutOp("/k", b"", lease)])
    store.pass_time(MIN_TTL - 0.1)
    assert lease.keepalive() == MIN_TTL
    store.pass_time(MIN_TTL - 0.1)
    store.etcd.leaderless = True
    store.pass_time(10)
    assert store.get("/k") is not None
    store.etcd.elect()
    store.pass_time(MIN_TTL - 0.1)
    assert store.get("/k") is not None
    store.pass_time(0.7)
    assert store.get("/k") is None
    with pytest.raises(LeaseLost):
        lease.keepalive()
