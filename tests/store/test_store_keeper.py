"""The lease keeper's own clock, and what it tells its owner."""

from __future__ import annotations

import threading
import time

import pytest
from watching import until

from refitd.errors import ConfigError, StoreUnavailable
from refitd.store import MemoryStore
from refitd.store.keeper import Hold, LeaseKeeper
from refitd.store.memory import MemoryLease


class Store(MemoryStore):
    """A store whose keepalives fail with ``fault``, or wait for ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def _renew(self, lease_id: int, ttl: float) -> None:
        self.gate.wait()
        if self.fault is not None:
            raise self.fault
        super()._renew(lease_id, ttl)


class Owner:
    """Remembers what it was told, and when."""

    def __init__(self, store: Store, ttl: float, every: float) -> None:
        self.holds: list[Hold] = []
        self.reasons: list[str] = []
        self.times: list[float] = []
        self.keeper = LeaseKeeper(store, ttl, every, self.told)

    def told(self, hold: Hold, reason: str) -> None:
        self.holds.append(hold)
        self.reasons.append(reason)
        self.times.append(time.monotonic())


def test_a_lease_is_renewed_and_given_up() -> None:
    """It outlives its time to live by renewals, tells nothing new meanwhile, and goes with close()."""
    store = Store()
    owner = Owner(store, 3, 0.2)
    assert (owner.keeper.lease, owner.keeper.alive) == (None, False)
    lease = owner.keeper.acquire()
    store.put("k", b"", lease)
    time.sleep(4)
    assert (owner.keeper.alive, owner.holds, store.get("k") is not None) == (True, [Hold.HELD], True)
    assert 0 < owner.keeper.deadline - time.monotonic() <= 3
    owner.keeper.close()
    assert (owner.keeper.lease, owner.keeper.alive, store.get("k")) == (None, False, None)
    store.close()


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), ConfigError("store.password_file", "a file", "none")])
def test_an_outage_within_the_time_to_live_is_not_even_told(fault: Exception) -> None:
    """Renewals that fail for a while cost nothing when the old lease is renewed in time."""
    store = Store()
    owner = Owner(store, 5, 0.05)
    owner.keeper.acquire()
    store.fault = fault
    time.sleep(0.5)
    store.fault = None
    renewed = owner.keeper.deadline
    assert until(lambda: owner.keeper.deadline > renewed)
    assert (owner.holds, owner.keeper.alive) == ([Hold.HELD], True)
    owner.keeper.close()
    store.close()


def test_doubt_comes_at_the_deadline_while_a_renewal_still_waits() -> None:
    """A call that hangs does not delay the news; the old lease is tried first, and the store says that it is lost."""
    store = Store()
    owner = Owner(store, 0.5, 0.1)
    lease = owner.keeper.acquire()
    store.gate.clear()
    assert until(lambda: len(owner.holds) == 2)
    assert owner.holds == [Hold.HELD, Hold.DOUBTFUL]
    assert 0 <= owner.times[1] - owner.keeper.deadline < 1
    assert (owner.keeper.lease, owner.keeper.alive) == (lease, False)
    store.gate.set()
    assert until(lambda: len(owner.holds) == 3)
    assert owner.holds[2] is Hold.LOST
    assert owner.reasons[2] == f"lease {lease.id} expired or was revoked"
    again = owner.keeper.acquire()
    assert (owner.holds[3], owner.keeper.alive, again.id != lease.id) == (Hold.HELD, True, True)
    owner.keeper.close()
    store.close()


def test_a_doubt_that_was_unfounded_is_taken_back() -> None:
    """When the store kept the lease longer than our clock could know, it goes on under it; the reason is told."""
    store = Store()
    owner = Owner(store, 0.5, 0.05)
    lease = owner.keeper.acquire()
    assert isinstance(lease, MemoryLease)
    store.put("k", b"", lease)
    store.fault = StoreUnavailable("away")
    store._deadlines[lease.id] += 60  # a store that restarted its clocks, as etcd does with each new leader
    assert until(lambda: len(owner.holds) == 2)
    assert owner.reasons[1] == "not renewed for its time to live: away"
    store.fault = None
    assert until(lambda: len(owner.holds) == 3)
    assert (owner.holds[2], owner.keeper.lease, owner.keeper.alive) == (Hold.HELD, lease, True)
    assert store.get("k") is not None
    owner.keeper.close()
    store.close()


def test_nothing_is_left_after_close() -> None:
    """Two threads for each keeper, none afterwards."""
    store, others = Store(), set(threading.enumerate())
    keepers = [LeaseKeeper(store, 10, 3) for _ in range(5)]
    for keeper in keepers:
        keeper.acquire()
    assert len(set(threading.enumerate()) - others) == 10
    for keeper in keepers:
        keeper.close()
    assert set(threading.enumerate()) <= others
    assert store.counts.so_far() == {"grant": 5, "revoke": 5}
    store.close()
