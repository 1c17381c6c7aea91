"""Jobs that everybody has left: what the sweeper removes, and what it must leave alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence

import pytest

from refitd.daemon.sweep import CHUNK, Sweeper
from refitd.store import Compare, DeleteOp, MemoryStore, Op, TxnResult

BLINK = 1e-6  # seconds: over at the second look


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    opened = MemoryStore()
    yield opened
    opened.close()


def fill(store: MemoryStore, job: str, member: bool = False, records: int = 3) -> None:
    for i in range(records):
        store.put(f"/refitd/{job}/lanes/r{i}", b"{}")
    if member:
        store.put(f"/refitd/{job}/members/n0", b"{}")


def jobs(store: MemoryStore) -> list[str]:
    return sorted({item.key.split("/")[2] for item in store.list("/refitd/")[0]})


def sweeper(store: MemoryStore, ttl: float, ours: Collection[str] = ()) -> Sweeper:
    return Sweeper(store, ttl, lambda: ours)


def test_a_job_that_stays_as_it_is_without_a_member_is_removed(store: MemoryStore) -> None:
    """Seen once, and again after the time to live; with more records than one transaction takes."""
    fill(store, "left", records=2 * CHUNK + 1)
    fill(store, "lively", member=True)
    fill(store, "mine")
    sweep = sweeper(store, BLINK, ["mine"])
    assert asyncio.run(sweep.look()) == []
    assert asyncio.run(sweep.look()) == ["left"]
    assert jobs(store) == ["lively", "mine"]
    assert asyncio.run(sweep.look()) == []


def test_nothing_is_removed_before_its_time(store: MemoryStore) -> None:
    """The time begins when this daemon first sees the job so."""
    fill(store, "left")
    sweep = sweeper(store, 3600.0)
    assert [asyncio.run(sweep.look()) for _time in range(3)] == [[], [], []]
    assert jobs(store) == ["left"]


def test_a_job_that_changes_or_comes_back_starts_its_time_anew(store: MemoryStore) -> None:
    """A new record, then a member that comes and goes."""
    fill(store, "left")
    sweep = sweeper(store, BLINK)
    assert asyncio.run(sweep.look()) == []
    store.put("/refitd/left/control", b"{}")
    assert asyncio.run(sweep.look()) == []
    store.put("/refitd/left/members/n0", b"{}")
    assert asyncio.run(sweep.look()) == []
    store.txn([], [DeleteOp("/refitd/left/members/n0")])
    assert asyncio.run(sweep.look()) == []
    assert asyncio.run(sweep.look()) == ["left"]
    assert jobs(store) == []


class Racing(MemoryStore):
    """Somebody writes to the job just before it is removed."""

    raced = False

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        if not self.raced:
            self.raced = True
            self.put("/refitd/left/lanes/r1", b"new")
        return super().txn(compares, then, otherwise)


def test_a_job_that_somebody_begins_again_meanwhile_stays() -> None:
    """The removal is guarded by every revision that was seen: nothing of the job is touched."""
    store = Racing()
    fill(store, "left")
    sweep = sweeper(store, BLINK)
    assert [asyncio.run(sweep.look()) for _time in range(2)] == [[], []]
    assert [item.key.split("/")[-1] for item in store.list("/refitd/left/")[0]] == ["r0", "r1", "r2"]
    store.close()
