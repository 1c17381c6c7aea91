"""Prove one rank's rows from the layouts: each walks the box that it claims, in a piece of its sender and in one of its
receiver, and what the rank receives fills its pieces once. Nothing of how the rows were made is used."""

from __future__ import annotations

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Bools, Ints
from refitd.plan.ends import Ends
from refitd.plan.expand import Deliveries
from refitd.plan.rows import Rows, Walks


def prove_rows(ends: Ends, work: Deliveries, rows: Rows, order: Ints, rank: int, whole: bool) -> None:
    """Raise ProofError unless the rows of ``rank`` are right. ``order``: rows by destination storage and offset, which
    is proven too; ``whole``: nothing that the rank needs is there already.

    What rows of many tensors have in common is looked at once; which tensor each is of, and where it begins, in every
    row.
    """
    walks, head = rows.walks, _heads(rows)
    place = _places(walks, ends.strides[walks.dst_piece])
    held = np.where(work.held[walks.delivery] > 0, ends.wants, 0)
    source = walks.src_piece, work.src, walks.steps[:, :2], rows.src_storage, rows.src_offset
    target = walks.dst_piece, work.dst, walks.steps[:, 2:4], rows.dst_storage, rows.dst_offset
    for (piece, owner, steps, storage, offset), side in ((source, held), (target, np.full_like(held, ends.wants))):
        tensor = rows.want + side[rows.walk]
        if len(rows.want) and (rows.want.min() < 0 or rows.want.max() >= ends.wants):
            raise ProofError("a row is of no tensor")
        combo = ends.combo[tensor]
        _fail(combo != combo[head][rows.walk], "are of tensors that are laid out in other ways than those beside them")
        _prove_walks(ends, walks, piece, combo[head], owner[walks.delivery], steps, place)
        _prove_starts(ends, rows, tensor, piece, storage, offset)
    received = work.dst[walks.delivery] == rank
    _prove_once(ends, rows, order[received[rows.walk[order]]], int(received[rows.walk].sum()))
    if whole:
        _prove_filled(ends, rows, received, rank)


def _heads(rows: Rows) -> Ints:
    """A row of each walk."""
    head = np.full(len(rows.walks.delivery), -1, np.int64)
    head[rows.walk] = np.arange(len(rows.walk))
    _fail(head < 0, "are missing: nobody walks a box (by walk)")
    return head


def _fail(wrong: Bools, what: str) -> None:
    if wrong.any():
        raise ProofError(f"{int(wrong.sum())} rows {what}; the first is row {int(wrong.argmax())}")


def _prove_walks(
    ends: Ends, walks: Walks, piece: Ints, combo: Ints, rank: Ints, steps: Ints, place: tuple[Ints, Ints]
) -> None:
    """Tensors laid out by ``combo`` have ``piece`` on ``rank``, and the walks' steps walk their boxes in it."""
    form, lo, hi = ends.form[combo], walks.lo, walks.hi
    _fail((piece < ends.base[form]) | (piece >= ends.base[form + 1]), "name a piece of another tensor (by walk)")
    _fail(ends.ranks[ends.first_slot[combo] + ends.slot[piece]] != rank, "name a piece of another rank (by walk)")
    outside = (lo < ends.lo[piece]) | (hi > ends.hi[piece]) | (lo >= hi)
    _fail(np.any(outside, axis=1), "fill a box outside their piece (by walk)")
    walked = place[0] * steps[:, :1] + place[1] * steps[:, 1:]
    wrong = (hi - lo > 1) & (walked != ends.strides[piece])
    _fail(np.any(wrong, axis=1), "walk another lattice than their box (by walk)")


def _prove_starts(ends: Ends, rows: Rows, tensor: Ints, piece: Ints, storage: Ints, offset: Ints) -> None:
    """Rows start at the first element of their box, in the storage of their tensor's piece."""
    within = ends.offset[piece]
    for d in range(ends.lo.shape[1]):
        within = within + (rows.walks.lo[:, d] - ends.lo[piece, d]) * ends.strides[piece, d]
    at = ends.instance[tensor] + ends.part[piece][rows.walk]
    wrong = (storage != ends.storage[at]) | (offset != ends.address[at] + within[rows.walk])
    _fail(wrong, "start at another element than they claim")


def _places(walks: Walks, strides: Ints) -> tuple[Ints, Ints]:
    """Rows and columns that one step along each dimension of the box advances, (S, D) each.

    Dimensions are the digits of a mixed radix number, by the destination's ``strides``: the smallest first fills the
    columns. Fails where the digits do not fill rows and columns exactly.
    """
    shape, size = walks.hi - walks.lo, walks.steps[:, 4:]
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
    _fail((filled != size[:, 1]) | (lines != size[:, 0]), "have other rows and columns than their box (by walk)")
    return down, across


def _prove_once(ends: Ends, rows: Rows, order: Ints, count: int) -> None:
    """The ``count`` rows that the rank receives, in ``order``, write no address twice. Dense rows that follow each
    other do not, whatever put them in order; others are compared as boxes."""
    if len(order) != count:
        raise ProofError("rows are missing where they are put in order")
    walks, walk = rows.walks, rows.walk[order]
    reach = ((walks.steps[:, 4:] - 1) * walks.steps[:, 2:4]).sum(axis=1)
    storage, offset = rows.dst_storage[order], rows.dst_offset[order]
    last = (offset + reach[walk])[:-1]
    follows = (storage[1:] > storage[:-1]) | ((storage[1:] == storage[:-1]) & (offset[1:] > last))
    if follows.all() and (reach + 1 == walks.volume())[walk].all():
        return
    if len(np.unique(order)) != count:
        raise ProofError("rows are there twice where they are put in order")
    piece = walks.dst_piece[walk]
    key = rows.want[order] * len(ends.lo) + piece
    number = np.searchsorted(np.unique(key), key)
    _boxes_apart(number, walks.lo[walk] - ends.lo[piece], walks.hi[walk] - ends.lo[piece])


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


def _prove_filled(ends: Ends, rows: Rows, received: Bools, rank: int) -> None:
    """Every piece of the rank gets as many elements as it has."""
    got = np.zeros(ends.wants, np.int64)
    np.add.at(got, rows.want, np.where(received, rows.walks.volume(), 0)[rows.walk])
    combo, piece, holder = ends.held
    mine = np.flatnonzero(holder == rank)
    due = np.zeros(len(ends.form), np.int64)
    np.add.at(due, combo[mine], ends.volume[piece[mine]])
    _fail(got != due[ends.combo[ends.wants :]], "tensors do not get what they need (by tensor)")
