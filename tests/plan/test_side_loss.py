"""Remainders after ranks are lost: what is left is planned, and nothing that a live rank has is given up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from side_helpers import World, carry_out, expected, memory, side, worlds
from side_makers import TINY

from refitd.plan import Rank, SidePlan, lose, plan_sides
from refitd.plan.cutting import Parcels, cut
from refitd.plan.side_plan import Core
from refitd.plan.spans import window
from refitd.testing import split_layout

pytestmark = pytest.mark.timeout(300)  # many random worlds


def landed(plan: SidePlan, thousandths: int) -> SidePlan:
    """The plan of what has landed when that part of every flow has."""
    content, flows = plan.content, plan.content.flows
    spans = window(content.lines, 0, thousandths)
    parcels = Parcels(flows, flows.line, np.zeros_like(flows.line), flows.place)
    parcels = parcels.take(np.flatnonzero(spans.nbytes()[flows.line] > 0))
    cutting = cut(content.lines, spans, parcels, content.sets.table(), len(plan.ranks), 1, start=1)
    part = np.zeros(len(content.lines.holders), np.int64)
    return SidePlan("landed", plan.topology, plan.bucket_bytes, Core(content, cutting, part))


@settings(max_examples=200, deadline=None)
@given(worlds(), st.data())
def test_a_remainder_completes_what_had_landed(world: World, data: st.DataObject) -> None:
    """After any loss at any time the remainder brings all that a live rank has, and says how much none has."""
    shapes, dtype, sources, members = world
    plan = plan_sides(side(sources), side(members), TINY, bucket_bytes=64)
    at = data.draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]))
    lost = data.draw(st.sets(st.sampled_from(plan.ranks), max_size=3))
    arrays = memory(shapes, dtype, sources, members)
    carry_out([landed(plan, round(at * 1000)).program(r.key) for r in members], arrays, packed=False)
    rest = lose(plan, sorted(lost), at)
    left = [rank for rank in members if rank.key not in lost]
    for key in lost:
        del arrays[key]
    carry_out([rest.program(rank.key) for rank in left], arrays, packed=True)
    missing: set[tuple[str, int]] = set()
    for rank in left:
        wrong = {
            n: np.frombuffer(b, a.dtype) != a
            for (n, b), a in zip(expected(shapes, dtype, rank).items(), arrays[rank.key].values(), strict=True)
        }
        for p in rank.layout.pieces():
            flat = np.lib.stride_tricks.as_strided(
                wrong[p.storage][p.offset :], p.box.shape, p.strides, writeable=False
            )
            index = np.arange(int(np.prod(shapes[p.tensor]))).reshape(shapes[p.tensor])
            cut_ = index[tuple(slice(a, b) for a, b in zip(p.box.lo, p.box.hi, strict=True))]
            missing |= {(p.tensor, int(i)) for i in cut_[flat].ravel()}
    size = {
        t: next(iter(r.layout.storages.values()))[1] for r in members for t in r.layout.tensors if r.layout.storages
    }
    nbytes = sum(2 if size[t] == "bfloat16" else 4 for t, _ in missing)
    assert rest.totals["unrecoverable_bytes"] == nbytes


def test_ranks_whose_near_holder_is_lost_get_the_line_over_the_network_once() -> None:
    """Each had a near flow of its own; a line enters a domain once, for all of its ranks, by domains in order."""
    whole = split_layout({"w": ((8,), "float32")}, 0, 1)
    sources = [
        Rank("trainer/s/0", "a1", "a", whole),
        *(Rank(f"trainer/s/{i}", f"{d}1", d, whole) for i, d in ((1, "b"), (2, "c"))),
    ]
    members = [Rank(f"engine/d/{i}", f"{d}{i}", d, whole) for i, d in enumerate("ccbb")]
    plan = plan_sides(side(sources), side(members), TINY, bucket_bytes=64)
    assert plan.totals["network_bytes"] == 0
    rest = lose(plan, ["trainer/s/1", "trainer/s/2"], 0.0)
    assert (rest.totals["network_bytes"], rest.totals["unrecoverable_bytes"]) == (2 * 32, 0)
    arrays = memory({"w": (8,)}, "float32", sources, members)
    carry_out([rest.program(rank.key) for rank in (sources[0], *members)], arrays, packed=True)
    for rank in members:
        assert arrays[rank.key]["w"].tobytes() == expected({"w": (8,)}, "float32", rank)["w"]
