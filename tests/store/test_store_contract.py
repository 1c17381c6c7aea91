"""What every store does, whatever it is made of."""

from __future__ import annotations

import threading
import time
from itertools import islice
from typing import Any

import pytest

from refitd.errors import InputError, LeaseLost, StoreUnavailable
from refitd.store import (
    CreateRevision,
    Deleted,
    DeleteOp,
    GetOp,
    Item,
    ModRevision,
    Put,
    PutOp,
    Resync,
    Span,
    Store,
    TxnResult,
    Value,
    below,
)


def test_a_put_is_read_back_with_its_revisions(store: Store, base: str) -> None:
    """A key keeps its create revision and gets a new mod revision with each put."""
    first = store.put(base + "k", b"one")
    second = store.put(base + "k", b"\x00two\xff")
    assert second == first + 1
    assert store.get(base + "k") == Item(base + "k", b"\x00two\xff", first, second, 0)


def test_an_absent_key_is_none(store: Store, base: str) -> None:
    """get() of a key that does not exist is None."""
    assert store.get(base + "nothing") is None


def test_a_key_that_was_deleted_is_created_anew(store: Store, base: str) -> None:
    """After a delete the next put sets a new create revision."""
    store.put(base + "k", b"1")
    store.txn((), [DeleteOp(base + "k")])
    revision = store.put(base + "k", b"2")
    assert store.get(base + "k") == Item(base + "k", b"2", revision, revision, 0)


def test_list_gives_a_prefix_in_order(store: Store, base: str) -> None:
    """list() holds exactly the keys with the prefix, by key, and the store's revision."""
    for name in ("b/2", "a", "b/10", "b", "c"):
        last = store.put(base + name, name.encode())
    items, revision = store.list(base + "b/")
    assert [(i.key, i.value) for i in items] == [(base + "b/10", b"b/10"), (base + "b/2", b"b/2")]
    assert revision == last
    assert [i.key for i in store.list(base)[0]] == [base + n for n in ("a", "b", "b/10", "b/2", "c")]


def test_the_empty_prefix_is_everything(store: Store, base: str) -> None:
    """list("") holds keys of all prefixes."""
    store.put(base + "k", b"")
    assert base + "k" in [item.key for item in store.list("")[0]]


def test_an_empty_key_is_refused(store: Store) -> None:
    """No call takes the empty key."""
    with pytest.raises(InputError, match=r"get\.key: expected a key, got an empty string"):
        store.get("")
    with pytest.raises(InputError, match="expected a key, got an empty string"):
        store.put("", b"")


def test_create_only_once(store: Store, base: str) -> None:
    """CreateRevision 0 holds for an absent key only; the other branch reads who was first."""
    create, read = [CreateRevision(base + "k", 0)], [GetOp(base + "k")]
    won = store.txn(create, [PutOp(base + "k", b"first")], read)
    lost = store.txn(create, [PutOp(base + "k", b"second")], read)
    assert won.ok
    assert won.items == ()
    item = Item(base + "k", b"first", won.revision, won.revision, 0)
    assert lost == TxnResult(False, won.revision, (item,))


def test_compare_mod_revision_and_value(store: Store, base: str) -> None:
    """ModRevision and Value hold for exactly the present state, and all compares must hold."""
    revision = store.put(base + "k", b"v")
    cases: list[tuple[Any, bool]] = [
        (ModRevision(base + "k", revision), True),
        (ModRevision(base + "k", revision - 1), False),
        (ModRevision(base + "absent", 0), True),
        (CreateRevision(base + "k", revision), True),
        (CreateRevision(base + "k", 0), False),
        (Value(base + "k", b"v"), True),
        (Value(base + "k", b"w"), False),
        (Value(base + "absent", b""), False),
    ]
    for compare, holds in cases:
        assert store.txn([compare], []).ok is holds, compare
    assert not store.txn([cases[0][0], cases[1][0]], []).ok


def test_a_transaction_is_one_revision(store: Store, base: str) -> None:
    """All writes of a transaction share a revision, and a Get after a Put in it sees the Put."""
    before = store.put(base + "gone", b"x")
    ops = [
        PutOp(base + "a", b"1"),
        DeleteOp(base + "gone"),
        PutOp(base + "b", b"2"),
        GetOp(base + "a"),
        GetOp(base + "gone"),
    ]
    result = store.txn((), ops)
    assert result.revision == before + 1
    assert result.items == (Item(base + "a", b"1", result.revision, result.revision, 0), None)
    assert [i.mod_revision for i in store.list(base)[0]] == [before + 1, before + 1]


def test_a_transaction_without_a_change_keeps_the_revision(store: Store, base: str) -> None:
    """Reads, and the delete of an absent key, make no revision."""
    revision = store.put(base + "k", b"")
    assert store.txn((), [GetOp(base + "k"), DeleteOp(base + "absent")]).revision == revision


@pytest.mark.parametrize("second", [PutOp("k", b"2"), DeleteOp("k")])
def test_one_key_is_written_once_in_a_transaction(store: Store, second: PutOp | DeleteOp) -> None:
    """A branch that writes a key twice is refused and changes nothing."""
    with pytest.raises(InputError, match=r"txn\.then: expected each key written once, got k twice"):
        store.txn((), [PutOp("k", b"1"), second])
    assert store.get("k") is None


