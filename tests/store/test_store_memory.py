"""What only the memory store has: its clock and the length of its history."""

from __future__ import annotations

import threading

import pytest

from refitd.errors import LeaseLost
from refitd.store import Deleted, Item, MemoryStore, Put, Resync, open_store


class Clock:
    """Seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_leases_follow_the_clock() -> None:
    """A lease lives exactly its time after the last keepalive, by the injected clock."""
    clock = Clock()
    store = MemoryStore(clock)
    lease = store.grant(10)
    store.put("k", b"", lease)
    clock.now = 9.9
    assert lease.keepalive() == 10.0
    clock.now = 19.8
    assert store.get("k") is not None
    clock.now = 19.9
    assert store.get("k") is None
    with pytest.raises(LeaseLost):
        lease.keepalive()
    store.close()


def test_a_waiting_watch_notices_that_the_clock_moved() -> None:
    """A reader that waits sees the expiry although nobody calls the store."""
    clock = Clock()
    store = MemoryStore(clock)
    revision = store.put("k", b"", store.grant(3600))
    watch = store.watch("", revision + 1)
    threading.Timer(0.05, lambda: setattr(clock, "now", 3600.0)).start()
    assert next(watch) == Deleted("k", revision + 1)
    store.close()


def test_a_lease_takes_its_keys_in_one_revision() -> None:
    """All keys of a lease go at the same revision."""
    store = MemoryStore()
    lease = store.grant(10)
    store.put("a", b"", lease)
    store.put("b", b"", lease)
    lease.revoke()
    watch = store.watch("", 4)
    assert [next(watch), next(watch)] == [Deleted("a", 4), Deleted("b", 4)]
    store.close()


def test_history_is_bounded() -> None:
    """A watch from before the history's limit gets a Resync, one from after it the changes."""
    store = MemoryStore(history=3)
    for n in range(5):
        store.put("k", str(n).encode())
    assert next(store.watch("", 3)) == Resync((Item("k", b"4", 2, 6, 0),), 6)
    assert next(store.watch("", 4)) == Put(Item("k", b"2", 2, 4, 0))
    store.close()


def test_each_memory_url_is_a_store_of_its_own() -> None:
    """Two stores of memory:// share nothing."""
    one, two = open_store("memory://"), open_store("memory://")
    one.put("k", b"")
    assert two.get("k") is None
    one.close()
    two.close()


def test_a_reader_is_woken_once_for_a_burst_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of all of them, in order, when the writer has had its time."""
    store, over, rests = MemoryStore(), threading.Event(), []

    def rest(_seconds: float) -> None:
        rests.append(_seconds)
        assert over.wait(10)

    monkeypatch.setattr("refitd.store.memory.time.sleep", rest)
    watch, heard = store.watch("", 2), []
    reader = threading.Thread(target=lambda: heard.extend(next(watch) for _ in range(20)))
    reader.start()
    while not rests:
        store.put("first", b"")
    revisions = [store.put(f"k{n}", b"") for n in range(19)]
    over.set()
    reader.join(10)
    store.close()
    assert len(heard) == 20
    assert len(rests) == 1
    assert [event.item.mod_revision for event in heard] == list(range(2, 22))
    assert revisions[0] >= 3
