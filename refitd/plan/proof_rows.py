"""Prove one rank's rows from the layouts: each walks the box that it claims, in a piece of its sender and in one of its
receiver, and what the rank receives fills its pieces once. Nothing of how the rows were made is used."""

from __future__ import annotations

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Bools, Ints
from refitd.plan.classes import Classes
from refitd.plan.expand import Deliveries, PieceIndex
from refitd.plan.laid import Laid
from refitd.plan.ranksets import ends, product, ragged, stable_order
from refitd.plan.rows import Ends, Rows


def prove_rows(ends_: Ends, work: Deliveries, rows: Rows, rank: int, whole: bool) -> None:
    """Raise ProofError unless the rows of ``rank`` are right. ``whole``: nothing that it needs is there already.

    Rows that follow each other and differ only in their tensor and their addresses are looked at as one.
    """
    classes = ends_.classes
    target = _Side(classes.destination, ends_.destination, classes.dst)
    source = _Side(classes.source, ends_.source, classes.src)
    head, run = _runs(rows, target, source)
    heads = rows.take(head)
    place = _places(heads, target.strides[heads.dst_piece])
    held = work.held[heads.delivery].astype(bool)
    ends_of = (
        (target, np.ones(len(head), dtype=bool), rows.dst_piece, work.dst, 4),
        (source, ~held, rows.src_piece, work.src, 0),
        (target, held, rows.src_piece, work.src, 0),
    )
    for side, mine, piece, owner, column in ends_of:
        side.prove(heads, np.flatnonzero(mine), piece[head], owner[heads.delivery], column, place)
        side.prove_starts(rows, np.flatnonzero(mine[run]), piece, column)
    received = np.flatnonzero(work.dst[rows.delivery] == rank)
    _prove_once(target, rows, received)
    if whole:
        _prove_filled(classes, target, rows, received, rank)


def _runs(rows: Rows, target: _Side, source: _Side) -> tuple[Ints, Ints]:
    """The first row of every run of like rows, and the run of every row."""
    same = np.ones(max(len(rows.want) - 1, 0), dtype=bool)
    table = rows.table
    columns = [rows.delivery, rows.src_piece, rows.dst_piece, *rows.lo.T, *rows.hi.T, *table.T[[2, 3, 6, 7, 8, 9]],
               target.combo(rows.want), source.combo(rows.want)]  # fmt: skip
    for column in columns:
        same &= column[1:] == column[:-1]
    fresh = np.append(True, ~same)[: len(rows.want)]
    return np.flatnonzero(fresh), np.cumsum(fresh) - 1


def _fail(wrong: Bools, what: str) -> None:
    if wrong.any():
        raise ProofError(f"{int(wrong.sum())} rows {what}; the first is row {int(wrong.argmax())}")


class _Side:
    def __init__(self, laid: Laid, index: PieceIndex, tensor: Ints) -> None:
        self.laid, self.tensor, self.base = laid, tensor, index.form_base
        self.part, self.lo, self.hi, self.offset, self.strides = index.columns
        self.slot = np.concatenate([np.zeros(0, np.int64), *(form.piece_slot for form in laid.forms)])
        self.first = ends(np.array([len(slots) for slots in laid.slots], np.int64))
        self.ranks = np.concatenate([np.zeros(0, np.int64), *laid.slots])

    def combo(self, want: Ints) -> Ints:
        """How the tensors of these wants are laid out."""
        return self.laid.combo[self.tensor[want]]

    def prove(self, rows: Rows, mine: Ints, piece: Ints, rank: Ints, column: int, place: tuple[Ints, Ints]) -> None:
        """Rows ``mine`` walk their box in ``piece`` of ``rank``; ``column``: where that end begins in the table."""
        piece, lo, hi, combo = piece[mine], rows.lo[mine], rows.hi[mine], self.combo(rows.want[mine])
        form = self.laid.form[combo]
        _fail((piece < self.base[form]) | (piece >= self.base[form + 1]), "name a piece of another tensor")
        _fail(self.ranks[self.first[combo] + self.slot[piece]] != rank[mine], "name a piece of another rank")
        outside = (lo < self.lo[piece]) | (hi > self.hi[piece]) | (lo >= hi)
        _fail(np.any(outside, axis=1), "fill a box outside their piece")
        down, across = rows.table[mine, column + 2 : column + 3], rows.table[mine, column + 3 : column + 4]
        walked = place[0][mine] * down + place[1][mine] * across
        _fail(np.any((hi - lo > 1) & (walked != self.strides[piece]), axis=1), "walk another lattice than their box")

    def prove_starts(self, rows: Rows, mine: Ints, piece: Ints, column: int) -> None:
        """Rows ``mine`` start at the first element of their box, in the storage of their piece."""
        piece, tensor = piece[mine], self.tensor[rows.want[mine]]
        at = self.laid.rows[self.laid.first[tensor] + self.part[piece]]
        instances = self.laid.side.instances
        start = instances[at, 4] + self.offset[piece]
        for d in range(self.lo.shape[1]):
            start += (rows.lo[mine, d] - self.lo[piece, d]) * self.strides[piece, d]
        table = rows.table
        wrong = (table[mine, column] != instances[at, 3]) | (table[mine, column + 1] != start)
        _fail(wrong, "start at another element than they claim")

    def volume(self) -> Ints:
        """Elements of every piece."""
        return product(self.hi - self.lo)