def test_revoking_a_lease_deletes_its_keys(store: Store, base: str) -> None:
    """revoke() ends the lease with its keys and may be repeated; other keys stay."""
    lease = store.grant(10)
    store.put(base + "mine", b"", lease)
    store.put(base + "other", b"")
    found = store.get(base + "mine")
    assert found is not None
    assert found.lease == lease.id != 0
    lease.revoke()
    lease.revoke()
    assert [i.key for i in store.list(base)[0]] == [base + "other"]


def test_a_lost_lease_is_said(store: Store, base: str) -> None:
    """keepalive, put and txn under a lease that is gone raise LeaseLost and change nothing."""
    lease = store.grant(10)
    lease.revoke()
    with pytest.raises(LeaseLost):
        lease.keepalive()
    with pytest.raises(LeaseLost):
        store.put(base + "k", b"", lease)
    with pytest.raises(LeaseLost):
        store.txn((), [PutOp(base + "a", b""), PutOp(base + "k", b"", lease)])
    assert store.list(base)[0] == []


def test_a_put_without_the_lease_takes_the_key_off_it(store: Store, base: str) -> None:
    """A key belongs to the lease of its last put."""
    lease = store.grant(10)
    store.put(base + "k", b"1", lease)
    revision = store.put(base + "k", b"2")
    lease.revoke()
    assert store.get(base + "k") == Item(base + "k", b"2", revision - 1, revision, 0)


def test_keepalive_gives_the_time_to_live(store: Store) -> None:
    """keepalive() returns the seconds that are left."""
    lease = store.grant(10)
    assert lease.ttl == 10.0
    assert lease.keepalive() == 10.0
    lease.revoke()


def test_a_watcher_sees_a_lease_expire(store: Store, base: str) -> None:
    """Without any other call a watch gives Deleted soon after the time to live, not before."""
    lease = store.grant(1)
    revision = store.put(base + "k", b"", lease)
    start = time.monotonic()
    watch = store.watch(base, revision + 1)
    assert next(watch) == Deleted(base + "k", revision + 1)
    assert 0.9 <= time.monotonic() - start < lease.ttl + 2.5
    with pytest.raises(LeaseLost):
        lease.keepalive()


def test_a_lease_needs_a_time(store: Store) -> None:
    """A lease of no time is refused."""
    with pytest.raises(InputError, match=r"grant\.ttl_seconds: expected more than 0, got 0"):
        store.grant(0)


def test_list_then_watch_misses_nothing(store: Store, base: str) -> None:
    """A watch from the list's revision + 1 gives each later change once, in order, and only below its prefix."""
    store.put(base + "in/old", b"")
    _, revision = store.list(base + "in/")
    first = store.put(base + "in/a", b"1")
    store.put(base + "out", b"")
    second = store.put(base + "in/a", b"2")
    watch = store.watch(base + "in/", revision + 1)
    third = store.txn((), [DeleteOp(base + "in/a")]).revision
    assert list(islice(watch, 3)) == [
        Put(Item(base + "in/a", b"1", first, first, 0)),
        Put(Item(base + "in/a", b"2", first, second, 0)),
        Deleted(base + "in/a", third),
    ]


def test_a_watch_from_zero_starts_with_everything(store: Store, base: str) -> None:
    """Revision 0 gives a Resync with all items, then changes."""
    before = store.put(base + "k", b"1")
    watch = store.watch(base)
    assert next(watch) == Resync((Item(base + "k", b"1", before, before, 0),), before)
    after = store.put(base + "k", b"2")
    assert next(watch) == Put(Item(base + "k", b"2", before, after, 0))


def test_a_compacted_revision_gives_a_resync(store: Store, base: str) -> None:
    """A watch whose history is gone starts with the present items and goes on from there."""
    old = store.put(base + "k", b"1")
    new = store.put(base + "k", b"2")
    store.compact(new)  # type: ignore[attr-defined]
    watch = store.watch(base, old)
    assert next(watch) == Resync((Item(base + "k", b"2", old, new, 0),), new)
    last = store.put(base + "l", b"")
    assert next(watch) == Put(Item(base + "l", b"", last, last, 0))


def test_a_revision_from_the_future_gives_a_resync(store: Store, base: str) -> None:
    """A watch that asks beyond what the store knows was told by another store: it starts anew."""
    revision = store.put(base + "k", b"")
    watch = store.watch(base, revision + 1000)
    assert next(watch) == Resync((Item(base + "k", b"", revision, revision, 0),), revision)
    last = store.put(base + "l", b"")
    assert next(watch) == Put(Item(base + "l", b"", last, last, 0))


def test_close_ends_a_waiting_watch(store: Store, base: str) -> None:
    """close() from another thread ends the iterator; the store goes on."""
    watch = store.watch(base, 0)
    assert isinstance(next(watch), Resync)
    threading.Timer(0.1, watch.close).start()
    assert list(watch) == []
    assert list(watch) == []
    assert store.put(base + "k", b"") > 0


