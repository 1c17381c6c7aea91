"""`make_plan` of many pieces goes the factored way and keeps every promise of the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from side_helpers import World, carry_out, expected, memory, worlds

from refitd.plan import Bucket, Held, Plan, Program, large, make_plan


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


def factored(sources: list, members: list, held: dict[str, Held] | None = None, bucket_bytes: int = 64) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "PIECES", 0)
        return make_plan(sources, members, held=held, bucket_bytes=bucket_bytes)


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
