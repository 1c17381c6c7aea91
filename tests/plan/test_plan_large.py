"""`make_plan` of many pieces goes the factored way and keeps every promise of the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from side_helpers import World, carry_out, expected, memory, worlds

from refitd.plan import Program, large, make_plan


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from([16, 64, 1 << 20]))
def test_both_ways_deliver_the_same(world: World, bucket_bytes: int) -> None:
    """The factored way gives the same bits, totals and stages, in buckets that survive their bytes."""
    shapes, dtype, sources, members = world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "PIECES", 0)
        plan = make_plan(sources, members, bucket_bytes=bucket_bytes)
        again = make_plan(sources[::-1], members[::-1], bucket_bytes=bucket_bytes)
    other = make_plan(sources, members, bucket_bytes=bucket_bytes)
    assert {link: plan.totals[link] for link in other.totals if link in plan.totals} == dict(other.totals)
    assert plan.digest == again.digest != other.digest
    programs = [Program.from_bytes(plan.program(rank.key).to_bytes()) for rank in members]
    arrays = memory(shapes, dtype, sources, members)
    carry_out(programs, arrays, packed=True)
    for rank in members:
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == expected(shapes, dtype, rank)
    assert {(b.link, b.stage) for b in plan.buckets} <= {("network", 0), ("peer", 0), ("peer", 1), ("local", 0)}
    for rank in members:
        mine = [b.id for b in plan.program(rank.key).receives()]
        held = plan.held(rank.key, mine)
        assert held.elements == sum(piece.box.volume for piece in rank.layout.pieces())
        assert make_plan(sources, [rank], held={rank.key: held}).buckets == ()
