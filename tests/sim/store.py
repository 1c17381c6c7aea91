"""What a daemon has instead of a connection to etcd: the same calls, with a network and a cluster in between.

A call is lost, or carried out and its answer lost, or carried out long after its caller gave up, where cuts and missing
leaders say so. Reads are tried again within the request's time, as the real client does. Runs in blocking code.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from refitd.errors import StoreTimeout, StoreUnavailable
from refitd.store.base import Compare, Event, Item, Keys, Lease, Op, PutOp, Span, TxnResult, span_of

from .etcd import SimEtcd
from .loop import PROCESS, loop, sleep, wait
from .net import ETCD, KERNEL

if TYPE_CHECKING:
    from .world import World

T = TypeVar("T")
REQUEST_SECONDS = 2.0
_BACKOFF = (0.05, 2.0)
LATE_SECONDS = 0.5  # how late a part of a watch may be


class SimLease:
    """A lease as a daemon holds it."""

    def __init__(self, store: SimStore, number: int, ttl: float) -> None:
        self._store, self.id, self.ttl = store, number, ttl

    def keepalive(self) -> float:
        return self._store.call("keepalive", lambda: self._store.etcd.keepalive(self.id), write=False)

    def revoke(self) -> None:
        self._store.call("revoke", lambda: self._store.etcd.revoke(self.id), write=True)


class SimStore:
    """A Store for one host."""

    def __init__(self, world: World, host: str) -> None:
        self.etcd, self._net, self._host, self._rng = world.etcd, world.net, host, world.rng
        self._world, self._counts = world, world.counts
        self._watches: list[SimWatch] = []
        self.closed = self.away = False

    def get(self, key: str) -> Item | None:
        return self.call("get", lambda: self.etcd.get(key), write=False)

    def list(self, keys: Keys) -> tuple[builtins.list[Item], int]:
        return self.call("list", lambda: self.etcd.list(keys), write=False)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        return self.txn((), [PutOp(key, value, lease)]).revision

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        return self.call("txn", lambda: self.etcd.txn(compares, then, otherwise), write=True)

    def grant(self, ttl_seconds: float) -> SimLease:
        number, ttl = self.call("grant", lambda: self.etcd.grant(ttl_seconds), write=True)
        return SimLease(self, number, ttl)

    def watch(self, keys: Keys, from_revision: int = 0) -> SimWatch:
        self._counts["watch"] += 1
        watch = SimWatch(self._world, self._host, span_of(keys), from_revision)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        self.closed = True
        for watch in self._watches:
            watch.close()

    # The way there and back.

    def call(self, kind: str, request: Callable[[], T], write: bool) -> T:
        """Carry a request out. Raises StoreTimeout (perhaps done), StoreUnavailable (not done), what it raises."""
        deadline = loop().time() + REQUEST_SECONDS
        while True:
            try:
                result = self._once(kind, request, write, deadline)
                self.away = False
                return result
            except (StoreUnavailable, StoreTimeout) as error:
                self.away = True
                if isinstance(error, StoreTimeout):
                    raise
                if write or self.closed or loop().time() + 0.2 > deadline:
                    raise
                sleep(self._rng.uniform(0.05, 0.2))

    def _once(self, kind: str, request: Callable[[], T], write: bool, deadline: float) -> T:
        if self.closed:
            raise StoreUnavailable("the store was closed")
        self._counts[kind] += 1
        there, back = self._net.delay(self._host, ETCD), self._net.delay(ETCD, self._host)
        sleep(min(there, max(deadline - loop().time(), 0.0)))
        if not self._net.passes(self._host, ETCD):
            self._give_up(deadline, None)
        if self.etcd.leaderless:
            if self._rng.random() < 0.5:
                raise StoreUnavailable("etcd has no leader")
            self._give_up(deadline, request if write and self._rng.random() < 0.5 else None)
        self.etcd.writer = PROCESS.get()
        try:
            result = request()
        finally:
            self.etcd.writer = None
        if loop().time() + back > deadline or not self._net.passes(ETCD, self._host):
            self._give_up(deadline, None)
        sleep(back)
        return result

    def _give_up(self, deadline: float, later: Callable[[], Any] | None) -> None:
        """No answer comes in time. What a member had taken in may still be decided by the next leader."""
        if later is not None:
            _when_led(self.etcd, later)
        sleep(max(deadline - loop().time(), 0.0))
        raise StoreTimeout("etcd did not answer in time")


def _when_led(etcd: SimEtcd, request: Callable[[], Any], tries: int = 40) -> None:
    """Carry a request out as soon as there is a leader, within a few seconds; nobody hears the answer."""

    def attempt() -> None:
        if not etcd.leaderless:
            try:
                request()
            except Exception:  # noqa: BLE001 - a lease that is gone by now
                return
        elif tries:
            _when_led(etcd, request, tries - 1)

    loop().call_later(0.1, attempt, context=KERNEL)


class _Followed:
    """A span of a watch, as far as it has been told. Each comes in its own time, whatever is told of the others."""

    def __init__(self, watch: SimWatch, span: Span, next_: int) -> None:
        self._watch, self.span, self.next = watch, span, next_
        self._inbox: list[Event] | None = None  # what has happened since it was told; None: the history knows
        self._due = False
        self.stop = watch.etcd.watch(span, self._heard)
        self._schedule(watch.delay())

    def _heard(self, _revision: int, event: Event) -> None:
        if self._watch.dead:
            self.stop()
            return
        if self._inbox is not None:
            self._inbox.append(event)
        self._schedule(self._watch.delay())

    def _schedule(self, after: float, again: float = _BACKOFF[0]) -> None:
        if not self._due:
            self._due = True
            loop().call_later(after, self._pump, again, context=KERNEL)

    def _pump(self, again: float) -> None:
        self._due = False
        if not self._watch.follows(self):
            return
        if not self._watch.connected():
            self._inbox = None  # it begins again where it was, if the history still goes back so far
            again = min(2 * again, _BACKOFF[1])
            self._schedule(again, again)
            return
        etcd = self._watch.etcd
        if self._inbox is None or self.next <= 0:
            events: Sequence[Event] = etcd.since(self.span, self.next)[0]
        else:
            events = self._inbox
        self._inbox, self.next = [], etcd.revision + 1
        if events:
            self._watch.tell(events)


class SimWatch:
    """The changes in some spans; what happens during a cut comes after it, or as a Resync."""

    def __init__(self, world: World, host: str, span: Span, from_revision: int) -> None:
        self._world, self.etcd, self._net, self._host = world, world.etcd, world.net, host
        self._pending: deque[Event] = deque()
        self._woken: asyncio.Future[None] | None = None
        self._closed = False
        self._process = PROCESS.get()
        self._spans: dict[Span, _Followed] = {}
        self._spans[span] = _Followed(self, span, from_revision)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._closed:
            if self._pending:
                return self._pending.popleft()
            self._woken = loop().create_future()
            wait(self._woken)
        raise StopIteration

    def add(self, keys: Keys, from_revision: int) -> None:
        self.drop(keys)
        span = span_of(keys)
        self._spans[span] = _Followed(self, span, from_revision)

    def drop(self, keys: Keys) -> None:
        followed = self._spans.pop(span_of(keys), None)
        if followed is not None:
            followed.stop()

    def close(self) -> None:
        self._closed = True
        for span in tuple(self._spans):
            self.drop(span)
        self._wake()

    # For its spans.

    @property
    def dead(self) -> bool:
        return self._process is not None and self._process.dead

    def follows(self, followed: _Followed) -> bool:
        return not self._closed and self._spans.get(followed.span) is followed

    def connected(self) -> bool:
        return self._net.passes(ETCD, self._host) and self._net.passes(self._host, ETCD)

    def delay(self) -> float:
        """Seconds until a change is told. A span whose events pile up at the server is late alone."""
        world = self._world
        late = world.rng.uniform(0.0, LATE_SECONDS) if world.rng.random() < world.late_spans else 0.0
        return self._net.delay(ETCD, self._host) + world.watch_delay + late

    def tell(self, events: Sequence[Event]) -> None:
        self.etcd.told[self._host] += len(events)
        self._pending.extend(events)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
