"""Everything at once that a layout may say, against gather and slice: mixed dtypes, empty shards, ties, keep, replicas
that are cut differently in one node, fused storages, 0-d and empty tensors, sources beside destinations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from side_helpers import carry_out, piece, tiling

from refitd.layout import Box, Layout, Piece
from refitd.plan import Program, Rank, large, make_plan, reshard
from refitd.plan.execute import array_dtype

PAIRS = [
    ("float32", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32"),
    ("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"),
    ("int64", "int64"), ("uint8", "uint8"), ("bool", "bool"),
]  # fmt: skip
HEAD = "head"


class World(NamedTuple):
    """Whole tensors as they are, and as each destination wants them, by name; and the ranks."""

    whole: dict[str, torch.Tensor]
    wanted: dict[str, dict[str, torch.Tensor]]
    sources: list[Rank]
    members: list[Rank]


def values(count: int, dtype: str, start: int) -> torch.Tensor:
    """Distinct values where the dtype has so many: other bits in every byte that it has."""
    number = torch.arange(start, start + count)
    if dtype in ("float32", "float64"):
        return (1.0 + number.to(torch.float64) * 1.0009765671).to(getattr(torch, dtype))
    if dtype in ("bfloat16", "float16"):
        return (0x3C01 + number).to(torch.int16).view(getattr(torch, dtype))
    if dtype == "int64":
        return number * 0x0101_0307_1113 + 1
    spread = torch.rand(count, generator=torch.Generator().manual_seed(start)).mul(120).to(torch.uint8)
    return spread > 60 if dtype == "bool" else spread.view(getattr(torch, dtype))


def array(tensor: torch.Tensor) -> np.ndarray:
    """Bits of a tensor, in its shape."""
    if not tensor.numel():
        return np.zeros(tuple(tensor.shape), array_dtype(str(tensor.dtype)[6:]))
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(array_dtype(str(tensor.dtype)[6:]))
    return flat.reshape(tuple(tensor.shape))


def filled(layout: Layout, whole: Mapping[str, torch.Tensor], background: int, kept: bool) -> dict[str, np.ndarray]:
    """Storages with their pieces of ``whole``, those of ``keep`` where ``kept``; the rest is ``background``."""
    flats = {n: flat + flat.dtype.type(background) for n, flat in empty(layout).items()}
    for part in layout.pieces():
        if kept or part.storage not in layout.kept:
            flat, item = flats[part.storage], flats[part.storage].itemsize
            strides = tuple(step * item for step in part.strides)
            view = np.lib.stride_tricks.as_strided(flat[part.offset :], part.box.shape, strides)
            at = tuple(slice(a, b) for a, b in zip(part.box.lo, part.box.hi, strict=True))
            view[...] = array(whole[part.tensor])[at]
    return flats


@st.composite
def side(draw: st.DrawFn, facts: Mapping[str, tuple[tuple[int, ...], str]], tied: dict[str, str], whole: bool):
    """Layouts of ranks; each tensor in up to three groups of ranks, cut in their own ways. ``whole``: a source."""
    count = draw(st.integers(1, 5))
    found: list[list[tuple[Piece, int, str]]] = [[] for _ in range(count)]
    for name, (shape, dtype) in facts.items():
        group_of = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        for group in sorted(set(group_of)):
            ranks = [rank for rank in range(count) if group_of[rank] == group]
            for i, box in enumerate(draw(tiling(shape))):
                least = 1 if whole and group == group_of[0] else 0
                for rank in sorted(draw(st.sets(st.sampled_from(ranks), min_size=least, max_size=3))):
                    kept = not whole and draw(st.integers(0, 9)) == 0
                    storage = f"{'kept.' if kept else ''}{name}.{i}"
                    found[rank].append((*draw(piece(name, box, storage)), dtype))
        for rank in range(count) if shape else ():
            if draw(st.booleans()):  # an empty shard, as torch has it
                edge = draw(st.integers(0, shape[0]))
                box = Box((edge, *(0,) * (len(shape) - 1)), (edge, *shape[1:]))
                found[rank].append((Piece(name, box, f"{name}.none", 0, (1,) * len(shape)), 0, dtype))
    return [draw(laid_out(facts, parts, tied, whole)) for parts in found]


@st.composite
def laid_out(draw: st.DrawFn, facts, parts: list[tuple[Piece, int, str]], tied: dict[str, str], whole: bool) -> Layout:
    """One rank: each piece in a storage of its own, or all of a dtype in one."""
    storages: dict[str, tuple[int, str]] = {}
    fuse, pieces = draw(st.booleans()), []
    for part, numel, dtype in parts:
        name = f"fused.{dtype}" if fuse and numel and not part.storage.startswith("kept.") else part.storage
        at = storages.get(name, (0, dtype))[0]
        pieces.append(part._replace(storage=name, offset=part.offset + at))
        storages[name] = (at + numel, dtype)
    if not whole and draw(st.booleans()):
        storages["kept.rope"] = (3, "float32")
    known = (
        facts if tied or draw(st.booleans()) else {n: f for n, f in facts.items() if n in {p.tensor for p in pieces}}
    )
    return Layout.from_pieces(known, storages, pieces, ["kept.*"], tied)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to four tensors, of which the first may have a second name on either side, or another on the destination."""
    shapes = [tuple(draw(st.lists(st.integers(0, 5), max_size=4))) for _ in range(draw(st.integers(1, 4)))]
    kinds = [draw(st.sampled_from(PAIRS)) for _ in shapes]
    starts = itertools.accumulate([int(np.prod(shape)) for shape in shapes], initial=1)
    whole = {
        f"t{i}": values(int(np.prod(shape)), kind[0], start).reshape(shape)
        for i, (shape, kind, start) in enumerate(zip(shapes, kinds, starts, strict=False))
    }
    ties = draw(st.sampled_from(["none", "source", "both", "other", "two"]))
    have = whole | ({HEAD: whole["t0"]} if ties == "two" else {})
    tied = {"source": ({HEAD: "t0"}, {}), "both": ({HEAD: "t0"}, {HEAD: "t0"}), "other": ({}, {"t0": HEAD})}
    source_tie, target_tie = tied.get(ties, ({}, {}))
    replicas = []
    for _ in range(draw(st.integers(1, 2))):  # the second one may keep the sources' dtypes
        same, to = bool(replicas) and draw(st.booleans()), [getattr(torch, kind[1]) for kind in kinds]
        want = {n: t if same else t.to(d) for (n, t), d in zip(whole.items(), to, strict=True)}
        if ties == "other":
            want[HEAD] = want.pop("t0")
        if ties in ("source", "two"):
            want[HEAD] = want["t0"]
        replicas += [(layout, want) for layout in draw(side(facts(want), target_tie, False))]
    sources = draw(side(facts(have), source_tie, True))
    nodes = draw(st.lists(st.sampled_from(["a1", "a2", "b1", "c1"]), min_size=15, max_size=15))
    members = [
        Rank(f"engine/d/{i}", n, n[0], lay) for i, ((lay, _), n) in enumerate(zip(replicas, nodes, strict=False))
    ]
    holders = [
        Rank(f"trainer/s/{i}", n, n[0], lay) for i, (lay, n) in enumerate(zip(sources, nodes[10:], strict=False))
    ]
    return World(have, {rank.key: want for rank, (_, want) in zip(members, replicas, strict=True)}, holders, members)


def facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in tensors.items()}


def empty(layout: Layout) -> dict[str, np.ndarray]:
    return {n: np.zeros(numel, array_dtype(dtype)) for n, (numel, dtype) in layout.storages.items()}


def check(world: World, programs: list[Program]) -> None:
    arrays = {rank.key: filled(rank.layout, world.whole, 0x7A, kept=True) for rank in world.sources}
    arrays |= {rank.key: empty(rank.layout) for rank in world.members}
    carry_out([Program.from_bytes(program.to_bytes()) for program in programs], arrays, packed=True)
    for rank in world.members:
        due = filled(rank.layout, world.wanted[rank.key], 0, kept=False)
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == {n: a.tobytes() for n, a in due.items()}


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_anything_is_delivered_as_gather_and_slice_gives_it(world: World) -> None:
    """`reshard`, planning box by box and planning in the factored way each deliver every bit, and nothing else."""
    for rank in (*world.sources, *world.members):
        rank.layout.check(rank.key)
    shards = [filled(rank.layout, world.whole, 0x7A, kept=True) for rank in world.sources]
    out = reshard([rank.layout for rank in world.sources], [rank.layout for rank in world.members], shards)
    for rank, got in zip(world.members, out, strict=True):
        due = filled(rank.layout, world.wanted[rank.key], 0, kept=False)
        assert {n: array(t).tobytes() for n, t in got.items()} == {n: a.tobytes() for n, a in due.items()}
    for pieces in (1 << 60, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(large, "PIECES", pieces)
            plan = make_plan(world.sources, world.members, bucket_bytes=64)
        check(world, [plan.program(rank.key) for rank in world.members])
