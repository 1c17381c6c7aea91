"""Prove one rank's rows from the layouts: each walks the box that it claims, in a piece of its sender and in one of its
receiver, and what the rank receives fills its pieces once. Nothing of how the rows were made is used."""

from __future__ import annotations

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Bools, Ints
from refitd.plan.classes import Classes
from refitd.plan.expand import Deliveries, PieceIndex
from refitd.plan.laid import Laid
from refitd.plan.ranksets import ends, ragged
from refitd.plan.rows import Ends, Rows


def prove_rows(ends_: Ends, work: Deliveries, rows: Rows, rank: int, whole: bool) -> None:
    """Raise ProofError unless the rows of ``rank`` are right. ``whole``: nothing that it needs is there already."""
    classes = ends_.classes
    held = work.held[rows.delivery].astype(bool)
    src, dst = work.src[rows.delivery], work.dst[rows.delivery]
    target = _Side(classes.destination, ends_.destination, classes.dst)
    source = _Side(classes.source, ends_.source, classes.src)
    strides = target.strides[rows.dst_piece]
    target.prove(rows, np.arange(len(held)), rows.dst_piece, dst, rows.table[:, 4:8], strides)
    for side, mine in ((source, np.flatnonzero(~held)), (target, np.flatnonzero(held))):
        side.prove(rows, mine, rows.src_piece, src, rows.table[:, :4], strides)
    received = np.flatnonzero(dst == rank)
    _prove_once(target, rows, received)
    if whole:
        _prove_filled(classes, target, rows, received, rank)


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

    def prove(self, rows: Rows, mine: Ints, piece: Ints, rank: Ints, table: Ints, order: Ints) -> None:
        """Rows ``mine`` walk their box in ``piece`` of ``rank``. ``table``: storage, offset, strides; ``order``: the
        destination's strides (rows, D)."""
        if not len(mine):
            return
        piece, want, lo, hi = piece[mine], rows.want[mine], rows.lo[mine], rows.hi[mine]
        tensor = self.tensor[want]
        combo = self.laid.combo[tensor]
        form = self.laid.form[combo]
        _fail((piece < self.base[form]) | (piece >= self.base[form + 1]), "name a piece of another tensor")
        _fail(self.ranks[self.first[combo] + self.slot[piece]] != rank[mine], "name a piece of another rank")
        outside = (lo < self.lo[piece]) | (hi > self.hi[piece]) | (lo >= hi)
        _fail(outside.any(axis=1), "fill a box outside their piece")
        at = self.laid.side.instances[self.laid.rows[self.laid.first[tensor] + self.part[piece]]]
        strides = self.strides[piece]
        start = at[:, 4] + self.offset[piece] + ((lo - self.lo[piece]) * strides).sum(axis=1)
        storage, offset, down, across = table[mine].T
        _fail((storage != at[:, 3]) | (offset != start), "start at another element than they claim")
        place = _places(rows, mine, rows.table[mine, 8:], order[mine])
        walked = place[0] * down[:, None] + place[1] * across[:, None]
        _fail(((hi - lo > 1) & (walked != strides)).any(axis=1), "walk another lattice than their box")

    def volume(self) -> Ints:
        """Elements of every piece."""
        return (self.hi - self.lo).prod(axis=1)


def _places(rows: Rows, mine: Ints, size: Ints, strides: Ints) -> tuple[Ints, Ints]:
    """Rows and columns that one step along each dimension of the box advances, (N, D) each.

    Dimensions are the digits of a mixed radix number, by the destination's strides: the smallest first fills the
    columns. Fails where the digits do not fill rows and columns exactly.
    """
    shape = rows.hi[mine] - rows.lo[mine]
    down, across = np.zeros_like(shape), np.zeros_like(shape)
    filled, lines = np.ones(len(mine), np.int64), np.ones(len(mine), np.int64)
    each = np.arange(len(mine))
    order = np.argsort(strides, axis=1, kind="stable")
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
    order = np.lexsort((offset, storage))
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
    np.add.at(got, classes.dst[rows.want[received]], rows.table[received, 8:].prod(axis=1))
    combo = np.repeat(np.arange(len(laid.form)), [len(laid.forms[f].piece_slot) for f in laid.form.tolist()])
    piece, _ = ragged(np.array([len(laid.forms[f].piece_slot) for f in laid.form.tolist()], np.int64))
    number = target.base[laid.form[piece]] + _
    mine = target.ranks[target.first[combo] + target.slot[number]] == rank
    due = np.zeros(len(laid.form), np.int64)
    np.add.at(due, combo[mine], target.volume()[number[mine]])
    _fail(got != due[laid.combo], "tensors do not get what they need (by tensor)")
