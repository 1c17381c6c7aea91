"""Lines: all bytes that one set of ranks holds and another needs, as one run that can be cut anywhere.

A line is the concatenation of its *entries*: a cell (the common box of a source and a destination atom) of every tensor
of a class. The unit of order is the *grain*: one tensor's cell, or an even part of it where few tensors are large.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.layout.dtypes import ITEMSIZE
from refitd.plan.classes import Classes
from refitd.plan.laid import DTYPES
from refitd.plan.ranksets import product, ragged, stable_order

PARTS = 20  # grains into which a large cell is cut at most; a class of as many tensors needs no cutting
_LARGE = 256 * 1024  # bytes; smaller cells are one grain
_ROW = 4096  # bytes; a cut inside a cell falls on the edge of a slice of at most this
_STEP = 512  # bytes; a cut inside a row that is larger than that falls on a multiple
_ITEM = np.array([ITEMSIZE[dtype] for dtype in DTYPES], np.int64)


class Lines(NamedTuple):
    """L lines: ``holders``, ``needers`` (numbers of sets of ranks), ``dtypes`` (source * 64 + destination), ``nbytes``.

    Entries of line l are ``first[l]:first[l + 1]`` of the columns: ``entry_class``, ``entry_cell`` (number over all
    pairs), ``cell_bytes`` in the destination's dtype, ``parts`` (grains of one cell, along ``axis``), ``grains`` (of
    all tensors of the class), ``unit`` (bytes at whose multiples a cell may be cut).
    """

    holders: Ints
    needers: Ints
    dtypes: Ints
    nbytes: Ints
    first: Ints
    entry_class: Ints
    entry_cell: Ints
    cell_bytes: Ints
    parts: Ints
    axis: Ints
    grains: Ints
    unit: Ints

    def entry_line(self) -> Ints:
        """The line of each entry."""
        return np.repeat(np.arange(len(self.holders)), self.first[1:] - self.first[:-1])

    def grain_bytes(self) -> Ints:
        """Bytes of one grain of each entry."""
        return self.cell_bytes // self.parts


def make_lines(classes: Classes) -> Lines:
    """Entries of all classes, sorted into lines."""
    cells = classes.cell_first[1:] - classes.cell_first[:-1]
    entry_class, place = ragged(cells[classes.pair])
    cell = classes.cell_first[classes.pair[entry_class]] + place
    source, destination = classes.source, classes.destination
    holders = source.holders[source.atom[classes.src_combo[entry_class]] + classes.src_atom[cell]]
    needers = destination.holders[destination.atom[classes.dst_combo[entry_class]] + classes.dst_atom[cell]]
    src_dtype, dst_dtype = classes.dtypes()
    dtypes = (src_dtype * 64 + dst_dtype)[entry_class]
    order, starts = _sorted((holders, needers, dtypes))
    entry_class, cell = entry_class[order], cell[order]
    head = order[starts]
    count = classes.sizes()[entry_class]
    item = _ITEM[dst_dtype[entry_class]]
    extent = classes.hi - classes.lo
    nbytes = product(extent)[cell] * item
    axis = (extent > 1).argmax(axis=1)[cell]
    parts = _parts(count, nbytes, np.take_along_axis(extent, (extent > 1).argmax(axis=1)[:, None], axis=1)[cell, 0])
    first = np.append(starts, len(order)).astype(np.int64)
    total = np.add.reduceat(nbytes * count, starts) if len(starts) else np.zeros(0, np.int64)
    unit = _units(extent[cell], item)
    return Lines(
        holders[head], needers[head], dtypes[head], total, first, entry_class, cell, nbytes, parts, axis,
        count * parts, unit,
    )  # fmt: skip


def _sorted(columns: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    """The order of rows by these columns, stable, and where the first of equal rows are in it."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    order = stable_order(code)
    code = code[order]
    return order, np.flatnonzero(np.append(True, code[1:] != code[:-1])[: len(code)])


def _parts(count: Ints, nbytes: Ints, extent: Ints) -> Ints:
    """Even parts of each cell: as many as bring a class of few large tensors to `PARTS` grains, or as near as may
    be."""
    parts = np.ones(len(count), np.int64)
    open_ = np.flatnonzero((count < PARTS) & (nbytes >= _LARGE))
    for number in range(2, PARTS + 1):
        even = open_[extent[open_] % number == 0]
        parts[even] = number
        open_ = open_[count[open_] * parts[open_] < PARTS]
    return parts


def _units(extent: Ints, item: Ints) -> Ints:
    """Bytes of the largest slice of each box that has at most `_ROW` bytes; `_STEP` where even a row has more."""
    unit = product(extent) * item
    for d in range(extent.shape[1]):
        unit = np.where(unit > _ROW, product(extent[:, d + 1 :]) * item, unit)
    last = np.maximum(extent[:, -1], 1) * item
    return np.where((unit < last) & (last > _ROW), _STEP, unit)
