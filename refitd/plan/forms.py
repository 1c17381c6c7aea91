"""Forms: how one tensor lies over ranks, its boxes cut into atoms that every rank holds whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from refitd.layout.box import Bools, Ints, coarsen, grid
from refitd.layout.side import Pattern
from refitd.plan.cells import GRID, Tangled, apart, corners, grid_size, joined, meeting, sweep
from refitd.plan.ranksets import ends, product, ragged


class Form(NamedTuple):
    """One or more patterns of one tensor, laid side by side: slots of the next follow those of the one before.

    Atoms ``lo``, ``hi`` (A, D) are disjoint and cover all boxes. Atom a is in the pieces ``piece[first[a]:first[a +
    1]]`` at ``slot``. Pieces: ``piece_part`` the pattern that they are from, ``piece_slot``, ``piece_lo``,
    ``piece_hi``, ``piece_strides`` (P, D), ``piece_offset``. A scalar has one dimension of extent 1.
    """

    shape: tuple[int, ...]
    dtype: str
    slots: int
    lo: Ints
    hi: Ints
    first: Ints
    slot: Ints
    piece: Ints
    piece_part: Ints
    piece_slot: Ints
    piece_lo: Ints
    piece_hi: Ints
    piece_offset: Ints
    piece_strides: Ints


def make_form(patterns: Sequence[Pattern]) -> Form:
    """The form of patterns that agree on shape and dtype. Raises Tangled where their boxes cut each other into too many
    atoms."""
    shape = patterns[0].shape
    dims = max(len(shape), 1)
    slot_base = ends(np.array([p.slots for p in patterns], np.int64))
    columns = [_pieces(pattern, part, int(slot_base[part]), dims) for part, pattern in enumerate(patterns)]
    part, slot, lo, hi, offset, strides = (np.concatenate(column) for column in zip(*columns, strict=True))
    try:
        atom_lo, atom_hi, atom, piece = atoms(lo, hi)
    except Tangled as error:
        raise error.of(shape) from None
    order = np.lexsort((piece, slot[piece], atom))
    atom, piece = atom[order], piece[order]
    first = ends(np.bincount(atom, minlength=len(atom_lo)))
    return Form(
        shape, patterns[0].dtype, int(slot_base[-1]), atom_lo, atom_hi, first, slot[piece], piece,
        part, slot, lo, hi, offset, strides,
    )  # fmt: skip


def _pieces(pattern: Pattern, part: int, base: int, dims: int) -> tuple[Ints, ...]:
    count = len(pattern.slot)
    if pattern.shape:
        boxes, strides = pattern.boxes[pattern.box], pattern.strides
    else:
        boxes = np.tile(np.array([[0], [1]], np.int64), (count, 1, 1))
        strides = np.zeros((count, 1), np.int64)
    real = (boxes[:, 0] < boxes[:, 1]).all(axis=1)
    lo, hi = boxes[real, 0].reshape(-1, dims), boxes[real, 1].reshape(-1, dims)
    return (
        np.full(int(real.sum()), part, np.int64), pattern.slot[real] + base, lo, hi, pattern.offset[real],
        strides[real].reshape(-1, dims),
    )  # fmt: skip


def atoms(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Atoms of pieces ``lo``, ``hi`` (P, D): their lo and hi (A, D); which atom lies in which piece, as two columns.

    Raises Tangled where there are too many.
    """
    if not len(lo):
        return lo, hi, np.zeros(0, np.int64), np.zeros(0, np.int64)
    boxes, number = unique_rows(np.concatenate([lo, hi], axis=1))
    dims = lo.shape[1]
    low, high = boxes[:, :dims], boxes[:, dims:]
    if apart(low, high):
        return low, high, number, np.arange(len(lo))
    low, high, atom, box = _small(low, high) if grid_size(low, high) <= GRID else _swept(low, high)
    order = np.argsort(number, kind="stable")
    first = ends(np.bincount(number, minlength=len(boxes)))
    run, place = ragged(first[box + 1] - first[box])
    return low, high, atom[run], order[first[box[run]] + place]


def _small(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Atoms of distinct boxes, and which atom lies in which box, by the grid that the boxes cut."""
    cells = grid(lo, hi)
    _, label = unique_rows(np.packbits(cells.inside, axis=1).astype(np.int64))
    low, high = corners(coarsen(cells.cuts, label)[0])
    within: Bools = np.ones((len(low), len(lo)), dtype=bool)
    for d in range(lo.shape[1]):
        within &= (low[:, None, d] >= lo[None, :, d]) & (high[:, None, d] <= hi[None, :, d])
    used = within.any(axis=1)
    atom, box = np.nonzero(within[used])
    return low[used], high[used], atom, box


def _swept(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """The same where that grid is too large."""
    swept = sweep(lo, hi)
    sets = swept.sets()
    low, high, label = joined(swept.lo, swept.hi, sets.label)
    atom, place = ragged((sets.first[1:] - sets.first[:-1])[label])
    return low, high, atom, sets.box[sets.first[label[atom]] + place]


def unique_rows(table: Ints) -> tuple[Ints, Ints]:
    """Distinct rows in lexicographic order, and the number of each row."""
    order = np.lexsort(table.T[::-1])
    ordered = table[order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(fresh) - 1
    return ordered[fresh], number


class Cells(NamedTuple):
    """What two forms have in common: boxes ``lo``, ``hi`` (C, D) inside source atom ``src`` and destination atom
    ``dst``."""

    src: Ints
    dst: Ints
    lo: Ints
    hi: Ints

    def volume(self) -> Ints:
        """Elements of each cell."""
        return product(self.hi - self.lo)


def overlap(source: Form, destination: Form) -> Cells:
    """The cells of two forms of one shape, by destination atom, then source atom. Raises Tangled where there are too
    many."""
    try:
        dst, src = meeting(destination.lo, destination.hi, source.lo, source.hi)
    except Tangled as error:
        raise error.of(source.shape) from None
    lo, hi = np.maximum(destination.lo[dst], source.lo[src]), np.minimum(destination.hi[dst], source.hi[src])
    return Cells(src, dst, lo, hi)
