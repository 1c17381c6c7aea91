"""Group K of the cases from the field, on the fake NCCL: communicators whose ranks die, hang, differ or refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mover_rig import Sketch
from nccl_rig import NcclRig

from refitd.plan.program import NETWORK

SOURCE = "trainer/run/0"
OTHERS = ("engine/r0/0", "engine/r0/1", "engine/r0/2")
VICTIM = OTHERS[1]


def broadcast(others: tuple[str, ...] = OTHERS, buckets: int = 4) -> Sketch:
    """The source sends the same 64 rows to each of the others, so many at a time."""
    rows, cols = 64, 16
    sketch = Sketch([(key, "w", "bfloat16", rows * cols) for key in (SOURCE, *others)])
    step = rows // buckets
    for dst in others:
        for first in range(0, rows, step):
            at = first * cols, cols, 1
            sketch.add(SOURCE, dst, NETWORK, [("w", *at, "w", *at, step, cols)])
    return sketch


@pytest.fixture(autouse=True)
def one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bucket is a step of its own: several are under way when a rank dies."""
    from refitd.mover.nccl import driver

    monkeypatch.setattr(driver, "room", lambda _spare, _edges: 1)


@pytest.fixture
def rig() -> Iterator[Callable[..., NcclRig]]:
    made: list[NcclRig] = []

    def make(sketch: Sketch, network: bool = True) -> NcclRig:
        made.append(NcclRig(sketch, network))
        array = made[-1].lent[SOURCE].arrays["w"].view(np.uint8)
        array[:] = np.random.default_rng(1).integers(0, 256, array.nbytes, np.uint8)
        return made[-1]

    yield make
    for one in made:
        one.close()


def kill(one: NcclRig, rank: str) -> None:
    """All that a process held is closed at once."""
    links = one.parties[rank].lane._net._links  # type: ignore[union-attr]
    one.driver(rank)._comm.abort()
    links.interrupt()


def stop(one: NcclRig, rank: str) -> None:
    """Nothing of a process runs any more, and its sockets stay open."""
    lane = one.parties[rank].lane
    lane._net._links._hear = lambda *_word: None  # type: ignore[union-attr]
    one.faults[rank].hang.add("exchange")


def begin(one: NcclRig, progress_timeout: float) -> None:
    one.build()
    one.built()
    for faults in one.faults.values():
        faults.hang.add("exchange")  # the first step stays on the wire until the victim is hit
    one.run(progress_timeout=progress_timeout)
    deadline = time.monotonic() + 10
    while not one.driver(VICTIM)._held:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("network", [True, False], ids=["other-host", "same-host"])
@pytest.mark.parametrize("hit", [kill, stop])
def test_k1_a_dead_or_stopped_peer_is_named_within_the_limit_and_the_rest_go_on(
    rig: Callable[..., NcclRig], hit: Callable[[NcclRig, str], None], network: bool
) -> None:
    """Each survivor that waits for rank 2 says so; the old communicator is freed, and three ranks make a new one."""
    one = rig(broadcast(), network)
    begin(one, 5.0 if hit is kill else 2.0)
    hit(one, VICTIM)
    for rank in (SOURCE, *OTHERS):
        if rank != VICTIM:
            one.faults[rank].hang.clear()
    failed = one.parties[SOURCE].wait_for_failure()
    assert failed["edge"] == [SOURCE, VICTIM], failed
    old = {rank: one.driver(rank)._comm for rank in (SOURCE, *OTHERS)}
    one.faults[VICTIM].hang.clear()
    one.revoke_all()
    assert {comm.state() for comm in old.values()} == {"aborted"}
    rest = rig(broadcast((OTHERS[0], OTHERS[2])), network)
    rest.build()
    rest.built()
    rest.run()
    for rank in (OTHERS[0], OTHERS[2]):
        assert rest.parties[rank].wait_for("done")["verified"] == [b.id for b in rest.sketch.program(rank).receives()]


