"""Which records a daemon follows: what all share, the acks of its lanes, everything where it leads."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from refitd.daemon.agree import Agreement
from refitd.daemon.following import MANY_LANES
from refitd.daemon.paths import Paths
from refitd.epoch.codec import encode
from refitd.epoch.records import Ack, Lane, Leader, Offers, Slot
from refitd.store import DeleteOp, MemoryStore, Put, Store

Body = Callable[[Agreement, Paths], Awaitable[None]]
LEADER = encode(Leader("a", "1"))


def run(store: Store, body: Body) -> None:
    job = uuid.uuid4().hex

    async def main() -> None:
        agreement = Agreement(store, job, 10.0, 3.0, isinstance(store, MemoryStore), lambda: None)
        await agreement.start()
        try:
            await body(agreement, Paths(job))
        finally:
            await agreement.close()

    asyncio.run(main())


async def until(probe: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


def ack(token: int = 1) -> bytes:
    return encode(Ack(token, "d", "built", 0, 0, {}, (0, 0)))


def lane(replica: str) -> bytes:
    return encode(Lane(replica, (Slot(f"engine/{replica}/0", "n", 1, "i", 1, "d"),), (), (), (), ""))


async def catch_up(store: Store, agreement: Agreement, paths: Paths) -> None:
    """Until the watch has told what all share up to now."""
    store.put(paths.path("leader"), LEADER)
    revision = store.put(paths.path("leader"), LEADER)
    await until(lambda: agreement.view.revision_of("leader") == revision)


@pytest.mark.parametrize(
    ("key", "path"),
    [("leader", "/refitd/j/leader"), ("acks/r0/n", "/refitd/j/_acks/r0/n"), ("offers/n", "/refitd/j/_offers/n")],
)
def test_paths_go_both_ways_and_acks_and_offers_lie_apart(key: str, path: str) -> None:
    """Each record is in one of the two spans that make up the job's part of the store."""
    paths = Paths("j")
    assert (paths.path(key), paths.key(path)) == (path, key)
    assert paths.everything.holds(path)
    assert (paths.shared.holds(path), paths.private.holds(path)) == (key == "leader", key != "leader")


def test_acks_are_told_lane_by_lane(store: Store) -> None:
    """Those of our lanes are, from what was there before on; those of others are not, and are forgotten on leaving."""

    async def body(agreement: Agreement, paths: Paths) -> None:
        store.put(paths.path("acks/r0/b"), ack())
        await agreement.following.follow({"r0"})
        assert (agreement.following.follows("r0"), agreement.following.follows("r1")) == (True, False)
        assert set(agreement.view.acks) == {"r0/b"}
        store.put(paths.path("acks/r1/b"), ack())
        store.put(paths.path("acks/r0/c"), ack())
        await until(lambda: "r0/c" in agreement.view.acks)
        await catch_up(store, agreement, paths)
        assert set(agreement.view.acks) == {"r0/b", "r0/c"}
        await agreement.following.follow({"r1"})
        assert set(agreement.view.acks) == {"r1/b"}
        store.put(paths.path("acks/r0/d"), ack())
        store.txn([], [DeleteOp(paths.path("acks/r1/b"))])
        await until(lambda: not agreement.view.acks)

    run(store, body)


def test_offers_are_told_to_their_node_and_to_the_leader(store: Store) -> None:
    """A node must hear that its own offers went with its lease."""

    async def body(agreement: Agreement, paths: Paths) -> None:
        for node in ("a", "ab", "b"):
            store.put(paths.path(f"offers/{node}"), encode(Offers(())))
        await agreement.following.follow((), "a")
        assert set(agreement.view.offers) == {"a"}
        store.txn([], [DeleteOp(paths.path("offers/a"))])
        await until(lambda: not agreement.view.offers)
        await agreement.following.follow_all(1)
        assert set(agreement.view.offers) == {"ab", "b"}

    run(store, body)


def test_a_leader_has_read_everything_as_late_as_it_was_made_leader(store: Store) -> None:
    """Once; then it is told. A daemon that leads no more forgets what does not concern it."""

    async def body(agreement: Agreement, paths: Paths) -> None:
        following = agreement.following
        await following.follow({"r0"})
        store.put(paths.path("acks/r1/b"), ack())
        since = store.put(paths.path("leader"), LEADER)
        lists = store.counts.so_far()["list"]
        await following.follow_all(since)
        await following.follow_all(since)
        assert store.counts.so_far()["list"] == lists + 1
        assert following.whole >= since
        assert (set(agreement.view.acks), agreement.view.revision_of("leader")) == ({"r1/b"}, since)
        store.put(paths.path("acks/r2/b"), ack())
        await until(lambda: "r2/b" in agreement.view.acks)
        await following.follow({"r0"})
        assert (following.whole, agreement.view.acks) == (0, {})
        assert set((await following.picture()).acks) == {"r1/b", "r2/b"}
        assert agreement.view.acks == {}

    run(store, body)


def test_a_node_of_most_lanes_follows_all_acks_by_one_span(store: Store) -> None:
    """As long as it is in any: what it hears for nothing is less than what it would read for each lane."""

    async def body(agreement: Agreement, paths: Paths) -> None:
        names = [f"r{i:02}" for i in range(MANY_LANES + 1)]
        for name in names:
            store.put(paths.path(f"lanes/{name}"), lane(name))
            store.put(paths.path(f"acks/{name}/b"), ack())
        await until(lambda: len(agreement.view.lanes) == len(names))
        before = store.counts.so_far()["list"]
        await agreement.following.follow(names)
        await agreement.following.follow(names[:1])
        assert store.counts.so_far()["list"] == before + 1
        assert len(agreement.view.acks) == len(names)
        await agreement.following.follow(())
        assert agreement.view.acks == {}
        await agreement.following.follow(names[:1])
        assert len(agreement.view.acks) == 1

    run(store, body)


def test_a_watch_that_fails_is_opened_again_with_all_its_parts() -> None:
    """What happened meanwhile is read; a leader counts as one that has not read everything until it has."""
    store = MemoryStore()

    async def body(agreement: Agreement, paths: Paths) -> None:
        following = agreement.following
        await following.follow_all(1)
        broken: Any = following._watch
        broken._fill = lambda: 1 / 0
        store.put(paths.path("acks/r0/b"), ack())
        await until(lambda: following._watch is not broken and not following.whole)
        assert agreement.view.acks == {}
        await following.follow_all(1)
        assert set(agreement.view.acks) == {"r0/b"}
        store.put(paths.path("acks/r0/c"), ack())
        store.put(paths.path("leader"), LEADER)
        await until(lambda: agreement.view.leader and len(agreement.view.acks) == 2)

    run(store, body)
    store.close()


def test_what_comes_late_from_a_part_that_was_left_is_not_taken() -> None:
    """Events that were on their way when a part was left, or read again, are older than the picture."""
    store = MemoryStore()

    async def body(agreement: Agreement, paths: Paths) -> None:
        path = paths.path("acks/r0/b")
        store.put(path, ack())
        item = store.get(path)
        assert item is not None
        await agreement.following.follow({"r0"})
        store.txn([], [DeleteOp(path)])
        await until(lambda: not agreement.view.acks)
        assert not agreement.following._apply(Put(item))
        await agreement.following.follow(())
        assert not agreement.following._apply(Put(item))
        assert agreement.view.acks == {}

    run(store, body)
    store.close()
