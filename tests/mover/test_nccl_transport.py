"""The nccl transport over a fake library: what counts, what does not, and who is blamed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mover_rig import ENGINES, TRAINERS, Sketch, column_cut
from nccl_rig import NcclRig

from refitd.errors import TransportError
from refitd.mover.limit import Limit
from refitd.plan.program import NETWORK

Make = Callable[..., NcclRig]


@pytest.fixture
def rig() -> Iterator[Make]:
    made: list[NcclRig] = []

    def make(sketch: Sketch | None = None, **options: bool) -> NcclRig:
        made.append(NcclRig(sketch or column_cut(32, 16), **options))
        made[-1].fill()
        return made[-1]

    yield make
    for one in made:
        one.close()


def two_by_two(pieces: int = 3, dtype: str = "bfloat16") -> Sketch:
    """Two trainers hold rows, two engines take columns: every trainer sends to every engine."""
    rows, cols = 2 * pieces * 4, 16
    half, width, step = rows // 2, cols // 2, rows // 2 // pieces
    storages = [(key, "w", "float32", half * cols) for key in TRAINERS]
    sketch = Sketch(storages + [(key, "w", dtype, rows * width) for key in ENGINES])
    for t, src in enumerate(TRAINERS):
        for e, dst in enumerate(ENGINES):
            for piece in range(pieces):
                row = piece * step
                there = ("w", (t * half + row) * width, width, 1)
                sketch.add(src, dst, NETWORK, [("w", row * cols + e * width, cols, 1, *there, step, width)])
    return sketch


def arrived(one: NcclRig, key: str) -> bool:
    want, got = one.expected(key)["w"], one.lent[key].arrays["w"]
    return bool(np.array_equal(want.view(np.uint8), got.view(np.uint8)))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bucket is a step of its own, on every edge."""
    from refitd.mover.nccl import driver

    monkeypatch.setattr(driver, "room", lambda _spare, _edges: 1)


