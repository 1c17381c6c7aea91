"""What boxes have in common, in room and time that are bounded.

`box.grid` holds every product of edges against every box: 96 flat shards of a 3-D tensor make 38 million of these, and
40 elements on the diagonal of a 5-D one 10^11. `sweep` finds the same regions one dimension after the other, and keeps
only which box each cell lies in; `meeting` compares those boxes only that meet along one dimension.

The method is that of plane sweeps (Bentley, "Algorithms for Klee's rectangle problems", 1977), by slabs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from refitd.errors import PlanError
from refitd.layout.box import Bools, Box, Ints, difference
from refitd.plan.ranksets import distinct, ends, ragged

GRID = 1 << 20  # cells times boxes of a grid; it has a byte for each, and is made in a few hundredths of a second
PAIRS = 1 << 20  # of a cell and a box that it lies in; a few seconds and 200 MiB for all that is then done with them
MEETINGS = 1 << 24  # of a box of one side and one of the other
CANDIDATES = 1 << 27  # boxes compared, a few seconds
_BLOCK = 1 << 20  # of them at a time
_LOOK = 1 << 20  # of them, rather than sweep
_FEW = 1000  # boxes that are taken out of another one by one


class Tangled(PlanError):
    """Boxes of a tensor cut each other into more parts than are planned: nothing is allocated for them.

    ``tensor``: as it reads in the message; ``shape``: of the tensor, where that is what is known of it.
    """

    def __init__(
        self, expected: str, got: str, shape: tuple[int, ...] | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(f"{tensor or f'a tensor of shape {shape}'}: expected {expected}, got {got}")
        self.expected, self.got, self.shape, self.tensor = expected, got, shape, tensor

    def of(self, shape: tuple[int, ...] | None = None, tensor: str | None = None) -> Tangled:
        """The same fault of the tensor that it was found in."""
        return Tangled(self.expected, self.got, shape or self.shape, tensor or self.tensor)


class Swept(NamedTuple):
    """Disjoint cells ``lo``, ``hi`` (C, D), in row-major order, that cover all boxes; each lies inside or outside of
    every box. ``cell``, ``box`` (N,): which cell lies in which box, sorted."""

    lo: Ints
    hi: Ints
    cell: Ints
    box: Ints

    def sets(self) -> Sets:
        """Cells that lie in the same boxes under one label."""
        first = ends(np.bincount(self.cell, minlength=len(self.lo))).tolist()
        numbers: dict[bytes, int] = {}
        keys = (self.box[start:stop].tobytes() for start, stop in pairwise(first))
        label = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        boxes = [np.frombuffer(key, np.int64) for key in numbers]
        return Sets(label, ends([len(each) for each in boxes]), np.concatenate([np.zeros(0, np.int64), *boxes]))


class Sets(NamedTuple):
    """Of each cell the set of boxes that it lies in: ``label`` (C,); set k is ``box[first[k]:first[k + 1]]``."""

    label: Ints
    first: Ints
    box: Ints


def grid_size(lo: Ints, hi: Ints) -> int:
    """Cells times boxes of the `grid` of boxes ``lo``, ``hi`` (B, D): a Python int, for 64 bits may be too few."""
    size = len(lo)
    for d in range(lo.shape[1]):
        size *= max(len(distinct(np.concatenate([lo[:, d], hi[:, d]]))) - 1, 0)
    return size


def corners(cuts: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    """lo and hi (C, D) of the cells between these cuts, row-major."""
    low = np.meshgrid(*[cut[:-1] for cut in cuts], indexing="ij")
    high = np.meshgrid(*[cut[1:] for cut in cuts], indexing="ij")
    return np.stack([a.ravel() for a in low], axis=1), np.stack([a.ravel() for a in high], axis=1)


def sweep(lo: Ints, hi: Ints) -> Swept:
    """The cells of boxes ``lo``, ``hi`` (B, D >= 1), cut along one dimension after the other: in each slab by the edges
    of those boxes only that lie in it. Empty boxes have no cell. Raises Tangled where cells lie in more than `PAIRS`
    boxes.
    """
    cell, box = np.zeros(len(lo), np.int64), np.arange(len(lo))
    low = high = np.zeros((1, 0), np.int64)
    for d in range(lo.shape[1]):
        edges = distinct(np.concatenate([lo[:, d], hi[:, d]]))
        start, stop = (cell * len(edges) + np.searchsorted(edges, side[box, d]) for side in (lo, hi))
        marks = distinct(np.concatenate([start, stop]))
        first = np.searchsorted(marks, start)
        counts = np.maximum(np.searchsorted(marks, stop) - first, 0)
        if (pairs := int(counts.sum())) > PAIRS:
            raise Tangled(
                f"boxes that cut each other into at most {PAIRS} parts", f"{pairs} or more of {len(lo)} boxes"
            )
        run, place = ragged(counts)
        mark, box = first[run] + place, box[run]
        used = distinct(mark)
        parent, at = np.divmod(marks[used], max(len(edges), 1))
        low = np.concatenate([low[parent], edges[at][:, None]], axis=1)
        # a slab's last mark is never used, so the next one is of the same slab
        high = np.concatenate([high[parent], edges[marks[used + 1] - parent * len(edges)][:, None]], axis=1)
        cell = np.searchsorted(used, mark)
    order = np.lexsort((box, cell))
    return Swept(low, high, cell[order], box[order])


def joined(lo: Ints, hi: Ints, label: Ints) -> tuple[Ints, Ints, Ints]:
    """Disjoint boxes ``lo``, ``hi`` (C, D) of ``label`` (C,), those of one label that make up a box taken together;
    in row-major order. The last dimension goes first: that is where `sweep` cuts most."""
    dims = lo.shape[1]
    for d in range(dims - 1, -1, -1):
        rest = [side[:, e] for e in range(dims) if e != d for side in (lo, hi)]
        order = np.lexsort((lo[:, d], *rest, label))
        lo, hi, label = lo[order], hi[order], label[order]
        others = [column[order] for column in rest]
        goes_on = (label[1:] == label[:-1]) & (lo[1:, d] == hi[:-1, d])
        for column in others:
            goes_on &= column[1:] == column[:-1]
        first = np.flatnonzero(np.append(True, ~goes_on)[: len(label)])
        last = np.append(first[1:], len(label))[: len(first)] - 1
        far = hi[last, d]
        lo, hi, label = lo[first], hi[first], label[first]
        hi[:, d] = far
    order = np.lexsort(lo.T[::-1])
    return lo[order], hi[order], label[order]


def meeting(lo: Ints, hi: Ints, other_lo: Ints, other_hi: Ints) -> tuple[Ints, Ints]:
    """Which boxes ``lo``, ``hi`` (A, D) have a common element with which of the others (B, D): pairs, two sorted
    columns (M,).

    Raises Tangled where there are more than `MEETINGS`, or more than `CANDIDATES` have to be looked at.
    """
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    runs = _candidates((lo, hi), (other_lo, other_hi), both=True)
    swept = _swept_instead(runs, np.concatenate([lo, other_lo]), np.concatenate([hi, other_hi]))
    blocks = (pair for run in runs for pair in run.pairs()) if swept is None else _shared(swept, len(lo))
    for mine, other in blocks:
        real = _common(lo[mine], hi[mine], other_lo[other], other_hi[other])
        found.append((mine[real], other[real]))
        if sum(len(pair[0]) for pair in found) > MEETINGS:
            raise Tangled(f"at most {MEETINGS} boxes that both sides have in common", "more")
    mine, other = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((other, mine))
    return mine[order], other[order]


def apart(lo: Ints, hi: Ints) -> bool:
    """Whether no two of the boxes ``lo``, ``hi`` (B, D) have a common element. Raises Tangled as `meeting` does."""
    runs = _candidates((lo, hi), (lo, hi), both=False)
    swept = _swept_instead(runs, lo, hi)
    if swept is not None:
        return not len(swept.cell) or int(np.bincount(swept.cell).max()) == 1
    for run in runs:
        for a, b in run.pairs():
            if (_common(lo[a], hi[a], lo[b], hi[b]) & (a != b)).any():
                return False
    return True


def gap(lo: Ints, hi: Ints, others_lo: Ints, others_hi: Ints) -> Box:
    """A box inside ``lo``, ``hi`` (D,) that none of the others (B, D) has; there must be one. Where few of them meet
    it, it is the first of what `difference` leaves, which takes all too long where many do. Raises Tangled as `sweep`
    does."""
    near = ((others_lo < hi) & (others_hi > lo)).all(axis=1)
    low, high = np.maximum(others_lo[near], lo), np.minimum(others_hi[near], hi)
    if len(low) <= _FEW:
        others = [Box(tuple(a), tuple(b)) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        return difference(Box(tuple(lo.tolist()), tuple(hi.tolist())), others)[0]
    swept = sweep(np.concatenate([lo[None], low]), np.concatenate([hi[None], high]))
    at = int(np.flatnonzero(np.bincount(swept.cell) == 1)[0])
    return Box(tuple(swept.lo[at].tolist()), tuple(swept.hi[at].tolist()))


def _shared(swept: Swept, count: int) -> Iterator[tuple[Ints, Ints]]:
    """Pairs of one of the first ``count`` boxes and one of the others that are in a cell together, once each."""
    mine = swept.box < count
    first, last = (np.searchsorted(swept.cell[~mine], swept.cell[mine], side=side) for side in ("left", "right"))
    run, place = ragged(last - first)
    others = max(int(swept.box.max(initial=count)) + 1 - count, 1)
    pairs = distinct(swept.box[mine][run] * others + swept.box[~mine][first[run] + place] - count)
    yield pairs // others, pairs % others


def _common(lo: Ints, hi: Ints, other_lo: Ints, other_hi: Ints) -> Bools:
    found: Bools = np.all(np.maximum(lo, other_lo) < np.minimum(hi, other_hi), axis=1)
    return found


class _Runs(NamedTuple):
    """Of each box, ``many`` others from place ``first`` on in ``order`` begin in it. ``swapped``: these are mine, and
    the boxes are the others."""

    order: Ints
    first: Ints
    many: Ints
    swapped: bool

    def pairs(self) -> Iterator[tuple[Ints, Ints]]:
        """Boxes and the others, in blocks of about `_BLOCK` pairs."""
        block = (np.cumsum(self.many) - self.many) // _BLOCK
        edges = np.flatnonzero(np.append(True, block[1:] != block[:-1])[: len(block)]).tolist()
        for start, stop in zip(edges, [*edges[1:], len(block)][: len(edges)], strict=True):
            run, place = ragged(self.many[start:stop])
            found = start + run, self.order[self.first[start + run] + place]
            yield found[::-1] if self.swapped else found


def _begin_in(lo: Ints, hi: Ints, other: Ints, swapped: bool) -> _Runs:
    order = np.argsort(other, kind="stable")
    first = np.searchsorted(other[order], lo, side="right" if swapped else "left")
    return _Runs(order, first, np.maximum(np.searchsorted(other[order], hi) - first, 0), swapped)


def _candidates(mine: tuple[Ints, Ints], others: tuple[Ints, Ints], both: bool) -> list[_Runs]:
    """Pairs of boxes that meet along the dimension along which fewest do: the other begins in mine, or, with ``both``,
    mine after the other in the other."""
    found = []
    for d in range(mine[0].shape[1]):
        runs = [_begin_in(mine[0][:, d], mine[1][:, d], others[0][:, d], swapped=False)]
        runs += [_begin_in(others[0][:, d], others[1][:, d], mine[0][:, d], swapped=True)] if both else []
        found.append(runs)
    return min(found, key=_total, default=[])


def _total(runs: list[_Runs]) -> int:
    return sum(int(run.many.sum()) for run in runs)


def _swept_instead(runs: list[_Runs], lo: Ints, hi: Ints) -> Swept | None:
    """The sweep of all boxes where there are many candidates, and it is possible. Raises Tangled where neither is."""
    if (total := _total(runs)) <= _LOOK:
        return None
    try:
        return sweep(lo, hi)
    except Tangled:
        if total > CANDIDATES:
            raise
        return None
