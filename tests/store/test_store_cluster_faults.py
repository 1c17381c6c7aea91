"""Three real etcd nodes that freeze, die, lose their quorum and compact, under watches, transactions and leases."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Self

import pytest
from watching import Collector, assert_no_gap, insist, until

from refitd.errors import StoreError, StoreTimeout, StoreUnavailable
from refitd.store import DeleteOp, GetOp, Item, ModRevision, Put, PutOp, Resync, Store, open_store
from refitd.store.cluster import EtcdCluster
from refitd.store.etcd import EtcdStore
from refitd.store.keeper import Hold, LeaseKeeper
from refitd.store.spawn import http_get

pytestmark = pytest.mark.slow


@pytest.fixture
def store(cluster: EtcdCluster) -> Iterator[EtcdStore]:
    opened = open_store(cluster.url)
    assert isinstance(opened, EtcdStore)
    opened.put("/begin", b"")
    yield opened
    opened.close()


def test_a_frozen_node_costs_less_than_one_request_and_is_left(cluster: EtcdCluster, store: EtcdStore) -> None:
    """Reads, guarded writes, grants and keepalives find the next node in their time; a watch moves along, gapless."""
    revision = store.put("/w/0", b"")
    lease = store.grant(30)
    collector = Collector(store.watch("/w/", revision))
    collector.wait_for(1)
    calls = [
        lambda: store.get("/w/0"),
        lambda: store.txn([ModRevision("/guarded", 0)], [PutOp("/guarded", b"")]).ok,
        lambda: store.grant(20).ttl,
        lambda: lease.keepalive(),
    ]
    expected = [Item("/w/0", b"", revision, revision, 0), True, 20.0, 30.0]
    created = 0
    for call, answer in zip(calls, expected, strict=True):
        frozen = _ask_a_follower(cluster, store)
        cluster.freeze(frozen)
        start = time.monotonic()
        assert call() == answer
        assert time.monotonic() - start < 4
        assert store.endpoint != cluster.endpoints[frozen]
        last = insist(store, "/w/k", b"")
        created = created or last
        assert collector.wait_for_revision(last)[-1] == Put(Item("/w/k", b"", created, last, 0))
        assert time.monotonic() - start < 8
        cluster.thaw(frozen)
        cluster.wait_healthy()
    seen = [event.item.mod_revision for event in collector.events if isinstance(event, Put)]
    assert len(collector.events) == len(seen) == 5
    assert seen == sorted(set(seen))


def test_a_put_to_a_frozen_node_is_unknown_and_the_next_goes_elsewhere(cluster: EtcdCluster, store: EtcdStore) -> None:
    """A plain put is never sent twice: it ends within the request timeout, and the frozen node is left."""
    frozen = cluster.endpoints.index(store.endpoint)
    cluster.freeze(frozen)
    start = time.monotonic()
    with pytest.raises(StoreTimeout, match=rf"etcd {cluster.endpoints[frozen]}: Deadline Exceeded"):
        store.put("/k", b"lost")
    assert time.monotonic() - start < 4
    assert store.endpoint != cluster.endpoints[frozen]
    insist(store, "/k", b"next")
    item = store.get("/k")
    assert item is not None
    assert item.value == b"next"
    cluster.thaw(frozen)


def test_a_watch_alone_leaves_a_frozen_node(cluster: EtcdCluster, store: EtcdStore) -> None:
    """Without any other call on the store a frozen node is noticed, and no event is missed."""
    revision = store.put("/w/0", b"")
    collector = Collector(store.watch("/w/", revision))
    collector.wait_for(1)
    frozen = cluster.endpoints.index(store.endpoint)
    cluster.freeze(frozen)
    writer = open_store("etcd://" + ",".join(e for e in cluster.endpoints if e != cluster.endpoints[frozen]))
    last = insist(writer, "/w/1", b"")
    start = time.monotonic()
    assert collector.wait_for_revision(last)[-1] == Put(Item("/w/1", b"", last, last, 0))
    assert time.monotonic() - start < 15
    writer.close()
    cluster.thaw(frozen)


def test_leaders_die_in_the_middle_of_watches_and_transactions(cluster: EtcdCluster) -> None:
    """Four counters over six deaths of leaders: each acknowledged step counts once, each watch sees each revision."""
    stores = [open_store(cluster.url) for _ in range(4)]
    first = stores[0].put("/n/begin", b"")
    collectors = [Collector(store.watch("/n/", first)) for store in stores]
    with contextlib.ExitStack() as counting:
        counters = [counting.enter_context(Counter(store, f"/n/{i}")) for i, store in enumerate(stores)]
        for death in range(6):
            assert until(lambda steps=5 * death: all(c.acknowledged >= steps for c in counters), 30)  # type: ignore[misc]
            lead = cluster.leader()
            cluster.kill(lead)
            cluster.leader()
            cluster.restart(lead)
    last = insist(stores[0], "/n/end", b"")
    for i, counter in enumerate(counters):
        item = stores[0].get(f"/n/{i}")
        assert item is not None
        assert counter.acknowledged <= int(item.value) <= counter.acknowledged + counter.unknown
    for store, collector in zip(stores, collectors, strict=True):
        assert_no_gap(collector.wait_for_revision(last), first, last)
        store.close()
        collector.join()
        assert collector.error is None


def test_compaction_under_a_watch(cluster: EtcdCluster, store: EtcdStore) -> None:
    """A watch that was cut off while its history went gets a Resync, and goes on from there; one that was not, none."""
    alone = open_store("etcd://" + cluster.endpoints[0])
    revision = insist(store, "/w/0", b"")
    steady, cut = Collector(store.watch("/w/", revision)), Collector(alone.watch("/w/", revision))
    cut.wait_for(1)
    cluster.kill(0)
    last = [insist(store, f"/w/{n}", b"x") for n in range(1, 4)][-1]
    steady.wait_for_revision(last)
    store.compact(last)
    cluster.restart(0)
    items = [Item("/w/0", b"", revision, revision, 0)]
    items += [Item(f"/w/{n}", b"x", last - 3 + n, last - 3 + n, 0) for n in range(1, 4)]
    assert cut.wait_for(2)[1] == Resync(tuple(items), last)
    new = insist(store, "/w/4", b"")
    assert cut.wait_for_revision(new)[2:] == [Put(Item("/w/4", b"", new, new, 0))]
    assert_no_gap(steady.wait_for_revision(new), revision, new)
    assert not any(isinstance(event, Resync) for event in steady.events)
    alone.close()


def test_the_quorum_is_lost_and_regained(cluster: EtcdCluster, store: EtcdStore) -> None:
    """Nothing acknowledged is lost, the watch has no gap, the old lease lives on, and its keeper says what it knew."""
    told: list[tuple[float, Hold, str]] = []
    keeper = LeaseKeeper(store, 4, 0.5, lambda hold, reason: told.append((time.monotonic(), hold, reason)))
    lease = keeper.acquire()
    revision = store.put("/w/member", b"", lease)
    collector = Collector(store.watch("/w/", revision))
    collector.wait_for(1)
    lead = cluster.leader()
    away = [lead, (lead + 1) % 3]
    for i in away:
        cluster.kill(i)
    deadline = keeper.deadline
    for call in (lambda: store.get("/w/member"), lambda: store.put("/w/refused", b""), lambda: store.grant(5)):
        start = time.monotonic()
        with pytest.raises((StoreTimeout, StoreUnavailable)):
            call()
        assert time.monotonic() - start < 4
    assert until(lambda: len(told) == 2)
    assert [hold for _, hold, _ in told] == [Hold.HELD, Hold.DOUBTFUL]
    assert 0 <= told[1][0] - keeper.deadline < 1
    assert keeper.deadline - deadline < 0.6  # at most a renewal that was under way
    assert (keeper.alive, keeper.lease) == (False, lease)
    for i in away:
        cluster.restart(i, wait=False)
    cluster.wait_healthy()
    assert until(lambda: len(told) == 3)
    assert (told[2][1], keeper.alive, keeper.lease) == (Hold.HELD, True, lease)
    last = insist(store, "/w/after", b"")
    assert_no_gap(collector.wait_for_revision(last), revision, last)
    member = store.get("/w/member")
    assert member is not None
    assert (member.mod_revision, member.lease) == (revision, lease.id)
    keeper.close()
    assert store.get("/w/member") is None


def test_a_node_without_a_leader_says_so_at_once(cluster: EtcdCluster) -> None:
    """Nobody waits for a quorum that is away: writes say that nothing was written; a watch goes on when it is back."""
    store = open_store("etcd://" + cluster.endpoints[0])
    revision = insist(store, "/w/0", b"")
    collector = Collector(store.watch("/w/", revision))
    collector.wait_for(1)
    assert not store.away
    for i in (1, 2):
        cluster.freeze(i)
    assert until(lambda: b"\netcd_server_has_leader 0\n" in _metrics(cluster, 0), 30)
    for write in (lambda: store.put("/w/k", b""), lambda: store.txn((), [DeleteOp("/w/0")])):
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="etcdserver: no leader"):
            write()
        assert time.monotonic() - start < 1
    assert store.away
    for i in (1, 2):
        cluster.thaw(i)
    last = insist(store, "/w/1", b"")
    assert not store.away
    assert_no_gap(collector.wait_for_revision(last), revision, last)
    store.close()


def test_a_lease_that_ends_in_an_outage_is_doubted_by_its_own_clock_then_known_to_be_lost(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    """Cut off from a cluster that goes on: DOUBTFUL at the deadline, never after the key is gone, LOST on return."""
    told: list[tuple[float, Hold]] = []
    keeper = LeaseKeeper(store, 2, 0.5, lambda hold, _: told.append((time.monotonic(), hold)))
    lease = keeper.acquire()
    watcher = open_store(cluster.url)
    revision = store.put("/member", b"", lease)
    gone = Collector(watcher.watch("/member", revision + 1))
    cut = [endpoint._target for endpoint in store._channel._endpoints]
    for endpoint in store._channel._endpoints:
        endpoint._target = lambda: "ipv4:127.0.0.1:1"  # type: ignore[method-assign]
        endpoint.close(for_good=False)
    gone.wait_for(1)
    removed = time.monotonic()
    assert [hold for _, hold in told] == [Hold.HELD, Hold.DOUBTFUL]
    assert keeper.deadline <= told[1][0] < removed
    for endpoint, target in zip(store._channel._endpoints, cut, strict=True):
        endpoint._target = target  # type: ignore[method-assign]
        endpoint.close(for_good=False)
    assert until(lambda: len(told) == 3)
    assert (told[2][1], keeper.lease, keeper.alive) == (Hold.LOST, None, False)
    again = keeper.acquire()
    assert (again.id != lease.id, keeper.alive, told[3][1]) == (True, True, Hold.HELD)
    keeper.close()
    watcher.close()
    gone.join()


def test_clients_spread_and_survive_one_dead_address(cluster: EtcdCluster) -> None:
    """Stores begin at different nodes; an address where nobody listens costs no time worth speaking of."""
    stores = [open_store(f"{cluster.url},127.0.0.1:1") for _ in range(20)]
    first = {store.endpoint for store in stores}  # type: ignore[attr-defined]
    assert len(first) > 1
    start = time.monotonic()
    for store in stores:
        assert store.txn((), [GetOp("/k")]).ok
    assert time.monotonic() - start < 5
    assert "127.0.0.1:1" not in {store.endpoint for store in stores}  # type: ignore[attr-defined]
    for store in stores:
        store.close()


class Counter(threading.Thread):
    """Adds one again and again by compare-and-set: how often that was acknowledged, how often nobody could tell."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged = self.unknown = 0
        self._store, self._key, self._done = store, key, threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(0.005):
            try:
                self.acknowledged += self._step()
            except StoreTimeout:
                self.unknown += 1
            except StoreError:
                time.sleep(0.01)

    def _step(self) -> bool:
        item = self._store.get(self._key)
        value, revision = (int(item.value), item.mod_revision) if item else (0, 0)
        step = PutOp(self._key, str(value + 1).encode())
        return self._store.txn([ModRevision(self._key, revision)], [step]).ok


def _ask_a_follower(cluster: EtcdCluster, store: EtcdStore) -> int:
    """Make the store ask a node that does not lead, so that freezing it needs no election; its number."""
    lead = cluster.leader()
    while store.endpoint == cluster.endpoints[lead]:
        store._channel.blame(store._channel.endpoint, "it leads")
    return cluster.endpoints.index(store.endpoint)


def _metrics(cluster: EtcdCluster, i: int) -> bytes:
    node = cluster._nodes[i]
    return http_get(node.host, node.plain, "/metrics")
