"""Group M of the field cases: a lease whose owner is busy, and a store that takes a renewal and never answers."""

from __future__ import annotations

import threading
import time

from refitd.store import MemoryStore
from refitd.store.keeper import Hold, LeaseKeeper

TTL, EVERY = 2.0, 0.5


class Mute(MemoryStore):
    """A store that takes renewals and answers none while ``gate`` is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def _renew(self, lease_id: int, ttl: float) -> None:
        self.gate.wait()
        super()._renew(lease_id, ttl)


def test_m3_a_lease_outlives_a_main_thread_that_computes() -> None:
    """M3: three times its time to live of work that never waits: no doubt, the same lease."""
    store = MemoryStore()
    holds: list[Hold] = []
    keeper = LeaseKeeper(store, TTL, EVERY, lambda hold, _reason: holds.append(hold))
    store.put("leader", b"a", keeper.acquire())
    end, count = time.monotonic() + 3 * TTL, 0
    while time.monotonic() < end:
        count += 1
    assert count
    assert (holds, keeper.alive) == ([Hold.HELD], True)
    assert store.get("leader") is not None
    keeper.close()
    store.close()


def test_m3_an_unanswered_renewal_ends_the_claim_before_the_store_ends_the_lease() -> None:
    """M3: by its own clock, while the call still hangs; the record is still there when the owner stops claiming it."""
    store, doubt, there = Mute(), threading.Event(), []

    def told(hold: Hold, _reason: str) -> None:
        if hold is Hold.DOUBTFUL:
            there.append(time.monotonic() - asked <= 2 * TTL)
            doubt.set()

    keeper = LeaseKeeper(store, TTL, EVERY, told)
    keeper.acquire()
    asked = time.monotonic()
    store.gate.clear()
    assert keeper.alive
    deadline = keeper.deadline
    assert doubt.wait(10 * TTL)
    assert not keeper.alive
    assert deadline - asked <= TTL
    assert there
    store.gate.set()
    keeper.close()
    store.close()
