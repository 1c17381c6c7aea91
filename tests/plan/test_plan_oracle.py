"""Random sides against an oracle that knows whole tensors."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import bits, cast_whole, distinct, fill, ranks
from side_helpers import carry_out, flats, layouts, zeros

from refitd.layout import Layout
from refitd.plan import Held, make_plan, reshard

DTYPES = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], str, str, list[Layout], list[Layout]]:
    shapes = {f"t{i}": tuple(draw(st.lists(st.integers(1, 6), max_size=4))) for i in range(draw(st.integers(1, 2)))}
    source, destination = draw(st.sampled_from(DTYPES))
    counts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sides = draw(layouts(shapes, [source] * counts[0], True)), draw(layouts(shapes, [destination] * counts[1], False))
    return shapes, source, destination, *sides


@settings(max_examples=120, deadline=None)
@given(worlds())
def test_reshard_equals_gather_and_slice(world: tuple) -> None:
    """Every destination has the bits of the whole tensor, cast as torch casts, and zero where nothing is due."""
    shapes, source, destination, src, dst = world
    whole = cast_whole(distinct(shapes), source)
    out = reshard(src, dst, [fill(layout, whole, float("nan")) for layout in src])
    expected = [fill(layout, cast_whole(whole, destination)) for layout in dst]
    assert [{n: bits(t) for n, t in rank.items()} for rank in out] == [
        {n: bits(t) for n, t in rank.items()} for rank in expected
    ]


@settings(max_examples=80, deadline=None)
@given(worlds(), st.data())
def test_remainder_completes_what_was_held(world: tuple, data: st.DataObject) -> None:
    """After any part of a plan has landed, a plan of the remainder alone completes the destinations."""
    shapes, source, destination, src, dst = world
    whole = cast_whole(distinct(shapes), source)
    nodes = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=len(dst), max_size=len(dst)))
    sources, members = ranks("trainer/s", src, [f"s{i}" for i in range(len(src))]), ranks("engine/d", dst, nodes)
    bucket_bytes = data.draw(st.sampled_from([8, 16, 64, 1 << 20]))
    first = make_plan(sources, members, bucket_bytes=bucket_bytes)
    arrays = {r.key: flats(fill(r.layout, whole, float("nan"))) for r in sources}
    arrays |= {r.key: flats(zeros(r.layout)) for r in members}
    landed = data.draw(st.sets(st.sampled_from(range(len(first.buckets))))) if first.buckets else set()
    landed |= {b.id for b in first.buckets if b.stage == 0 and any(first.buckets[i].stage for i in landed)}
    carry_out([first.program(r.key) for r in members], arrays, packed=False, wanted=landed)
    held = {
        r.key: first.held(r.key, [b.id for b in first.buckets if b.id in landed and b.dst == r.key]) for r in members
    }
    second = make_plan(sources, members, held=held, bucket_bytes=bucket_bytes)
    carry_out([second.program(r.key) for r in members], arrays, packed=True)
    for rank in members:
        expected = flats(fill(rank.layout, cast_whole(whole, destination)))
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == {n: a.tobytes() for n, a in expected.items()}
    every = {r.key: first.held(r.key, [b.id for b in first.buckets if b.dst == r.key]) for r in members}
    assert make_plan(sources, members, held=every).buckets == ()
    assert all(same_elements(every[r.key], held[r.key].union(second.held(r.key, mine(second, r.key)))) for r in members)


def mine(plan, key):
    return [b.id for b in plan.buckets if b.dst == key]


def same_elements(a: Held, b: Held) -> bool:
    return a.elements == b.elements == a.union(b).elements