def test_closing_the_store_ends_its_watches(store: Store, base: str) -> None:
    """close() of the store ends iterators, and later calls raise StoreUnavailable at once."""
    watch = store.watch(base, 0)
    assert isinstance(next(watch), Resync)
    threading.Timer(0.1, store.close).start()
    assert list(watch) == []
    start = time.monotonic()
    for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.grant(1), lambda: store.watch("")):
        with pytest.raises(StoreUnavailable, match="the store was closed"):
            call()
    assert time.monotonic() - start < 2


def test_threads_count_together(store: Store, base: str) -> None:
    """Compare-and-set from several threads loses no update."""
    store.put(base + "n", b"0")

    def add() -> None:
        done = 0
        while done < 10:
            item = store.get(base + "n")
            assert item is not None
            value = str(int(item.value) + 1).encode()
            done += store.txn([ModRevision(item.key, item.mod_revision)], [PutOp(item.key, value)]).ok

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    item = store.get(base + "n")
    assert item is not None
    assert item.value == b"30"


def test_a_transaction_has_at_most_128_parts(store: Store, base: str) -> None:
    """What etcd refuses by default every store refuses, with the number; 128 go through."""
    gets = [GetOp(base + str(n)) for n in range(129)]
    compares = [CreateRevision(base + str(n), 0) for n in range(129)]
    assert store.txn(compares[:128], gets[:128], gets[:128]).items == (None,) * 128
    for name, parts in (("compares", (compares, [])), ("then", ([], gets)), ("otherwise", ([], [], gets))):
        with pytest.raises(InputError, match=rf"txn\.{name}: expected at most 128, got 129"):
            store.txn(*parts)


def test_a_large_list_and_a_large_catch_up_arrive(store: Store, base: str) -> None:
    """More than gRPC's own limit of 4 MiB comes in one list, and in the events of one watch."""
    value = bytes(1_000_000)
    revisions = [store.put(f"{base}{n}", value) for n in range(5)]
    items, revision = store.list(base)
    assert [(i.key, i.value) for i in items] == [(f"{base}{n}", value) for n in range(5)]
    assert revision == revisions[-1]
    events = list(islice(store.watch(base, revisions[0]), 5))
    assert events == [Put(Item(f"{base}{n}", value, r, r, 0)) for n, r in enumerate(revisions)]


def test_requests_are_counted_by_kind(store: Store, base: str) -> None:
    """Each request counts once under its name, so that tests can assert what a piece of work costs."""
    store.get(base + "k")
    before = store.counts.so_far()
    lease = store.grant(10)
    revision = store.put(base + "k", b"", lease)
    store.txn((), [GetOp(base + "k")])
    store.get(base + "k")
    store.list(base)
    lease.keepalive()
    lease.keepalive()
    assert isinstance(next(store.watch(base, revision)), Put)
    lease.revoke()
    asked = store.counts.so_far() - before
    one = dict.fromkeys(("grant", "put", "txn", "get", "list", "watch", "revoke"), 1)
    assert asked == {**one, "keepalive": 2}
    assert repr(store.counts).startswith("Counts({")
    before = store.counts.so_far()
    assert isinstance(next(store.watch(base)), Resync)
    assert store.counts.so_far()["list"] - before["list"] == 1


def test_a_watch_follows_several_spans_and_leaves_them(store: Store, base: str) -> None:
    """What is added is told from its revision on, what is dropped no more, what is neither never; one watch for all."""
    watch = store.watch(Span(base + "b", base + "d"), store.list(base)[1] + 1)
    store.put(base + "a", b"")
    b = store.put(base + "b", b"")
    assert next(watch) == Put(Item(base + "b", b"", b, b, 0))
    e = store.put(base + "e/1", b"")
    watch.add(base + "e/", e)
    assert next(watch) == Put(Item(base + "e/1", b"", e, e, 0))
    watch.drop(Span(base + "b", base + "d"))
    store.put(base + "c", b"")
    last = store.put(base + "e/2", b"")
    told = list(iter(lambda: next(watch), Put(Item(base + "e/2", b"", last, last, 0))))
    assert told in ([], [Put(Item(base + "c", b"", last - 1, last - 1, 0))])  # it may have been on its way
    watch.add(Span(base + "b", base + "d"), last - 1)
    assert next(watch) == Put(Item(base + "c", b"", last - 1, last - 1, 0))
    with pytest.raises(InputError, match=r"add\.from_revision"):
        watch.add(base, 0)
    watch.close()


def test_the_span_of_a_resync_is_said(store: Store, base: str) -> None:
    """Each span that has to begin anew begins with its own items."""
    revision = store.put(base + "a/k", b"")
    watch = store.watch(base + "a/", revision + 1)
    watch.add(base + "b/", revision + 1000)
    event = next(watch)
    assert isinstance(event, Resync)
    assert (event.items, event.span) == ((), below(base + "b/"))
    last = store.put(base + "a/l", b"")
    assert next(watch) == Put(Item(base + "a/l", b"", last, last, 0))
    watch.close()