def test_k1_a_death_with_several_steps_under_way_leaves_only_what_had_come(
    rig: Callable[..., NcclRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps have been counted and more are on the wire when the source dies: they never count; all is let go of."""
    one = rig(broadcast(OTHERS[:1], 8))
    one.build()
    one.built()
    driver, begun = one.driver(OTHERS[0]), list[int]()
    exchange = driver._comm.exchange

    def third_hangs(sends: Any, receives: Any, after: Any = ()) -> Any:
        begun.append(len(receives))
        if len(begun) == 3:
            while len(driver._round.verified) < 2:
                driver._progress()
            one.faults[OTHERS[0]].hang.add("exchange")
        return exchange(sends, receives, after)

    monkeypatch.setattr(driver._comm, "exchange", third_hangs)
    one.run(progress_timeout=5.0)
    deadline = time.monotonic() + 10
    while len(driver._flights) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    kill(one, SOURCE)
    failed = one.parties[OTHERS[0]].wait_for_failure()
    assert (failed["edge"], failed["verified"]) == ([SOURCE, OTHERS[0]], [0, 1])
    one.revoke_all()
    assert (driver._held, driver._lent, driver._round.verified) == ([], [], {0, 1})
    assert driver._comm.state() == "aborted"


def test_k1_an_abort_that_never_returns_does_not_let_go_of_memory(rig: Callable[..., NcclRig]) -> None:
    """So that the daemon, which waits for the revoke's answer, replaces the process instead of waiting."""
    one = rig(broadcast())
    begin(one, 5.0)
    one.faults[VICTIM].hang.add("abort")
    lane = one.parties[VICTIM].lane
    revoking = threading.Thread(target=lane.revoke, daemon=True)  # type: ignore[union-attr]
    revoking.start()
    revoking.join(2.5)
    assert revoking.is_alive()
    one.faults[VICTIM].hang.clear()
    revoking.join(10)
    assert not revoking.is_alive()
    one.parties[VICTIM].lane = None


def test_k3_two_groups_that_ranks_enter_in_opposite_order_are_both_built(rig: Callable[..., NcclRig]) -> None:
    """Requests come in another order, half a second apart: every communicator has a thread of its own."""
    lanes = [rig(broadcast(OTHERS[:2])) for _ in range(2)]
    order = {OTHERS[0]: lanes, OTHERS[1]: lanes[::-1]}

    def build(rank: str) -> None:
        for lane in order[rank]:
            lane.build(only=[rank])
            time.sleep(0.5)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in order]
    for lane in lanes:
        lane.build(only=[SOURCE])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in lanes:
        lane.built()


def test_k3_ranks_that_mean_another_bucket_say_so_at_once(rig: Callable[..., NcclRig]) -> None:
    """Two plans of one digest, in another order: the edge's sequence is compared before anything is begun."""
    one = rig(broadcast(OTHERS[:1]))
    one.build()
    one.built()
    program = one.sketch.program(OTHERS[0])
    object.__setattr__(program, "buckets", program.buckets[::-1])
    began = time.monotonic()
    one.run(only=[SOURCE])
    words = {key: lent.page.loan_word for key, lent in one.lent.items()}
    from refitd.mover.round import RunOptions

    one.parties[OTHERS[0]].lane.run(RunOptions(1, (1, 1), words), program)  # type: ignore[union-attr]
    for rank in (SOURCE, OTHERS[0]):
        assert one.parties[rank].wait_for_failure()["reason"] == "bucket of bucket 3: expected 3, got 0"
    assert time.monotonic() - began < 30


def test_k6_a_receiver_that_cannot_take_it_releases_the_sender_with_its_reason(rig: Callable[..., NcclRig]) -> None:
    """Its memory has another shape; the other engine has everything, and the refuser was not written to."""
    one = rig(broadcast(OTHERS[:2]))
    one.build()
    one.built()
    party, wrong = one.parties[OTHERS[1]], one.lent[OTHERS[1]]
    party.memories.pop(OTHERS[1])
    one.run()
    failed = one.parties[SOURCE].wait_for_failure()
    assert (failed["edge"], failed["reason"]) == ([SOURCE, OTHERS[1]], f"memory of {OTHERS[1]} is not mounted")
    assert one.parties[OTHERS[0]].wait_for("done")["verified"] == [0, 1, 2, 3]
    assert not wrong.arrays["w"].view(np.uint8).any()
