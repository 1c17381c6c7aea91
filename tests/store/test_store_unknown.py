"""Answers that get lost: what can be known is found out, what cannot is said, and nothing is done twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from faulty import make_faulty

from refitd.errors import StoreTimeout, StoreUnavailable
from refitd.store import CreateRevision, DeleteOp, GetOp, Item, ModRevision, PutOp, Value, open_store
from refitd.store._etcd_txn import at_most_once
from refitd.store.etcd import EtcdStore
from refitd.store.spawn import EtcdProcess


@pytest.fixture
def etcd(path_etcd: EtcdProcess) -> Iterator[EtcdStore]:
    opened = open_store(path_etcd.url, request_timeout=1.0)
    assert isinstance(opened, EtcdStore)
    opened.get("k")
    yield opened
    opened.close()


@pytest.fixture
def other(path_etcd: EtcdProcess) -> Iterator[EtcdStore]:
    """Somebody else."""
    opened = open_store(path_etcd.url)
    assert isinstance(opened, EtcdStore)
    yield opened
    opened.close()


def test_a_guarded_write_that_was_done_is_recognised(etcd: EtcdStore, base: str) -> None:
    """The result has the revision of the write itself, and the write happened once."""
    make_faulty(etcd, "kv", "Txn", "done")
    ops = [PutOp(base + "a", b"1"), PutOp(base + "b", b"2")]
    result = etcd.txn([CreateRevision(base + "a", 0)], ops)
    items, revision = etcd.list(base)
    assert items == [Item(base + "a", b"1", result.revision, result.revision, 0),
                     Item(base + "b", b"2", result.revision, result.revision, 0)]  # fmt: skip
    assert (result.ok, revision) == (True, result.revision)


def test_a_guarded_write_that_never_arrived_is_sent_again(etcd: EtcdStore, base: str) -> None:
    """Twice lost, then done: one revision, at the third request."""
    first = etcd.put(base + "k", b"0")
    before = etcd.counts.so_far()
    make_faulty(etcd, "kv", "Txn", "lost", "lost")
    result = etcd.txn([ModRevision(base + "k", first)], [PutOp(base + "k", b"1"), GetOp(base + "k")])
    assert result.items == (Item(base + "k", b"1", first, result.revision, 0),)
    assert (result.ok, result.revision) == (True, first + 1)
    assert etcd.counts.so_far() - before == {"txn": 3}


def test_a_guarded_delete_that_never_arrived_is_sent_again(etcd: EtcdStore, base: str) -> None:
    """A delete guarded by the key's revision is harmless twice."""
    first = etcd.put(base + "k", b"0")
    make_faulty(etcd, "kv", "Txn", "lost")
    assert etcd.txn([ModRevision(base + "k", first)], [DeleteOp(base + "k")]).ok
    assert etcd.get(base + "k") is None


def test_a_delete_that_may_have_been_anybodys_stays_unknown(etcd: EtcdStore, base: str) -> None:
    """A key that is gone does not say who removed it."""
    first = etcd.put(base + "k", b"0")
    make_faulty(etcd, "kv", "Txn", "done")
    with pytest.raises(StoreTimeout, match="its keys have changed since"):
        etcd.txn([ModRevision(base + "k", first)], [DeleteOp(base + "k")])
    assert etcd.get(base + "k") is None


@pytest.mark.parametrize("step", ["done", "lost"])
def test_a_write_that_was_overtaken_stays_unknown(etcd: EtcdStore, other: EtcdStore, base: str, step: str) -> None:
    """Another's value says neither that ours was there before, nor that it was not; it is left alone."""
    make_faulty(etcd, "kv", "Txn", step, between=lambda: other.put(base + "k", b"other"))
    with pytest.raises(StoreTimeout, match="Deadline Exceeded; its keys have changed since"):
        etcd.txn([CreateRevision(base + "k", 0)], [PutOp(base + "k", b"ours")])
    item = etcd.get(base + "k")
    assert item is not None
    assert item.value == b"other"


