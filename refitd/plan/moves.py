"""Boxes seen through two strided views to 2-D moves: merge the dimensions that run on, cut the ones that are left."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.route import Transfers
from refitd.plan.tables import Table


class Moves(NamedTuple):
    """``table`` (M, 10) with the columns of a move (storages index the plan's), and of each: the piece rows at both
    ends, the box that it fills (M, D), stage and chunk."""

    table: Ints
    src: Ints
    dst: Ints
    lo: Ints
    hi: Ints
    stage: Ints
    chunk: Ints

    def take(self, order: Ints) -> Moves:
        """The moves in another order."""
        return Moves(*(column[order] for column in self))


def expand(table: Table, transfers: Transfers) -> Moves:
    """2-D moves of all transfers."""
    sets = _outer_cut(table, transfers)
    shape = sets.hi - sets.lo
    src_strides, dst_strides = table.strides[sets.src], table.strides[sets.dst]
    offset = table.base[sets.src] + ((sets.lo - table.lo[sets.src]) * src_strides).sum(axis=1)
    target = table.base[sets.dst] + ((sets.lo - table.lo[sets.dst]) * dst_strides).sum(axis=1)
    level, inner, outer = merge(shape, src_strides, dst_strides)
    rows = np.where(level >= 2, outer[:, 0], 1)
    columns = (table.storage[sets.src], offset, outer[:, 1], inner[:, 1], table.storage[sets.dst], target, outer[:, 2],
               inner[:, 2], rows, inner[:, 0])  # fmt: skip
    return Moves(np.stack(columns, axis=1), sets.src, sets.dst, sets.lo, sets.hi, sets.stage, sets.chunk)


def _order(shape: Ints, dst_strides: Ints) -> Ints:
    """Dimensions by destination stride, smallest first; those of extent 1 last."""
    return np.argsort(np.where(shape > 1, dst_strides, np.int64(1) << 62), axis=1, kind="stable")


Merged = tuple[Ints, Ints, Ints]


def merge(shape: Ints, src_strides: Ints, dst_strides: Ints) -> Merged:
    """Boxes (M, D) in two views as (level, inner, outer): how many merged dimensions there are; (extent, source stride,
    destination stride) of the innermost two, (M, 3) each."""
    order = _order(shape, dst_strides)
    count = len(shape)
    level = np.zeros(count, np.int64)
    inner = np.tile(np.array([1, 1, 1], np.int64), (count, 1))
    outer = np.tile(np.array([1, 0, 0], np.int64), (count, 1))
    for d in range(shape.shape[1]):
        at = order[:, d : d + 1]
        dim = np.concatenate([np.take_along_axis(a, at, axis=1) for a in (shape, src_strides, dst_strides)], axis=1)
        real = dim[:, 0] > 1
        current = np.where((level == 1)[:, None], inner, outer)
        joins = real & (level > 0) & (dim[:, 1:] == current[:, :1] * current[:, 1:]).all(axis=1)
        inner[:, 0] *= np.where(joins & (level == 1), dim[:, 0], 1)
        outer[:, 0] *= np.where(joins & (level == 2), dim[:, 0], 1)
        opens = real & ~joins
        inner = np.where((opens & (level == 0))[:, None], dim, inner)
        outer = np.where((opens & (level == 1))[:, None], dim, outer)
        level += opens
    return level, inner, outer


def _outer_cut(table: Table, transfers: Transfers) -> Transfers:
    """Cut boxes that do not merge to two dimensions at their outermost dimension until all do."""
    while True:
        shape = transfers.hi - transfers.lo
        src_strides, dst_strides = table.strides[transfers.src], table.strides[transfers.dst]
        deep = merge(shape, src_strides, dst_strides)[0] > 2
        if not deep.any():
            return transfers
        real = np.where(shape > 1, dst_strides, -1)
        axis = np.where(deep, real.argmax(axis=1), 0)
        count = np.where(deep, np.take_along_axis(shape, axis[:, None], axis=1)[:, 0], 1)
        rows = np.repeat(np.arange(len(count)), count)
        step = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        transfers = Transfers(*(column[rows] for column in transfers))
        cut = np.flatnonzero(deep[rows])
        at = axis[rows][cut]
        transfers.lo[cut, at] += step[cut]
        transfers.hi[cut, at] = transfers.lo[cut, at] + 1
