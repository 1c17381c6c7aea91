"""From boxes of tensors to rows of a program: strided two-dimensional moves between two storages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.ends import Ends
from refitd.plan.expand import Deliveries, Grains, divide
from refitd.plan.moves import Merged, merge
from refitd.plan.ranksets import product, ragged


class Walks(NamedTuple):
    """What rows of many tensors have in common, S of them: the ``delivery``; the box ``lo``, ``hi`` (S, D) and the
    pieces that it goes between (numbers of `Ends`); and ``steps`` (S, 6): strides over rows and columns at the source,
    the same at the destination, rows, columns."""

    delivery: Ints
    lo: Ints
    hi: Ints
    src_piece: Ints
    dst_piece: Ints
    steps: Ints

    def volume(self) -> Ints:
        """Elements that a row moves."""
        return self.steps[:, 4] * self.steps[:, 5]


class Rows(NamedTuple):
    """Moves of a program, before they are put in order. Row n does ``walks`` number ``walk[n]`` with the tensor
    ``want[n]``, from and to where that lies: storages of the side that the end is on, and offsets in them."""

    walks: Walks
    walk: Ints
    want: Ints
    phase: Ints
    stage: Ints
    src_storage: Ints
    src_offset: Ints
    dst_storage: Ints
    dst_offset: Ints

    def table(self, at: Ints, src: Ints, dst: Ints) -> Ints:
        """The rows ``at`` with `MOVE_COLUMNS`, (n, 10). ``src``, ``dst``: numbers of their storages."""
        steps, none = self.walks.steps, np.zeros((len(self.walks.steps), 2), np.int64)
        table = np.concatenate([none, steps[:, :2], none, steps[:, 2:]], axis=1)[self.walk[at]]
        table[:, 0], table[:, 1], table[:, 4], table[:, 5] = src, self.src_offset[at], dst, self.dst_offset[at]
        return table


def make_rows(ends: Ends, work: Deliveries, grains: Grains) -> Rows:
    """The rows of these grains."""
    held = work.held[grains.delivery] > 0
    source = np.where(held, ends.target_atom(grains.entry), ends.source_atom(grains.entry))
    source = ends.find(source, work.src[grains.delivery])
    target = ends.find(ends.target_atom(grains.entry), work.dst[grains.delivery])
    index, lo, hi, (level, inner, outer) = _shallow(grains.lo, grains.hi, ends.strides[source], ends.strides[target])
    source, target, held = source[index], target[index], held[index]
    rows = np.where(level >= 2, outer[:, 0], 1)
    steps = np.stack([outer[:, 1], inner[:, 1], outer[:, 2], inner[:, 2], rows, inner[:, 0]], axis=1)
    walks = Walks(grains.delivery[index], lo, hi, source, target, steps)
    count = np.bincount(grains.box_unit[index], minlength=int(grains.unit.max(initial=-1)) + 1)
    row, place = _repeated(count, grains.unit)
    walk, want = (np.cumsum(count) - count)[grains.unit[row]] + place, grains.want[row]
    src = _placed(ends, want + np.where(held, ends.wants, 0)[walk], source, lo, walk)
    dst = _placed(ends, want + ends.wants, target, lo, walk)
    return Rows(walks, walk, want, grains.phase[row], grains.stage[row], *src, *dst)


def limited(grains: Grains, itemsize: Ints, most: int) -> Grains:
    """Boxes of more than ``most`` bytes in parts of at most that. ``itemsize`` (boxes,): of the destination's dtype."""
    extent = grains.hi - grains.lo
    volume, room = product(extent), np.maximum(most // itemsize, 1)
    large = np.flatnonzero(volume > room)
    step = _step(extent[large], room[large])
    at, place = ragged(-(-volume[large] // step))
    start = place * step[at]
    return divide(grains, large[at], start, np.minimum(start + step[at], volume[large[at]]))


def _step(extent: Ints, most: Ints) -> Ints:
    """Elements, at most ``most``: whole slices of the outermost dimension whose slices are small enough."""
    inner, step = product(extent), np.zeros(len(extent), np.int64)
    for column in extent.T:
        inner = inner // column
        step = np.where((step == 0) & (inner <= most), most - most % inner, step)
    return np.where(step == 0, most, step)


def _repeated(count: Ints, unit: Ints) -> tuple[Ints, Ints]:
    """Each grain once for each walk of its unit: the grain, and which of the walks."""
    if (count == 1).all():
        return np.arange(len(unit)), np.zeros(len(unit), np.int64)
    return ragged(count[unit])


def _placed(ends: Ends, tensor: Ints, piece: Ints, lo: Ints, walk: Ints) -> tuple[Ints, Ints]:
    """Storages and offsets of the rows ``tensor``, ``walk`` that begin at ``lo`` in ``piece``."""
    at = ends.instance[tensor] + ends.part[piece][walk]
    start = ends.offset[piece] + ((lo - ends.lo[piece]) * ends.strides[piece]).sum(axis=1)
    return ends.storage[at], ends.address[at] + start[walk]


def _shallow(lo: Ints, hi: Ints, src_strides: Ints, dst_strides: Ints) -> tuple[Ints, Ints, Ints, Merged]:
    """Boxes cut until each is two-dimensional in both views: (which box each is from, lo, hi), in order; and how."""
    index = np.arange(len(lo))
    while True:
        merged = merge(hi - lo, src_strides[index], dst_strides[index])
        deep = merged[0] > 2
        if not deep.any():
            return index, lo, hi, merged
        shape = hi - lo
        axis = np.where(shape > 1, dst_strides[index], -1).argmax(axis=1)
        count = np.where(deep, np.take_along_axis(shape, axis[:, None], axis=1)[:, 0], 1)
        run, step = ragged(count)
        index, lo, hi = index[run], lo[run], hi[run]
        cut = np.flatnonzero(deep[run])
        lo[cut, axis[run[cut]]] += step[cut]
        hi[cut, axis[run[cut]]] = lo[cut, axis[run[cut]]] + 1