def test_the_same_value_under_another_lease_is_not_ours(etcd: EtcdStore, other: EtcdStore, base: str) -> None:
    """Who wrote is told apart by the lease too."""
    ours, theirs = etcd.grant(60), other.grant(60)
    make_faulty(etcd, "kv", "Txn", "lost", between=lambda: other.put(base + "k", b"v", theirs))
    with pytest.raises(StoreTimeout):
        etcd.txn([CreateRevision(base + "k", 0)], [PutOp(base + "k", b"v", ours)])
    item = etcd.get(base + "k")
    assert item is not None
    assert item.lease == theirs.id
    ours.revoke()
    theirs.revoke()


def test_a_put_that_was_done_is_recognised(etcd: EtcdStore, base: str) -> None:
    """A plain put is found by its value and a revision that is new."""
    first = etcd.put(base + "k", b"v")
    make_faulty(etcd, "kv", "Txn", "done")
    assert etcd.put(base + "k", b"v") == first + 1


def test_a_put_that_was_lost_is_never_sent_again(etcd: EtcdStore, base: str) -> None:
    """It stays unknown for the request timeout, also where an older write left the same value."""
    first = etcd.put(base + "k", b"v")
    make_faulty(etcd, "kv", "Txn", "lost")
    start = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"etcd 127\.0\.0\.1:\d+: Deadline Exceeded"):
        etcd.put(base + "k", b"v")
    assert time.monotonic() - start < 3
    assert etcd.get(base + "k") == Item(base + "k", b"v", first, first, 0)


def test_a_transaction_that_reads_without_a_guard_stays_unknown(etcd: EtcdStore, base: str) -> None:
    """What it read cannot be read again: it is not even tried."""
    make_faulty(etcd, "kv", "Txn", "done")
    before = etcd.counts.so_far()
    with pytest.raises(StoreTimeout):
        etcd.txn((), [PutOp(base + "k", b"v"), GetOp(base + "l")])
    assert etcd.counts.so_far() - before == {"txn": 1}


def test_a_grant_is_asked_for_again_under_the_same_number(etcd: EtcdStore, base: str) -> None:
    """A grant whose answer was lost is the same lease at the second request, with the time that etcd granted."""
    make_faulty(etcd, "lease", "LeaseGrant", "done")
    before = etcd.counts.so_far()
    lease = etcd.grant(7)
    assert (lease.ttl, lease.keepalive()) == (7.0, 7.0)
    assert etcd.counts.so_far() - before == {"grant": 3, "keepalive": 1}
    lease.revoke()


def test_a_leader_that_was_deposed_renews_nothing(etcd: EtcdStore) -> None:
    """An answer of an older term than one seen before is refused: another leader counts the lease's time."""
    lease = etcd.grant(30)
    term = etcd._channel.term
    etcd._channel.term = term + 1
    with pytest.raises(StoreUnavailable, match="an etcd that no longer leads renewed the lease"):
        lease.keepalive()
    etcd._channel.term = term
    assert lease.keepalive() == 30.0
    lease.revoke()


K = "k"


@pytest.mark.parametrize(
    ("compares", "then", "otherwise", "safe"),
    [
        ([CreateRevision(K, 0)], [PutOp(K, b"")], [], True),
        ([ModRevision(K, 0)], [PutOp(K, b"")], [], True),
        ([ModRevision(K, 7)], [PutOp(K, b"")], [GetOp(K)], True),
        ([ModRevision(K, 7)], [DeleteOp(K)], [], True),
        ([CreateRevision(K, 7)], [DeleteOp(K)], [], True),
        ([Value("l", b"x"), ModRevision(K, 7)], [PutOp(K, b"")], [], True),
        ([CreateRevision(K, 7)], [PutOp(K, b"")], [], False),
        ([ModRevision(K, 0)], [DeleteOp(K)], [], False),
        ([ModRevision("l", 7)], [PutOp(K, b"")], [], False),
        ([Value(K, b"x")], [PutOp(K, b"y")], [], False),
        ([ModRevision(K, 7)], [PutOp(K, b"")], [PutOp("l", b"")], False),
        ([ModRevision(K, 7)], [GetOp(K)], [], False),
        ([], [PutOp(K, b"")], [], False),
    ],
)
def test_what_may_be_sent_again(compares: Any, then: Any, otherwise: Any, safe: bool) -> None:
    """Only a transaction whose own writes make one of its compares false."""
    assert at_most_once(compares, then, otherwise) is safe
