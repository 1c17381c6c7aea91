"""Random sides over nodes and domains, and programs carried out stage by stage in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import strategies as st
from plan_helpers import cast_whole, distinct, fill

from refitd.layout import Box, Layout, Piece
from refitd.layout.side import Side
from refitd.layout.side_factor import side_from_layouts
from refitd.plan import Rank, copy, pack, unpack
from refitd.plan.execute import array_dtype


@st.composite
def tiling(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A random grid of boxes that covers a tensor once."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        boxes = [((*lo, a), (*hi, b)) for lo, hi in boxes for a, b in itertools.pairwise(edges)]
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
def layouts(draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]], dtypes: list[str], complete: bool) -> list[Layout]:
    """Ranks with random parts of every tensor; replicas in up to two groups, each cut in its own way."""
    count = len(dtypes)
    mine: list[dict[str, list[Box]]] = [{} for _ in range(count)]
    split = draw(st.integers(1, count))
    for name, shape in shapes.items():
        for number, group in enumerate((range(split), range(split, count))):
            for box in draw(tiling(shape)) if group else []:
                must = complete and not number
                for rank in sorted(draw(st.sets(st.sampled_from(group), min_size=1 if must else 0, max_size=3))):
                    mine[rank].setdefault(name, []).append(box)
    result = []
    for boxes, dtype in zip(mine, dtypes, strict=True):
        made = [draw(piece(n, box, f"{n}.{i}")) for n, parts in boxes.items() for i, box in enumerate(parts)]
        storages = {p.storage: (numel, dtype) for p, numel in made}
        facts = {n: (s, dtype) for n, s in shapes.items()}
        result.append(Layout.from_pieces(facts, storages, [p for p, _ in made]))
    return result


def side(ranks: list[Rank]) -> Side:
    return side_from_layouts({r.key: r.layout for r in ranks}, {r.key: (r.node, r.domain) for r in ranks})


World = tuple[dict[str, tuple[int, ...]], str, list[Rank], list[Rank]]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """(shapes, source dtype, sources, destinations), on random nodes of up to four domains."""
    shapes = {f"t{i}": tuple(draw(st.lists(st.integers(1, 6), max_size=4))) for i in range(draw(st.integers(1, 3)))}
    source = draw(st.sampled_from(["float32", "bfloat16"]))
    numbers = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    wanted = [draw(st.sampled_from(["float32", "bfloat16"]))] * numbers[1]
    sides = draw(layouts(shapes, [source] * numbers[0], True)), draw(layouts(shapes, wanted, False))
    places = draw(st.lists(st.sampled_from(["a1", "a2", "b1", "c1", "d1"]), min_size=10, max_size=10))
    ranks = [
        [
            Rank(f"{prefix}/{i}", place, place[0], lay)
            for i, (lay, place) in enumerate(zip(side, places[at:], strict=False))
        ]
        for prefix, side, at in (("trainer/s", sides[0], 0), ("engine/d", sides[1], 4))
    ]
    return shapes, source, ranks[0], ranks[1]


def flats(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {n: t.view(torch.uint8).numpy().view(array_dtype(str(t.dtype)[6:])) for n, t in tensors.items()}


def zeros(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(numel, dtype=getattr(torch, dtype)) for name, (numel, dtype) in layout.storages.items()}


def memory(shapes: Mapping[str, tuple[int, ...]], dtype: str, sources: list[Rank], members: list[Rank]) -> dict:
    """Arrays of every rank: sources filled with distinct values (NaN between pieces), destinations zero."""
    whole = cast_whole(distinct(shapes), dtype)
    arrays = {r.key: flats(fill(r.layout, whole, float("nan"))) for r in sources}
    return arrays | {r.key: flats(zeros(r.layout)) for r in members}


def expected(shapes: Mapping[str, tuple[int, ...]], dtype: str, rank: Rank) -> dict[str, bytes]:
    """What gather-and-slice puts into the storages of a destination."""
    target = next((d for _, d in rank.layout.storages.values()), dtype)
    return {
        n: a.tobytes()
        for n, a in flats(fill(rank.layout, cast_whole(cast_whole(distinct(shapes), dtype), target))).items()
    }


def carry_out(programs: list, arrays: dict, packed: bool, wanted=None) -> None:
    """Run the receives of all programs, stage after stage."""
    stages = sorted({b.stage for p in programs for b in p.receives()})
    for stage in stages:
        for program in programs:
            for bucket in program.receives():
                if bucket.stage == stage and (wanted is None or bucket.id in wanted):
                    if packed:
                        unpack(program, bucket, pack(program, bucket, arrays[bucket.src]), arrays[bucket.dst])
                    else:
                        copy(program, bucket, arrays[bucket.src], arrays[bucket.dst])
