"""Random sides against an oracle that knows whole tensors."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import bits, cast_whole, distinct, fill, ranks

from refitd.layout import Box, Layout, Piece
from refitd.plan import Held, copy, make_plan, pack, reshard, unpack
from refitd.plan.execute import array_dtype

DTYPES = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


@st.composite
def cuts(draw: st.DrawFn, size: int, most: int) -> list[tuple[int, int]]:
    edges = draw(st.lists(st.integers(0, size), max_size=most, unique=True))
    points = sorted({0, size, *edges})
    return list(itertools.pairwise(points))


@st.composite
def tiling(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    axes = [draw(cuts(size, 2)) for size in shape]
    boxes = [((), ())]
    for axis in axes:
        boxes = [((*lo, a), (*hi, b)) for lo, hi in boxes for a, b in axis]
    return [Box(lo, hi) for lo, hi in boxes]


@st.composite
def piece(draw: st.DrawFn, tensor: str, box: Box, storage: str) -> tuple[Piece, int]:
    """A view in any order of dimensions, with gaps; and the elements that its storage needs."""
    order = draw(st.permutations(range(len(box.lo))))
    strides, step = [0] * len(order), draw(st.sampled_from([1, 1, 2]))
    for d in order:
        strides[d] = step
        step = step * box.shape[d] + draw(st.sampled_from([0, 0, 3]))
    offset = draw(st.integers(0, 3))
    span = sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))
    return Piece(tensor, box, storage, offset, tuple(strides)), offset + span + 1 + draw(st.integers(0, 2))


@st.composite
def side(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], dtype: str, complete: bool) -> list[Layout]:
    count = draw(st.integers(1, 4))
    mine: list[dict[str, list[Box]]] = [{} for _ in range(count)]
    for name, shape in shapes.items():
        for box in draw(tiling(shape)):
            holders = draw(st.sets(st.integers(0, count - 1), min_size=1 if complete else 0, max_size=count))
            for rank in sorted(holders):
                mine[rank].setdefault(name, []).append(box)
    layouts = []
    for boxes in mine:
        made = [draw(piece(n, box, f"{n}.{i}")) for n, parts in boxes.items() for i, box in enumerate(parts)]
        storages = {p.storage: (numel, dtype) for p, numel in made}
        layouts.append(Layout.from_pieces({n: (s, dtype) for n, s in shapes.items()}, storages, [p for p, _ in made]))
    return layouts


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], str, str, list[Layout], list[Layout]]:
    count = draw(st.integers(1, 2))
    shapes = {f"t{i}": tuple(draw(st.lists(st.integers(1, 6), max_size=4))) for i in range(count)}
    source, destination = draw(st.sampled_from(DTYPES))
    return shapes, source, destination, draw(side(shapes, source, True)), draw(side(shapes, destination, False))


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
    run(first, members, arrays, landed)
    held = {
        r.key: first.held(r.key, [b.id for b in first.buckets if b.id in landed and b.dst == r.key]) for r in members
    }
    second = make_plan(sources, members, held=held, bucket_bytes=bucket_bytes)
    run(second, members, arrays, {b.id for b in second.buckets}, packed=True)
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


def zeros(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(numel, dtype=getattr(torch, dtype)) for name, (numel, dtype) in layout.storages.items()}


def flats(tensors: dict[str, torch.Tensor]) -> dict:
    return {n: t.view(torch.uint8).numpy().view(array_dtype(str(t.dtype)[6:])) for n, t in tensors.items()}


def run(plan, members, arrays, wanted, packed=False) -> None:
    for stage in (0, 1):
        for program in [plan.program(r.key) for r in members]:
            for bucket in program.receives():
                if bucket.stage == stage and bucket.id in wanted:
                    if packed:
                        unpack(program, bucket, pack(program, bucket, arrays[bucket.src]), arrays[bucket.dst])
                    else:
                        copy(program, bucket, arrays[bucket.src], arrays[bucket.dst])
