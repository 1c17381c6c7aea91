"""`make_plan` of many pieces goes the factored way and keeps every promise of the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import cast_whole, distinct, fill, simple
from side_helpers import World, carry_out, expected, flats, memory, worlds

from refitd.layout import Box
from refitd.plan import Bucket, Plan, Program, Rank, large, make_plan
from refitd.plan.planner import BoxPlan
from refitd.plan.side_plan import LeftPlan

pytestmark = pytest.mark.timeout(300)  # many random worlds


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


def factored(sources: list, members: list, held=None, bucket_bytes: int = 64, near: Sequence[Rank] = ()) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "PIECES", 0)
        return make_plan(sources, members, near, held, bucket_bytes)


def sent(programs: list[Program]) -> list[tuple]:
    """Network buckets with their moves, as the sending programs have them, and as the receiving ones have."""
    ends = [[whole(p, b) for p in programs for b in side(p) if b.link == "network"]
            for side in (Program.sends, Program.receives)]  # fmt: skip
    assert sorted(ends[0]) == sorted(ends[1])
    return ends[0]


def whole(program: Program, bucket: Bucket) -> tuple:
    at = program.storages
    moves = [(at[m[0]], m[1:4], at[m[4]], m[5:]) for m in program.moves_of(bucket).tolist()]
    return (bucket.id, bucket.src, bucket.dst, bucket.stage, bucket.nbytes, moves)


@settings(max_examples=150, deadline=None)
@given(worlds(), st.data())
def test_the_remainder_of_a_large_lane_is_what_is_not_held(world: World, data: st.DataObject) -> None:
    """After any part of one plan has landed, what other sources still bring completes every rank, and no more than
    planning box by box brings into the nodes; senders and receivers name the same buckets."""
    shapes, dtype, sources, members = world
    bucket_bytes = data.draw(st.sampled_from([16, 64, 1 << 20]))
    first = factored(sources, members, bucket_bytes=data.draw(st.sampled_from([16, 32])))
    early = [b for b in first.buckets if b.stage == 0]
    late = [b for b in first.buckets if b.stage]
    picked = {b.id for b in data.draw(st.sets(st.sampled_from(early)))} if early else set()
    ready = {b.src for b in late if all(e.id in picked for e in early if e.dst == b.src)}
    late = [b for b in late if b.src in ready]
    picked |= {b.id for b in data.draw(st.sets(st.sampled_from(late)))} if late else set()
    arrays = memory(shapes, dtype, sources, members)
    carry_out([first.program(r.key) for r in members], arrays, packed=False, wanted=picked)
    held = {r.key: first.held(r.key, [b.id for b in first.buckets if b.id in picked and b.dst == r.key])
            for r in members}  # fmt: skip
    left = factored(sources, members, held, bucket_bytes)
    assert left.digest == factored(sources[::-1], members[::-1], held, bucket_bytes).digest
    programs = [Program.from_bytes(left.program(rank.key).to_bytes()) for rank in (*sources, *members)]
    entering = sum(row[4] for row in sent(programs))
    assert entering == left.totals["network_bytes"] == make_plan(sources, members, held=held).totals["network_bytes"]
    carry_out([p for p in programs if p.rank in {r.key for r in members}], arrays, packed=True)
    for rank in members:
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == expected(shapes, dtype, rank)
        rest = left.held(rank.key, [b.id for b in left.program(rank.key).receives()])
        assert rest.union(held[rank.key]).elements == rest.elements + held[rank.key].elements
    assert {(b.link, b.stage) for b in left.buckets} <= {("network", 0), ("peer", 0), ("peer", 1), ("local", 0)}


@settings(max_examples=25, deadline=None)
@given(worlds(), st.data())
def test_a_large_lane_reads_what_neighbours_will_have(world: World, data: st.DataObject) -> None:
    """Neighbours receive nothing and bring everything that they have into their node's members, before and after a part
    has landed; nothing else enters than what planning box by box lets in; any order of ranks makes one plan."""
    shapes, dtype, sources, ranks = world
    number = data.draw(st.integers(1, len(ranks)))
    members, near = ranks[:number], ranks[number:]
    bucket_bytes = data.draw(st.sampled_from([16, 64, 1 << 20]))
    plan = factored(sources, members, None, bucket_bytes, near)
    beside = {rank.key for rank in near if rank.node in {member.node for member in members}}
    assert isinstance(plan, LeftPlan) == bool(beside)
    assert plan.digest == factored(sources[::-1], members[::-1], None, bucket_bytes, near[::-1]).digest
    arrays = memory(shapes, dtype, sources, members)
    for rank in near:
        arrays[rank.key] = flats(fill(rank.layout, cast_whole(cast_whole(distinct(shapes), dtype), dtype_of(rank))))
    picked = {b.id for b in data.draw(st.sets(st.sampled_from([b for b in plan.buckets if b.stage == 0] or [None])))
              if b is not None}  # fmt: skip
    carry_out([plan.program(r.key) for r in members], arrays, packed=False, wanted=picked)
    landed = {r.key: plan.held(r.key, [b.id for b in plan.buckets if b.id in picked and b.dst == r.key])
              for r in members}  # fmt: skip
    for held in (None, landed):
        now = plan.left(held) if held else plan
        programs = [Program.from_bytes(now.program(rank.key).to_bytes()) for rank in (*sources, *members)]
        entering = sum(row[4] for row in sent(programs))
        assert entering == make_plan(sources, members, near, held).totals["network_bytes"]
        assert not {b.dst for b in now.buckets} & beside
        assert {b.stage for b in now.buckets if b.src in beside} <= {1}
    carry_out([p for p in programs if p.rank in {r.key for r in members}], arrays, packed=True)
    for rank in members:
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == expected(shapes, dtype, rank)


def test_a_neighbour_that_needs_what_nobody_has_is_no_fault_of_the_lane() -> None:
    """The lane is planned box by box then, and reads from the neighbour what that has."""
    shapes = {"w": (4, 4)}
    whole, extra = distinct(shapes), distinct({"w": (4, 4), "more": (2,)})
    sources, members, near = (
        [
            Rank(
                key,
                node,
                node,
                simple(facts, {name: [Box((0,) * t.ndim, tuple(t.shape))] for name, t in facts.items()}),
            )
        ]
        for key, node, facts in (("s/0", "s", whole), ("e/b/0", "d", whole), ("e/a/0", "d", extra))
    )
    plan = factored(sources, members, near=near)
    assert isinstance(plan, BoxPlan)
    assert [(b.src, b.link, b.stage, b.nbytes) for b in plan.buckets] == [("e/a/0", "peer", 1, 64)]


def dtype_of(rank: Rank) -> str:
    return next((dtype for _, dtype in rank.layout.storages.values()), "float32")
