"""Plans between factored sides against an oracle that knows whole tensors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from side_helpers import World, carry_out, expected, memory, side, worlds
from side_makers import TINY

from refitd.plan import plan_sides

pytestmark = pytest.mark.timeout(300)  # many random worlds


@settings(max_examples=300, deadline=None)
@given(worlds(), st.data())
def test_programs_deliver_what_gather_and_slice_gives(world: World, data: st.DataObject) -> None:
    """Every destination has the bits of the whole tensor, cast as torch casts, and zero where nothing is due."""
    shapes, dtype, sources, members = world
    bucket_bytes = data.draw(st.sampled_from([16, 64, 1 << 20]))
    plan = plan_sides(side(sources), side(members), TINY, bucket_bytes=bucket_bytes)
    programs = [plan.program(rank.key) for rank in members]
    arrays = memory(shapes, dtype, sources, members)
    carry_out(programs, arrays, packed=data.draw(st.booleans()))
    for rank in members:
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == expected(shapes, dtype, rank)
    assert all(b.nbytes <= bucket_bytes for p in programs for b in p.buckets)
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"]


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_the_order_in_which_ranks_are_given_changes_nothing(world: World, data: st.DataObject) -> None:
    """Sides of the same layouts in any order make one digest and one program for each rank."""
    _, _, sources, members = world
    plan = plan_sides(side(sources), side(members), TINY)
    orders = data.draw(st.permutations(sources)), data.draw(st.permutations(members))
    again = plan_sides(side(orders[0]), side(orders[1]), TINY)
    assert again.digest == plan.digest
    for rank in (*sources, *members):
        assert again.program(rank.key).to_bytes() == plan.program(rank.key).to_bytes()
