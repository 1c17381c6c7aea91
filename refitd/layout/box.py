"""Boxes of logical tensors, pieces (a box as a strided view of a storage), and the grid that a set of boxes cuts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
VIEW_CALLS = 4096  # in which two views must be told apart; views of real tensors take tens
_CUTS = 16  # boxes of digits that one view may be cut into
_PASSES = 4  # over all axes, to part boxes by planes


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


class Budget:
    """Steps that a search may still take, shared by all its parts: what runs on an event loop must end soon."""

    __slots__ = ("left",)

    def __init__(self, steps: int) -> None:
        self.left = steps


def views_overlap(
    a: int, dims_a: list[tuple[int, int]], b: int, dims_b: list[tuple[int, int]], budget: Budget | None = None
) -> bool:
    """Whether two strided views share an address. ``dims``: (stride, extent), stride > 0, extent > 1, largest first.

    Exact for views whose dimensions nest, as those of real tensors do. ``budget`` counts the calls of the recursion,
    all levels together (`VIEW_CALLS` where none is given); views that take more than that count as overlapping.
    """
    return _meet(a, dims_a, b, dims_b, Budget(VIEW_CALLS) if budget is None else budget)


def _meet(a: int, dims_a: list[tuple[int, int]], b: int, dims_b: list[tuple[int, int]], budget: Budget) -> bool:
    if budget.left <= 0:
        return True
    budget.left -= 1
    if not dims_a and not dims_b:
        return a == b
    step = max(dims_a[:1] + dims_b[:1])[0]
    count_a, inner_a = _outer(dims_a, step)
    count_b, inner_b = _outer(dims_b, step)
    low = max(-((_span(inner_a) - (b - a)) // step), 1 - count_b)
    high = min((b - a + _span(inner_b)) // step, count_a - 1)
    if high - low >= budget.left:  # to find them apart would take a call for each way: more than there are
        return True
    return any(_meet(a + k * step, inner_a, b, inner_b, budget) for k in range(low, high + 1))


def _outer(dims: list[tuple[int, int]], step: int) -> tuple[int, list[tuple[int, int]]]:
    return (dims[0][1], dims[1:]) if dims and dims[0][0] == step else (1, dims)


def _span(dims: list[tuple[int, int]]) -> int:
    return sum(stride * (extent - 1) for stride, extent in dims)


def view_dims(box: Box, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(stride, extent) of the dimensions that step through memory, largest stride first."""
    steps = [(stride, extent) for stride, extent in zip(strides, box.shape, strict=True) if stride and extent > 1]
    return sorted(steps, reverse=True)