def _places(rows: Rows, strides: Ints) -> tuple[Ints, Ints]:
    """Rows and columns that one step along each dimension of the box advances, (N, D) each.

    Dimensions are the digits of a mixed radix number, by the destination's ``strides``: the smallest first fills the
    columns. Fails where the digits do not fill rows and columns exactly.
    """
    shape, size = rows.hi - rows.lo, rows.table[:, 8:]
    down, across = np.zeros_like(shape), np.zeros_like(shape)
    filled, lines = np.ones(len(shape), np.int64), np.ones(len(shape), np.int64)
    each, order = np.arange(len(shape)), np.argsort(strides, axis=1, kind="stable")
    for d in range(shape.shape[1]):
        axis = order[:, d]
        extent = shape[each, axis]
        column = filled * extent <= size[:, 1]
        across[each, axis] = np.where(column, filled, 0)
        down[each, axis] = np.where(column, 0, lines)
        filled = np.where(column, filled * extent, filled)
        lines = np.where(column, lines, lines * extent)
    _fail((filled != size[:, 1]) | (lines != size[:, 0]), "have other rows and columns than their box")
    return down, across


def _prove_once(target: _Side, rows: Rows, received: Ints) -> None:
    """No address of the rank is written twice: dense rows follow each other; others are compared as boxes."""
    storage, offset, down, across = rows.table[received, 4:8].T
    height, width = rows.table[received, 8:].T
    last = offset + (height - 1) * down + (width - 1) * across
    order = stable_order(offset)
    order = order[stable_order(storage[order])]
    follows = (storage[order[1:]] != storage[order[:-1]]) | (offset[order[1:]] > last[order[:-1]])
    if follows.all() and (last - offset + 1 == height * width).all():
        return
    piece, want = rows.dst_piece[received], rows.want[received]
    key = want * len(target.lo) + piece
    number = np.searchsorted(np.unique(key), key)
    lo, hi = rows.lo[received] - target.lo[piece], rows.hi[received] - target.lo[piece]
    _boxes_apart(number, lo, hi)


def _boxes_apart(number: Ints, lo: Ints, hi: Ints) -> None:
    """Boxes of equal ``number`` have no common element: along one dimension after the other, or else one by one."""
    order = np.lexsort((*lo.T[::-1], number))
    number, lo, hi = number[order], lo[order], hi[order]
    starts = np.flatnonzero(np.append(True, number[1:] != number[:-1])[: len(number)])
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(number)], strict=True):
        a, b = lo[start:stop], hi[start:stop]
        common = (np.maximum(a[:, None], a[None]) < np.minimum(b[:, None], b[None])).all(axis=2)
        if common.sum() != stop - start:
            raise ProofError("two rows fill one element")


def _prove_filled(classes: Classes, target: _Side, rows: Rows, received: Ints, rank: int) -> None:
    """Every piece of the rank gets as many elements as it has."""
    laid = classes.destination
    got = np.zeros(len(laid.tensor), np.int64)
    np.add.at(got, classes.dst[rows.want[received]], product(rows.table[received, 8:]))
    combo = np.repeat(np.arange(len(laid.form)), [len(laid.forms[f].piece_slot) for f in laid.form.tolist()])
    piece, _ = ragged(np.array([len(laid.forms[f].piece_slot) for f in laid.form.tolist()], np.int64))
    number = target.base[laid.form[piece]] + _
    mine = target.ranks[target.first[combo] + target.slot[number]] == rank
    due = np.zeros(len(laid.form), np.int64)
    np.add.at(due, combo[mine], target.volume()[number[mine]])
    _fail(got != due[laid.combo], "tensors do not get what they need (by tensor)")
