"""Real transfers under a bandwidth cap: as fast as it says, whole, and never taken for a dead peer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mover_rig import ENGINES, TRAINERS, column_cut

from refitd.mover.limit import BURST_NS, Limit

NBYTES = 2048 * 1536  # what the engine rank receives: half of the columns, two bytes an element
BURST = BURST_NS / 1e9


@pytest.fixture
def page() -> Iterator[Limit]:
    made = Limit.create()
    yield made
    made.close()


def built(rig: Any, page: Limit, pieces: int) -> Any:
    """Two trainers and an engine rank over loopback, whose lanes draw on one page."""
    cut = rig(column_cut(2048, 1536, pieces=pieces))
    cut.build()
    cut.built()
    for party in cut.parties.values():
        party.lane._board.limit = page
    return cut


def received(cut: Any, **options: Any) -> float:
    """Seconds until every byte is there, verified and right, and counted at the sockets."""
    began = time.monotonic()
    cut.run(**options)
    done = cut.parties[ENGINES[0]].wait_for("done", timeout=60.0)
    seconds = time.monotonic() - began
    assert done["rx"] == {"network": NBYTES}
    sent = [cut.parties[key].wait_for("done")["tx"]["network"] for key in TRAINERS]
    assert sum(sent) == NBYTES
    for name, array in cut.expected(ENGINES[0]).items():
        np.testing.assert_array_equal(cut.lent[ENGINES[0]].arrays[name], array)
    return seconds


def assert_rate(seconds: float, rate: int) -> None:
    """Never faster than the limit (and its burst) by more than 5 %; slower only as a busy machine makes it."""
    assert seconds >= (NBYTES / rate - BURST) * 0.95
    assert seconds <= NBYTES / rate * 1.5 + 10.0


@pytest.mark.parametrize("pieces", [1, 64], ids=["large buckets", "small buckets"])
def test_a_transfer_takes_as_long_as_the_limit_says(rig: Any, page: Limit, pieces: int) -> None:
    """Both trainers draw on one page, so together they send at the rate."""
    page.set(1_500_000)
    assert_rate(received(built(rig, page, pieces)), 1_500_000)


def test_a_slow_transfer_is_no_dead_peer(rig: Any, page: Limit) -> None:
    """Three seconds for one bucket each, with a progress deadline of half a second: bytes trickle, nobody is blamed."""
    page.set(1_000_000)
    assert_rate(received(built(rig, page, 1), progress_timeout=0.5), 1_000_000)


def test_memory_that_was_let_go_of_is_not_written_any_more(rig: Any, page: Limit) -> None:
    """A bucket is on its way straight into it. Its owner may load weights of its own there as soon as it is told."""
    page.set(1_000_000)
    cut = built(rig, page, 1)
    engine, arrays = cut.parties[ENGINES[0]], cut.lent[ENGINES[0]].arrays
    cut.run()
    deadline = time.monotonic() + 20.0
    while not any(array.any() for array in arrays.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    del engine.memories[ENGINES[0]]
    engine.lane.let_go()
    assert engine.wait_for_failure()["reason"] == f"memory of {ENGINES[0]} was let go of"
    for array in arrays.values():
        array[...] = 7
    page.set(None)
    time.sleep(1.0)
    assert all((array == 7).all() for array in arrays.values())


def test_letting_go_of_memory_that_nothing_is_written_to_ends_nothing(rig: Any, page: Limit) -> None:
    """Before the first round, and after one that is done."""
    cut = built(rig, page, 1)
    lanes = [party.lane for party in cut.parties.values()]
    for attempt in (1, 2):
        for lane in lanes:
            lane.let_go()
        cut.run(attempt)
        for party in cut.parties.values():
            party.wait_for("done", timeout=60.0)


def test_taking_the_limit_away_frees_a_transfer_at_once(rig: Any, page: Limit) -> None:
    """At 100 kB/s it would take half a minute, and it is free after half a second."""
    page.set(100_000)
    cut = built(rig, page, 1)
    cut.run()
    time.sleep(0.5)
    page.set(None)
    began = time.monotonic()
    done = cut.parties[ENGINES[0]].wait_for("done", timeout=60.0)
    assert done["rx"] == {"network": NBYTES}
    assert time.monotonic() - began < 10.0


def test_a_limit_that_comes_during_a_transfer_holds_for_the_rest(rig: Any, page: Limit) -> None:
    """Fast at first, then at 1 MB/s: the rest takes as long as it says."""
    page.set(4_000_000)
    cut = built(rig, page, 1)
    began = time.monotonic()
    cut.run()
    time.sleep(0.25)
    page.set(1_000_000)
    assert cut.parties[ENGINES[0]].wait_for("done", timeout=60.0)["rx"] == {"network": NBYTES}
    seconds = time.monotonic() - began
    assert seconds >= (0.25 + (NBYTES - 4_000_000 * (0.25 + 4 * BURST)) / 1_000_000) * 0.95


def test_a_throttled_lane_can_be_revoked(rig: Any, page: Limit) -> None:
    """Whoever waits for its turn at the page is woken; nothing is left running."""
    page.set(100_000)
    cut = built(rig, page, 1)
    cut.run()
    time.sleep(0.2)
    began = time.monotonic()
    for party in cut.parties.values():
        party.lane.revoke()
    assert time.monotonic() - began < 10.0