def merged_dims(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses by fewer dimensions (stride, extent), largest first: one that continues another joins it."""
    merged: list[tuple[int, int]] = []
    for stride, extent in reversed(dims):
        step, count = merged[-1] if merged else (1, 0)
        if merged and stride % step == 0 and stride // step <= count:
            merged[-1] = step, (extent - 1) * (stride // step) + count
        else:
            merged.append((stride, extent))
    return merged[::-1]


def overlaps_itself(box: Box, strides: tuple[int, ...]) -> bool:
    """Whether two elements of the box share an address (or its dimensions do not nest)."""
    if any(not stride and extent > 1 for stride, extent in zip(strides, box.shape, strict=True)):
        return True
    dims = view_dims(box, strides)
    return any(stride <= _span(dims[i + 1 :]) for i, (stride, _) in enumerate(dims))


class DigitBoxes(NamedTuple):
    """Views as boxes (M, K) over the digits of their addresses; ``owner`` (M,): the view of each.

    ``bad`` (N,): views that are no such boxes (they step out of a digit into the next); they have none.
    """

    lo: Ints
    extent: Ints
    owner: Ints
    bad: Bools

    def pick(self, rows: Bools) -> DigitBoxes:
        """Some of the boxes."""
        return self._replace(lo=self.lo[rows], extent=self.extent[rows], owner=self.owner[rows])

    def without(self, bad: Bools) -> DigitBoxes:
        """Without the boxes of the views ``bad`` (N,), which are bad from now on."""
        return self.pick(~bad[self.owner])._replace(bad=self.bad | bad)


def digit_boxes(start: Ints, extent: Ints, chain: Ints) -> DigitBoxes:
    """Views at ``start`` (N,) with ``extent`` (N, K) along the strides ``chain`` (K,), largest first, the last one 1.

    An address is written as ``sum(digit * stride)``, greedily from the largest stride on, which is unique. Two views
    share an address where two of their boxes share a point. Exact; a view that wraps around is cut into several boxes.
    """
    lo = np.empty_like(extent)
    for i, step in enumerate(chain.tolist()):
        lo[:, i], start = np.divmod(start, step)
    owner = np.arange(len(lo), dtype=np.int64)
    boxes = DigitBoxes(lo, extent.copy(), owner, np.zeros(len(lo), dtype=bool))
    for i in range(len(chain) - 1, 0, -1):
        above, step = int(chain[i - 1]), int(chain[i])
        if above % step == 0:
            boxes = _wrapped(boxes, i, above // step)
            count = np.bincount(boxes.owner, minlength=len(lo))
            boxes = boxes.without(count > _CUTS)
        else:  # the largest address of the lower digits must stay below the stride above them
            tail = ((boxes.lo + boxes.extent - 1)[:, i:] * chain[i:]).sum(axis=1)
            boxes = boxes.without(np.bincount(boxes.owner[tail >= above], minlength=len(lo)) > 0)
    return boxes


def _wrapped(boxes: DigitBoxes, i: int, radix: int) -> DigitBoxes:
    """Digit ``i`` brought below ``radix``: what is beyond it is carried into digit ``i - 1``."""
    carry = boxes.lo[:, i] // radix
    boxes.lo[:, i] -= carry * radix
    boxes.lo[:, i - 1] += carry
    lo, extent = boxes.lo[:, i], boxes.extent[:, i]
    run = extent >= radix  # repeated at the next digit it leaves no gap: one longer run
    extent[run] += (boxes.extent[run, i - 1] - 1) * radix
    boxes.extent[run, i - 1] = 1
    over = lo + extent > radix
    if not over.any():
        return boxes
    part, lo, extent = boxes.pick(over), lo[over], extent[over]
    first = np.where(lo == 0, 0, radix - lo)  # up to the carry; then whole rows of this digit; then the rest
    rows, rest = np.divmod(extent - first, radix)
    ahead = (first > 0).astype(np.int64)
    middle = _cut(part, i, np.where(rows > 0, radix, 0), 0, ahead)
    middle.extent[:, i - 1] = rows[rows > 0]
    parts = [boxes.pick(~over), _cut(part, i, first, lo, 0), middle, _cut(part, i, rest, 0, ahead + rows)]
    lo, extent, owner = (np.concatenate(column) for column in zip(*(part[:3] for part in parts), strict=True))
    return DigitBoxes(lo, extent, owner, boxes.bad)


def _cut(boxes: DigitBoxes, i: int, size: Ints, digit: Ints | int, ahead: Ints | int) -> DigitBoxes:
    """Boxes of ``size`` at digit ``i``, which starts at ``digit``, with the digit above moved; none of size 0."""
    lo, extent = boxes.lo.copy(), boxes.extent.copy()
    lo[:, i], extent[:, i] = digit, size
    lo[:, i - 1] += ahead
    return boxes._replace(lo=lo, extent=extent).pick(size > 0)


class Keys(NamedTuple):
    """Half-open intervals of one axis as numbers by which those of different labels never meet."""

    low: Ints
    high: Ints

    @classmethod
    def of(cls, label: Ints, lo: Ints, hi: Ints) -> Keys:
        """``label``, ``lo``, ``hi``: (N,)."""
        edges, rank = np.unique(np.concatenate([lo, hi]), return_inverse=True)
        base = label * len(edges)  # ranks, not addresses: label times address might not fit in 64 bits
        return cls(rank[: len(lo)] + base, rank[len(lo) :] + base)

    def clusters(self) -> Ints:
        """A number (N,) for each interval; those of different numbers do not meet, not even by way of others."""
        order = np.argsort(self.low, kind="stable")
        reach = np.maximum.accumulate(self.high[order])
        fresh = np.zeros(len(order), dtype=np.int64)
        fresh[1:] = self.low[order[1:]] >= reach[:-1]
        label = np.empty(len(order), dtype=np.int64)
        label[order] = np.cumsum(fresh)
        return label

    def followers(self) -> tuple[Ints, Ints]:
        """The order by ``low``, and how many of those that follow each one there meet it."""
        order = np.argsort(self.low, kind="stable")
        stop = np.searchsorted(self.low[order], self.high[order])
        return order, stop - np.arange(1, len(order) + 1)


def in_company(label: Ints) -> Bools:
    """Which entries share their label with another one."""
    return np.bincount(label)[label] > 1


def neighbours(label: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """Rows of boxes ``lo``, ``hi`` (N, D) of one ``label`` (N,) that may meet another, and new labels of those.

    Boxes that planes part get different labels: rows and columns of any grid. Near-linear.
    """
    rows, count = np.arange(len(label)), -1
    for _ in range(_PASSES):  # each may open gaps for the next; what they leave is for the caller to compare
        for d in range(lo.shape[1]):
            low, high = lo[rows, d], hi[rows, d]
            if not len(rows) or ((low == low[0]) & (high == high[0])).all():
                continue
            label = Keys.of(label, low, high).clusters()
            together = in_company(label)
            rows, label = rows[together], label[together]
        if count == (count := len(np.unique(label))):
            break
    return rows, label
