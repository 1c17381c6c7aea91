"""Boxes of logical tensors, pieces (a box as a strided view of a storage), and the grid that a set of boxes cuts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Box(NamedTuple):
    """Half-open box ``lo[d] <= index[d] < hi[d]`` in the global coordinates of a logical tensor."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the box."""
        return tuple(h - low for low, h in zip(self.lo, self.hi, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a scalar's box."""
        volume = 1
        for size in self.shape:
            volume *= max(size, 0)
        return volume

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where there is no common element."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None


def difference(box: Box, others: Iterable[Box]) -> list[Box]:
    """``box`` without ``others``, as disjoint boxes."""
    rest = [box]
    for other in others:
        rest = [part for piece in rest for part in _without(piece, other)]
    return rest


def _without(box: Box, other: Box) -> list[Box]:
    common = box.intersect(other)
    if common is None:
        return [box]
    parts = []
    lo, hi = list(box.lo), list(box.hi)
    for d in range(len(lo)):
        if lo[d] < common.lo[d]:
            parts.append(Box(tuple(lo), (*hi[:d], common.lo[d], *hi[d + 1 :])))
        if common.hi[d] < hi[d]:
            parts.append(Box((*lo[:d], common.hi[d], *lo[d + 1 :]), tuple(hi)))
        lo[d], hi[d] = common.lo[d], common.hi[d]
    return parts


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


class Piece(NamedTuple):
    """The box of a logical tensor as a strided view of a storage; offset and strides count elements of the storage."""

    tensor: str
    box: Box
    storage: str
    offset: int
    strides: tuple[int, ...]


class Grid(NamedTuple):
    """Cells cut by the edges of B boxes: ``cuts`` by dimension, ``inside`` (C, B): whether the cell lies in the box.

    C is the product of ``len(cut) - 1``, row-major.
    """

    cuts: tuple[Ints, ...]
    inside: Bools

    def bounds(self) -> tuple[Ints, Ints]:
        """lo and hi of the cells, (C, D)."""
        return _product([cut[:-1] for cut in self.cuts]), _product([cut[1:] for cut in self.cuts])


def grid(lo: Ints, hi: Ints) -> Grid:
    """The common refinement of boxes ``lo``, ``hi`` (B, D): every cell is inside or outside of each box."""
    cuts = tuple(np.unique(np.concatenate([lo[:, d], hi[:, d]])) for d in range(lo.shape[1]))
    inside = np.ones((1, len(lo)), dtype=bool)
    for d, cut in enumerate(cuts):
        axis = (lo[:, d] <= cut[:-1, None]) & (cut[1:, None] <= hi[:, d])
        inside = (inside[:, None, :] & axis[None, :, :]).reshape(-1, len(lo))
    return Grid(cuts, inside)


def coarsen(cuts: tuple[Ints, ...], labels: Ints) -> tuple[tuple[Ints, ...], Ints]:
    """Drop each cut whose two sides carry equal labels everywhere; labels (C,) of the cells that remain."""
    table = labels.reshape([len(cut) - 1 for cut in cuts])
    result = []
    for d, cut in enumerate(cuts):
        flat = np.moveaxis(table, d, 0).reshape(len(cut) - 1, -1)
        keep = np.ones(len(cut), dtype=bool)
        keep[1:-1] = (flat[1:] != flat[:-1]).any(axis=1)
        table = np.compress(keep[:-1], table, axis=d)
        result.append(cut[keep])
    return tuple(result), table.ravel()


def _product(columns: list[Ints]) -> Ints:
    mesh = np.meshgrid(*columns, indexing="ij")
    return np.stack([axis.ravel() for axis in mesh], axis=1)


def missing(shape: tuple[int, ...], lo: Ints, hi: Ints) -> Box | None:
    """A box of the tensor that no box of ``lo``, ``hi`` (B, D) covers, or None. D may exceed the tensor's rank."""
    dims = len(shape)
    full = np.ones((1, lo.shape[1]), dtype=np.int64)
    full[0, :dims] = shape
    cells = grid(np.concatenate([np.zeros_like(full), lo]), np.concatenate([full, hi]))
    bare: Ints = np.flatnonzero(cells.inside[:, 0] & ~cells.inside[:, 1:].any(axis=1))
    if not len(bare):
        return None
    low, high = cells.bounds()
    return Box(tuple(low[bare[0], :dims].tolist()), tuple(high[bare[0], :dims].tolist()))


def views_overlap(a: int, dims_a: list[tuple[int, int]], b: int, dims_b: list[tuple[int, int]]) -> bool:
    """Whether two strided views share an address. ``dims``: (stride, extent), stride > 0, extent > 1, largest first.

    Exact for views whose dimensions nest, as those of real tensors do; views that interleave in more than 64 ways count
    as overlapping.
    """
    if not dims_a and not dims_b:
        return a == b
    step = max(dims_a[:1] + dims_b[:1])[0]
    count_a, inner_a = _outer(dims_a, step)
    count_b, inner_b = _outer(dims_b, step)
    low = max(-((_span(inner_a) - (b - a)) // step), 1 - count_b)
    high = min((b - a + _span(inner_b)) // step, count_a - 1)
    if high - low > 64:
        return True
    return any(views_overlap(a + k * step, inner_a, b, inner_b) for k in range(low, high + 1))


def _outer(dims: list[tuple[int, int]], step: int) -> tuple[int, list[tuple[int, int]]]:
    return (dims[0][1], dims[1:]) if dims and dims[0][0] == step else (1, dims)


def _span(dims: list[tuple[int, int]]) -> int:
    return sum(stride * (extent - 1) for stride, extent in dims)


def view_dims(box: Box, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(stride, extent) of the dimensions that step through memory, largest stride first."""
    steps = [(stride, extent) for stride, extent in zip(strides, box.shape, strict=True) if stride and extent > 1]
    return sorted(steps, reverse=True)


def overlaps_itself(box: Box, strides: tuple[int, ...]) -> bool:
    """Whether two elements of the box share an address (or its dimensions do not nest)."""
    if any(not stride and extent > 1 for stride, extent in zip(strides, box.shape, strict=True)):
        return True
    dims = view_dims(box, strides)
    return any(stride <= _span(dims[i + 1 :]) for i, (stride, _) in enumerate(dims))
