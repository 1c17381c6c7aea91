"""Meshes with placements, an oracle that cuts whole tensors with `torch.chunk`, and plans carried out by bucket.

Every element of a model has a number of its own: 32-bit counters, and for narrower dtypes their planes (all second
halves, all fourth bytes) as tensors that travel together, so that no two elements look alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from refitd import Layout, reshard
from refitd.layout import Box, Piece, Side, side_from_layouts
from refitd.plan import Rank, SidePlan, copy, plan_sides, topology
from refitd.plan.execute import array_dtype
from refitd.plan.topology import Link

_FAST = Link(10**12, 0)
TINY = replace(topology("h100-nvl8"), network=Link(10**9, 1), fabric=_FAST, peer=_FAST)  # every byte is worth a share
R = None
Whole = Mapping[str, torch.Tensor]


class Mesh(NamedTuple):
    """``ranks``: an array of rank numbers, an axis for each mesh axis. ``cuts``: the dimension that each axis shards,
    or ``R`` (replicated)."""

    ranks: np.ndarray
    cuts: tuple[int | None, ...]


def mesh(ranks: Any, *cuts: int | None, shape: Sequence[int] | None = None) -> Mesh:
    """A mesh over ``ranks`` (nested lists, or a range with ``shape``)."""
    array = np.array(ranks)
    return Mesh(array.reshape(shape) if shape else array, cuts)


def numbers(of: Mesh) -> list[int]:
    """All ranks of a mesh, in its order."""
    return of.ranks.ravel().tolist()


def part(whole: torch.Tensor, of: Mesh, rank: int) -> torch.Tensor:
    """What ``rank`` has: `torch.chunk` axis after axis; a chunk that torch does not return is empty."""
    at = np.argwhere(of.ranks == rank)[0]
    for ways, index, dim in zip(of.ranks.shape, at.tolist(), of.cuts, strict=True):
        if dim is not None:
            chunks = torch.chunk(whole, ways, dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def box_of(shape: Sequence[int], of: Mesh, rank: int) -> Box:
    """The box of ``rank``: what `part` leaves of the index of each dimension."""
    lo, hi = [], []
    for dim, size in enumerate(shape):
        index = torch.arange(size)
        only = Mesh(of.ranks, tuple(None if cut is None or cut % len(shape) != dim else 0 for cut in of.cuts))
        mine = part(index, only, rank)
        lo.append(int(mine[0]) if len(mine) else 0)
        hi.append(int(mine[-1]) + 1 if len(mine) else 0)
    return Box(tuple(lo), tuple(hi))


def layout_of(whole: Whole, of: Mesh, rank: int, dtype: str | None = None) -> Layout:
    """The layout of ``rank``: a dense storage for each tensor."""
    facts, storages, pieces = {}, {}, []
    for name, tensor in whole.items():
        kind = dtype or str(tensor.dtype).removeprefix("torch.")
        box = box_of(tensor.shape, of, rank)
        strides = torch.empty(box.shape, device="meta").stride()
        facts[name], storages[name] = (tuple(tensor.shape), kind), (box.volume, kind)
        pieces.append(Piece(name, box, name, 0, tuple(strides)))
    return Layout.from_pieces(facts, storages, pieces)


def counters(shape: Sequence[int], first: int = 1) -> torch.Tensor:
    """Distinct 32-bit numbers, none of them zero."""
    count = int(np.prod(shape, dtype=np.int64))
    return torch.arange(first, first + count, dtype=torch.int32).reshape(tuple(shape))


def planes(shape: Sequence[int], itemsize: int = 4) -> dict[str, torch.Tensor]:
    """`counters` in one tensor of 4 bytes an element, two of 2 (bfloat16) or four of 1 (uint8)."""
    whole = counters(shape)
    if itemsize == 4:
        return {"w": whole}
    dtype = torch.bfloat16 if itemsize == 2 else torch.uint8
    split = whole.reshape(*shape, 1).view(dtype)
    return {f"w{i}": split[..., i].contiguous() for i in range(4 // itemsize)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, which compare as numbers."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def deliver(whole: Whole, source: Mesh, target: Mesh, dtype: str | None = None) -> None:
    """`reshard` and compare every destination with what gather-and-slice gives it, bit by bit."""
    known: dict[Box, dict[str, torch.Tensor]] = {}
    sources, shards = [], []
    for rank in numbers(source):
        sources.append(layout_of(whole, source, rank))
        first = next(iter(whole.values()))
        box = box_of(first.shape, source, rank)
        if box not in known:
            known[box] = {name: part(tensor, source, rank).contiguous().reshape(-1) for name, tensor in whole.items()}
        shards.append(known[box])
    targets = [layout_of(whole, target, rank, dtype) for rank in numbers(target)]
    for rank, got in zip(numbers(target), reshard(sources, targets, shards), strict=True):
        for name, tensor in whole.items():
            expected = part(tensor, target, rank)
            expected = expected.to(getattr(torch, dtype)) if dtype else expected
            assert got[name].dtype == expected.dtype
            assert torch.equal(bits(got[name]), bits(expected)), (rank, name)


def ranks_of(
    whole: Whole, of: Mesh, prefix: str = "rank", domain: str | None = None, dtype: str | None = None
) -> list[Rank]:
    """Ranks, each in a domain of its own or all in one (and there on one node)."""
    return [
        Rank(f"{prefix}/{n}", domain or f"n{n}", domain or f"n{n}", layout_of(whole, of, n, dtype)) for n in numbers(of)
    ]


def side_of(ranks: Iterable[Rank]) -> Side:
    """The ranks as a factored side."""
    listed = list(ranks)
    return side_from_layouts({r.key: r.layout for r in listed}, {r.key: (r.node, r.domain) for r in listed})


def arrays_of(ranks: Iterable[Rank], of: Mesh, whole: Whole, filled: bool) -> dict[str, dict[str, np.ndarray]]:
    """Flat arrays of every storage, with the parts of ``whole`` or zero."""
    result = {}
    for rank in ranks:
        number = int(rank.key.rsplit("/", 1)[1])
        result[rank.key] = {
            name: bits(part(whole[name], of, number)).numpy().view(array_dtype(dtype)).copy()
            if filled
            else np.zeros(numel, array_dtype(dtype))
            for name, (numel, dtype) in rank.layout.storages.items()
        }
    return result


Delivered = dict[tuple[int, int, str], set[int]]


def carry_out(plan: Any, sources: Mapping[str, Any], targets: Mapping[str, Any]) -> Delivered:
    """Run every program of one tensor ``w``, stage by stage; the numbers that each bucket brought, by (source rank,
    destination rank, link). Fails where a bucket writes an element that has been written."""
    programs = [plan.program(key) for key in targets]
    due = sorted(((b.stage, i, n) for i, p in enumerate(programs) for n, b in enumerate(p.receives())))
    result: Delivered = {}
    for _, i, n in due:
        bucket = programs[i].receives()[n]
        held = targets[bucket.dst]["w"]
        before = held.copy()
        origin = sources if bucket.stage == 0 and bucket.src in sources else targets
        copy(programs[i], bucket, origin[bucket.src], targets[bucket.dst])
        fresh = held != before
        assert (before[fresh] == 0).all()
        assert int(fresh.sum()) * held.itemsize == bucket.nbytes
        edge = (int(bucket.src.rsplit("/", 1)[1]), int(bucket.dst.rsplit("/", 1)[1]), bucket.link)
        result.setdefault(edge, set()).update(held[fresh].tolist())
    return result


def plan_of(sources: Iterable[Rank], targets: Iterable[Rank]) -> SidePlan:
    """A factored plan in which every element is worth a message."""
    return plan_sides(side_of(sources), side_of(targets), TINY)


def inside(shape: Sequence[int], *edges: tuple[int, int]) -> set[int]:
    """The counters of a box ``edges`` (half-open, a pair for each dimension) of a tensor of ``shape``."""
    whole = counters(shape)
    return set(whole[tuple(slice(a, b) for a, b in edges)].reshape(-1).tolist())
