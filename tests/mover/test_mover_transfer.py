"""Whole rounds over loopback and shared memory in one process."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch  # noqa: F401  casts import it; here, so that its seconds are not a silent peer's
from mover_rig import ENGINES, TRAINERS, Sketch, column_cut

from refitd.mover.round import RunOptions

ENGINE = ENGINES[0]


def _same(rig_, key):
    for name, array in rig_.expected(key).items():
        np.testing.assert_array_equal(rig_.lent[key].arrays[name], array)


@pytest.mark.parametrize("verify", ["trailer", "reread"])
@pytest.mark.parametrize("links", ["network", "peer"])
def test_a_round_delivers_every_byte_and_counts_payload(rig, links, verify):
    """A round ends with done; the destination is bit-exact, and traffic counts payload only."""
    cut = rig(column_cut(64, 32, links=links))
    cut.build()
    cut.built()
    cut.run(verify=verify)
    engine = cut.parties[ENGINE]
    done = engine.wait_for("done")
    assert done["attempt"] == 1
    assert done["verified"] == list(range(8))
    assert done["rx"] == {links: 64 * 16 * 2}
    sent = [cut.parties[key].wait_for("done")["tx"] for key in TRAINERS]
    assert sent == ([{"network": 32 * 16 * 2}] * 2 if links == "network" else [{}, {}])
    _same(cut, ENGINE)


def test_fp32_masters_arrive_rounded_to_bfloat16(rig):
    """A cast happens before the wire: payload is in the destination's dtype and rounds to nearest even."""
    sketch = Sketch([(TRAINERS[0], "w", "float32", 4), (ENGINE, "w", "bfloat16", 4)])
    sketch.add(TRAINERS[0], ENGINE, "network", [("w", 0, 4, 1, "w", 0, 4, 1, 1, 4)])
    cast = rig(sketch)
    cast.lent[TRAINERS[0]].arrays["w"][:] = [1.0, 1.00390625, 1.01171875, -2.0]
    cast.build()
    cast.built()
    cast.run()
    assert cast.parties[ENGINE].wait_for("done")["rx"] == {"network": 8}
    assert cast.lent[ENGINE].arrays["w"].tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC000]


def test_rounds_follow_each_other_on_the_same_edges(rig):
    """A later attempt reuses the connections and delivers the newer bytes."""
    cut = rig(column_cut(16, 8))
    cut.build()
    cut.built()
    for attempt in (1, 2, 3):
        cut.fill(attempt)
        cut.run(attempt)
        assert cut.parties[ENGINE].wait_for("done")["attempt"] == attempt
        _same(cut, ENGINE)


def test_a_round_may_bring_its_own_program(rig):
    """A remainder moves only what its own program names, under the same lane token."""
    cut = rig(column_cut(16, 8))
    cut.build()
    cut.built()
    rest = column_cut(16, 8, digest="e" * 32)
    del rest.buckets[:6]
    words = {key: lent.page.loan_word for key, lent in cut.lent.items()}
    for key, party in cut.parties.items():
        party.lane.run(RunOptions(1, (1, 1), words), rest.program(key))
    done = cut.parties[ENGINE].wait_for("done")
    assert done["verified"] == [6, 7]
    assert done["rx"] == {"network": 2 * 2 * 4 * 2}


def test_stage_1_waits_for_ready_and_reads_the_neighbour(rig):
    """Buckets of stage 1 start when their source is ready, under the loan word that ready carries."""
    sketch = Sketch([(TRAINERS[0], "w", "int32", 8)] + [(key, "w", "int32", 8) for key in ENGINES])
    left, right = ("w", 0, 4, 1, "w", 0, 4, 1, 1, 4), ("w", 4, 4, 1, "w", 4, 4, 1, 1, 4)
    sketch.add(TRAINERS[0], ENGINES[0], "network", [left])
    sketch.add(TRAINERS[0], ENGINES[1], "network", [right])
    sketch.add(ENGINES[1], ENGINES[0], "peer", [right], stage=1)
    sketch.add(ENGINES[0], ENGINES[1], "peer", [left], stage=1)
    spread = rig(sketch)
    spread.build()
    spread.built()
    spread.run()
    for key, mate in (ENGINES, ENGINES[::-1]):
        spread.parties[mate].wait_landed()
        spread.parties[key].lane.ready(1, mate, spread.lent[mate].page.loan_word)
    for key in ENGINES:
        assert spread.parties[key].wait_for("done")["rx"] == {"network": 16, "peer": 16}
        np.testing.assert_array_equal(spread.lent[key].arrays["w"], spread.lent[TRAINERS[0]].arrays["w"])


def _waiting_for_a_neighbour(rig):
    sketch = Sketch([(key, "w", "int32", 4) for key in (TRAINERS[0], *ENGINES)])
    move = ("w", 0, 4, 1, "w", 0, 4, 1, 1, 4)
    sketch.add(TRAINERS[0], ENGINES[1], "peer", [move])
    sketch.add(ENGINES[1], ENGINES[0], "peer", [move], stage=1)
    spread = rig(sketch)
    spread.build()
    spread.built()
    return spread


def test_a_neighbour_that_never_becomes_ready_is_named(rig):
    """Waiting for ready ends after neighbour_timeout with the edge, and what was verified is kept."""
    spread = _waiting_for_a_neighbour(rig)
    spread.run(neighbour_timeout=0.2)
    failed = spread.parties[ENGINES[0]].wait_for_failure()
    assert (failed["edge"], failed["reason"]) == ([ENGINES[1], ENGINES[0]], "neighbour not ready")
    assert failed["verified"] == []


def test_no_neighbour_is_late_while_the_store_is_away(rig):
    """Its lane may wait for words that nobody can say: the limit counts anew from when the store answers again."""
    spread = _waiting_for_a_neighbour(rig)
    waiter = spread.parties[ENGINES[0]]
    waiter.lane.heed_store(True)
    spread.run(neighbour_timeout=0.2)
    time.sleep(1.0)
    assert [said["kind"] for said in list(waiter.messages.queue)] == ["landed"]
    waiter.lane.heed_store(False)
    assert waiter.wait_for_failure()["reason"] == "neighbour not ready"
