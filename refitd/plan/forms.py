"""Forms: how one tensor lies over ranks, its boxes cut into atoms that every rank holds whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from refitd.layout.box import Bools, Ints, coarsen, grid
from refitd.layout.side import Pattern
from refitd.plan.ranksets import ends, product

_BLOCK = 512  # boxes compared with all others at a time


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
    """The form of patterns that agree on shape and dtype."""
    shape = patterns[0].shape
    dims = max(len(shape), 1)
    slot_base = ends(np.array([p.slots for p in patterns], np.int64))
    columns = [_pieces(pattern, part, int(slot_base[part]), dims) for part, pattern in enumerate(patterns)]
    part, slot, lo, hi, offset, strides = (np.concatenate(column) for column in zip(*columns, strict=True))
    atom_lo, atom_hi, atom, piece = _atoms(lo, hi)
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


def _atoms(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Atoms, and which atom (by number) lies in which piece, as two columns."""
    if not len(lo):
        return lo, hi, np.zeros(0, np.int64), np.zeros(0, np.int64)
    boxes, number = unique_rows(np.concatenate([lo, hi], axis=1))
    dims = lo.shape[1]
    low, high = boxes[:, :dims], boxes[:, dims:]
    if apart(low, high):
        return low, high, number, np.arange(len(lo))
    cells = grid(low, high)
    _, label = unique_rows(np.packbits(cells.inside, axis=1).astype(np.int64))
    cuts, label = coarsen(cells.cuts, label)
    low, high = _corners(cuts)
    within: Bools = np.all((low[:, None] >= lo[None]) & (high[:, None] <= hi[None]), axis=2)
    used = within.any(axis=1)
    atom, piece = np.nonzero(within[used])
    return low[used], high[used], atom, piece


def _corners(cuts: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    low = np.meshgrid(*[cut[:-1] for cut in cuts], indexing="ij")
    high = np.meshgrid(*[cut[1:] for cut in cuts], indexing="ij")
    return np.stack([a.ravel() for a in low], axis=1), np.stack([a.ravel() for a in high], axis=1)


def unique_rows(table: Ints) -> tuple[Ints, Ints]:
    """Distinct rows in lexicographic order, and the number of each row."""
    order = np.lexsort(table.T[::-1])
    ordered = table[order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(fresh) - 1
    return ordered[fresh], number


def apart(lo: Ints, hi: Ints) -> bool:
    """Whether no two of the boxes ``lo``, ``hi`` (B, D) have a common element."""
    if len(lo) < 2:
        return True
    for d in range(lo.shape[1]):
        order = np.argsort(lo[:, d], kind="stable")
        if (hi[order[:-1], d] <= lo[order[1:], d]).all():
            return True
    for start in range(0, len(lo), _BLOCK):
        a, b = lo[start : start + _BLOCK, None], hi[start : start + _BLOCK, None]
        common: Bools = np.all(np.maximum(a, lo[None]) < np.minimum(b, hi[None]), axis=2)
        common[np.arange(len(common)), start + np.arange(len(common))] = False
        if common.any():
            return False
    return True


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
    """The cells of two forms of one shape, by destination atom, then source atom."""
    dst = np.repeat(np.arange(len(destination.lo)), len(source.lo))
    src = np.tile(np.arange(len(source.lo)), len(destination.lo))
    lo = np.maximum(destination.lo[:, None], source.lo[None]).reshape(-1, destination.lo.shape[1])
    hi = np.minimum(destination.hi[:, None], source.hi[None]).reshape(-1, destination.lo.shape[1])
    real = (lo < hi).all(axis=1)
    return Cells(src[real], dst[real], lo[real], hi[real])