@pytest.mark.parametrize("verify", ["trailer", "reread"])
def test_buckets_of_two_senders_arrive_and_are_counted(rig: Make, verify: str) -> None:
    """Bit for bit, again and again on the same communicator; traffic is what the plan says."""
    one = rig()
    one.build()
    one.built()
    for attempt in (1, 2, 3):
        one.fill(attempt)
        one.run(attempt, verify=verify)
        done = one.parties[ENGINES[0]].wait_for("done")
        assert done["verified"] == list(range(8))
        assert done["rx"] == {NETWORK: 32 * 8 * 2 * attempt // attempt}
        sent = [one.parties[key].wait_for("done")["tx"][NETWORK] for key in TRAINERS]
        assert sent == [256, 256]
        assert arrived(one, ENGINES[0])


def test_every_edge_of_two_by_two_is_served_and_casts_are_the_plans(rig: Make) -> None:
    """fp32 is sent as bf16; the result is torch's."""
    import torch

    one = rig(two_by_two())
    rng = np.random.default_rng(3)
    for key in TRAINERS:
        one.lent[key].arrays["w"][:] = rng.standard_normal(one.lent[key].arrays["w"].size, np.float32)
    one.build()
    one.built()
    one.run()
    for e, key in enumerate(ENGINES):
        assert one.parties[key].wait_for("done")["verified"] == [b.id for b in one.sketch.program(key).receives()]
        whole = np.concatenate([one.lent[src].arrays["w"].reshape(-1, 16) for src in TRAINERS])
        want = torch.from_numpy(np.ascontiguousarray(whole[:, e * 8 : e * 8 + 8])).to(torch.bfloat16)
        got = torch.from_numpy(one.lent[key].arrays["w"].view(np.int16).copy()).view(torch.bfloat16)
        assert torch.equal(want.flatten(), got)


@pytest.mark.parametrize("verify", ["trailer", "reread"])
@pytest.mark.parametrize("dense", [True, False])
def test_between_devices_kernels_pack_and_what_is_dense_lands_in_place(
    rig: Make, monkeypatch: pytest.MonkeyPatch, dense: bool, verify: str
) -> None:
    """Where the destination is as dense as the payload, NCCL writes into it; it is summed there, and counts then."""
    from refitd.mover.nccl.staging import Staging

    stride = 16 if dense else 20
    sketch = Sketch([(TRAINERS[0], "w", "bfloat16", 512), (ENGINES[0], "w", "bfloat16", 32 * stride)])
    for row in range(0, 32, 8):
        sketch.add(TRAINERS[0], ENGINES[0], NETWORK, [("w", row * 16, 16, 1, "w", row * stride, stride, 1, 8, 16)])
    placed: list[int] = []
    place = Staging.place
    monkeypatch.setattr(Staging, "place", lambda *a: placed.append(place(*a)) or placed[-1])
    one = rig(sketch)
    one.to_devices()
    one.build()
    one.built()
    start = one.lent[ENGINES[0]].arrays["w"].ctypes.data
    for attempt in (1, 2):
        one.fill(attempt)
        one.run(attempt, verify=verify)
        assert len(one.parties[ENGINES[0]].wait_for("done")["verified"]) == len(sketch.buckets)
        assert arrived(one, ENGINES[0])
        one.parties[TRAINERS[0]].wait_for("done")
    in_place = [start + 256 * i for i in range(4)] * 2
    assert placed == (in_place if dense and verify == "trailer" else [0] * len(placed))


def test_a_loan_that_ends_voids_the_bucket_and_both_ends_say_why(rig: Make) -> None:
    """Nothing is begun for it; the other sender's buckets count."""
    one = rig()
    one.build()
    one.built()
    old = one.lent[TRAINERS[0]].page.loan_word
    one.lent[TRAINERS[0]].page.bump_loan()
    one.run(words={TRAINERS[0]: old})
    for rank in (TRAINERS[0], ENGINES[0]):
        failed = one.parties[rank].wait_for_failure()
        assert (failed["edge"], failed["reason"]) == ([TRAINERS[0], ENGINES[0]], "loan withdrawn")
    board = one.parties[ENGINES[0]].lane._board  # type: ignore[union-attr]
    until(lambda: board.round.verified == {4, 5, 6, 7})


def test_a_word_that_changes_while_a_bucket_is_packed_makes_it_void(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word is read again after the last byte was, and before its trailer is said; 4 was not trailed before 5."""
    from refitd.mover.nccl.staging import Staging

    one = rig()
    one.build()
    one.built()
    one_each(monkeypatch)
    page, pack = one.lent[TRAINERS[1]].page, Staging.pack

    def slow(self, round_, batch, memory, places):  # type: ignore[no-untyped-def]
        found = pack(self, round_, batch, memory, places)
        if batch.ids == [5]:
            page.bump_loan()
        return found

    monkeypatch.setattr(Staging, "pack", slow)
    one.run()
    failed = one.parties[ENGINES[0]].wait_for_failure()
    assert (failed["edge"], failed["reason"]) == ([TRAINERS[1], ENGINES[0]], "loan withdrawn")
    board = one.parties[ENGINES[0]].lane._board  # type: ignore[union-attr]
    until(lambda: board.round.verified == {0, 1, 2, 3})


def test_bytes_that_change_on_the_wire_do_not_count(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of what came is not the trailer's: the bucket does not exist."""
    from refitd.mover.nccl.staging import Staging, Sums

    one = rig()
    one.build()
    one.built()
    pack = Staging.pack

    def wrong(*args: Any) -> Sums:
        return Sums({id_: sum_ ^ (id_ == 2) for id_, sum_ in pack(*args).values().items()})

    monkeypatch.setattr(Staging, "pack", wrong)
    one.run()
    failed = one.parties[ENGINES[0]].wait_for_failure()
    assert failed["reason"].startswith("checksum of bucket 2: expected ")
    board = one.parties[ENGINES[0]].lane._board  # type: ignore[union-attr]
    assert 2 not in board.round.verified


def test_a_cap_on_bandwidth_holds_senders_back(rig: Make) -> None:
    """A third of a second for two senders' 512 bytes at 1,024 bytes a second each... by one shared page."""
    one = rig()
    limit = Limit.create()
    try:
        one.build()
        one.built()
        for key in TRAINERS:
            one.parties[key].lane._board.limit = limit  # type: ignore[union-attr]
        taken = []
        take = limit.take
        limit.take = lambda nbytes, tick: taken.append(nbytes) or take(nbytes, tick)  # type: ignore[method-assign]
        one.run()
        one.parties[ENGINES[0]].wait_for("done")
        assert sum(taken) == 512
    finally:
        limit.close()


def test_a_call_that_hangs_in_the_middle_of_a_round_is_aborted(rig: Make) -> None:
    """The driver's thread is inside the library, with something packed, and nobody else can let go of that."""
    one = rig()
    one.build()
    one.built()
    party, comm = one.parties[TRAINERS[0]], one.driver(TRAINERS[0])._comm
    inside, aborted, abort = threading.Event(), threading.Event(), comm.abort

    def hangs(*_arguments: Any) -> Any:
        inside.set()
        aborted.wait(20.0)
        raise TransportError((TRAINERS[0], ENGINES[0]), "aborted")

    def ends() -> None:
        aborted.set()
        abort()

    comm.exchange, comm.abort = hangs, ends
    one.run()
    assert inside.wait(30.0)
    began = time.monotonic()
    party.lane.revoke()  # type: ignore[union-attr]
    assert time.monotonic() - began < 10.0
    assert aborted.is_set()


def test_a_sender_that_waits_for_its_share_of_the_bandwidth_keeps_nothing_waiting(rig: Make) -> None:
    """At 20 bytes a second it would for half a minute. What is packed keeps its round and memory until it is sent."""
    one = rig()
    limit = Limit.create()
    try:
        limit.set(20)
        one.build()
        one.built()
        for key in TRAINERS:
            one.parties[key].lane._board.limit = limit  # type: ignore[union-attr]
        asked = threading.Event()
        take = limit.take
        limit.take = lambda nbytes, tick: asked.set() or take(nbytes, tick)  # type: ignore[method-assign]
        one.run(1)
        assert asked.wait(30.0)
        began = time.monotonic()
        one.run(2)
        assert time.monotonic() - began < 10.0
        limit.set(None)
        assert one.parties[ENGINES[0]].wait_for("done")["attempt"] == 2
        assert arrived(one, ENGINES[0])
    finally:
        limit.close()


def test_a_new_round_begins_while_the_old_one_waits_for_a_rank(rig: Make) -> None:
    """A sender that was never told of attempt 1 joins at attempt 2: nothing of the first is in its way."""
    one = rig()
    one.build()
    one.built()
    one.run(1, only=(TRAINERS[0], ENGINES[0]))
    until(lambda: one.parties[TRAINERS[0]].lane._board.round is not None)  # type: ignore[union-attr]
    one.run(2)
    assert one.parties[ENGINES[0]].wait_for("done")["attempt"] == 2
    assert arrived(one, ENGINES[0])


def test_revoke_stops_everything_and_the_lane_is_built_anew(rig: Make) -> None:
    """In the middle of a transfer that hangs; afterwards a fresh communicator works."""
    one = rig()
    one.build()
    one.built()
    for faults in one.faults.values():
        faults.hang.add("exchange")
    one.run()
    until(lambda: one.driver(ENGINES[0])._held != [])
    began = threading.active_count()
    one.revoke_all()
    assert threading.active_count() < began
    for rank, faults in one.faults.items():
        faults.hang.clear()
        one.parties[rank].messages.queue.clear()  # a peer that was revoked first may have been missed
    one.build(token=2)
    one.built()
    one.run()
    one.parties[ENGINES[0]].wait_for("done")
    assert arrived(one, ENGINES[0])


def test_small_buckets_share_a_step_and_several_steps_are_under_way(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four buckets in one group where they fit; one by one, at most as many are on the wire as there are buffers."""
    from refitd.bench.fake_nccl import FakeComm
    from refitd.mover.nccl.batches import SLOTS

    groups: list[int] = []
    exchange = FakeComm.exchange

    def counted(self: FakeComm, sends: Any, receives: Any, after: Any = ()) -> Any:
        groups.append(len(sends))
        return exchange(self, sends, receives, after)

    one = rig(two_by_two(8, "float32"))
    one.build()
    one.built()
    monkeypatch.setattr(FakeComm, "exchange", counted)
    one.run(1)
    for key in ENGINES:
        one.parties[key].wait_for("done")
    assert sorted(groups) == [0, 0, 2, 2]  # a part for each of two engines, whatever it consists of
    one_each(monkeypatch)
    for faults in one.faults.values():
        faults.hang.add("exchange")
    one.run(2)
    flights = [one.driver(key)._flights for key in (*TRAINERS, *ENGINES)]
    until(lambda: [len(found) for found in flights] == [SLOTS] * 4)
    for faults in one.faults.values():
        faults.hang.clear()
    for key in ENGINES:
        done = one.parties[key].wait_for("done")
        assert done["verified"] == [b.id for b in one.sketch.program(key).receives()]
        assert arrived(one, key)


def test_payloads_that_lie_apart_are_received_one_by_one() -> None:
    """What lies between two destinations is not ours to write; between two places of a buffer nothing lies."""
    from contextlib import ExitStack

    from refitd.mover.nccl.batches import Batch
    from refitd.mover.nccl.steps import Incoming
    from refitd.plan.program import Bucket

    edge = TRAINERS[0], ENGINES[0]
    batch = Batch(tuple(Bucket(i, *edge, NETWORK, 0, 100, i, i + 1) for i in range(2)))
    assert (batch.payload, batch.extent, batch.places(1600)) == (200, 212, {0: 1600, 1: 1712})
    assert Incoming(edge, batch, batch.places(1600), None).parts(3) == [(3, 1600, 212)]
    assert Incoming(edge, batch, batch.places(1600), ExitStack()).parts(3) == [(3, 1600, 100), (3, 1712, 100)]


def test_steps_of_an_edge_shrink_where_they_are_slow_and_grow_again() -> None:
    from refitd.mover.nccl.batches import LEAST_BYTES, MOST_BYTES, next_size, room

    assert next_size(64 << 20, MOST_BYTES, 0.5) == 32 << 20
    assert next_size(LEAST_BYTES, MOST_BYTES, 9.0) == LEAST_BYTES
    assert next_size(64 << 20, MOST_BYTES, 0.2) == 64 << 20
    assert next_size(200 << 20, MOST_BYTES, 0.01) == MOST_BYTES
    assert [room(1 << 30, edges) for edges in (0, 1, 2, 8)] == [256 << 20, 256 << 20, 128 << 20, 32 << 20]
