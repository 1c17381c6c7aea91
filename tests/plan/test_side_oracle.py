"""Plans between factored sides against an oracle that knows whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from side_helpers import World, carry_out, expected, memory, side, worlds
from side_makers import TINY

from refitd.layout import Layout
from refitd.plan import Rank, plan_sides

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


def twins(ranks: list[Rank], made: Callable[[Layout], Layout]) -> list[Rank]:
    """Each rank twice; ``made`` makes the layout of the second of the first one's."""
    twice = [[rank, rank._replace(key=f"{rank.key}'", layout=made(rank.layout))] for rank in ranks]
    return list(itertools.chain.from_iterable(twice))


def known(layout: Layout) -> Layout:
    """An equal layout whose digest is known."""
    copied = Layout.from_bytes(layout.to_bytes())
    assert copied.digest == layout.digest
    return copied


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_whether_equal_layouts_are_one_object_changes_nothing(world: World, data: st.DataObject) -> None:
    """Nodes that fetched a document twice, or once, number layouts differently."""
    _, _, sources, members = world
    ways = [lambda layout: layout, lambda layout: Layout.from_bytes(layout.to_bytes()), known]
    ways.append(lambda layout: ways[data.draw(st.integers(0, 2))](layout))
    plans = [plan_sides(side(twins(sources, made)), side(twins(members, made)), TINY) for made in ways]
    assert len({plan.digest for plan in plans}) == 1
    for rank in (*sources, *members):
        assert len({plan.program(rank.key).to_bytes() for plan in plans}) == 1


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
