"""Prove a plan from the layouts alone: every needed element is written once, from a rank that has it, inside bounds.

Nothing of how the plan was made is trusted. Each move claims a box and two pieces. The proof checks that (1) the claim
is true: the box lies in both pieces, and the move's strides walk exactly that box in both views; (2) the boxes of a
destination piece, with what it holds already, cover it once; (3) the sender has the box when it sends it; (4) buckets
partition the moves, and links, stages, dtypes and sizes are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from refitd.errors import ProofError
from refitd.layout import Box
from refitd.layout.box import Bools, Ints, difference
from refitd.layout.check import last_addresses
from refitd.layout.dtypes import ITEMSIZE, cast_allowed
from refitd.plan.buckets import link_of
from refitd.plan.held import Held
from refitd.plan.moves import Moves
from refitd.plan.program import Bucket
from refitd.plan.tables import MEMBER, NEIGHBOUR, SOURCE, Table


def prove(table: Table, moves: Moves, buckets: Sequence[Bucket], held: Mapping[str, Held], bucket_bytes: int) -> None:
    """Raise ProofError unless the plan is right."""
    _claims(table, moves)
    _views(table, moves, moves.src, 0)
    _views(table, moves, moves.dst, 4)
    owned = _owned(table, held)
    _cover(table, moves, owned)
    _senders(table, moves, owned)
    _buckets(table, moves, buckets, bucket_bytes)


def _fail(moves: Moves, wrong: Bools, what: str) -> None:
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise ProofError(f"{int(wrong.sum())} moves {what}; the first is move {first}: {moves.table[first].tolist()}")


def _claims(table: Table, moves: Moves) -> None:
    for rows in (moves.src, moves.dst):
        if len(rows) and (rows.min() < 0 or rows.max() >= len(table.rank)):
            raise ProofError("a move names a piece that does not exist")
        outside = (moves.lo < table.lo[rows]) | (moves.hi > table.hi[rows]) | (moves.lo >= moves.hi)
        _fail(moves, np.any(outside, axis=1), "fill a box outside their piece")
    group = np.searchsorted(table.start, np.arange(len(table.rank)), side="right")
    _fail(moves, group[moves.src] != group[moves.dst], "join two different tensors")


def _views(table: Table, moves: Moves, rows: Ints, side: int) -> None:
    """The move starts at the box's first element, and each step of the box is a whole number of rows and columns."""
    storage, offset, stride0, stride1 = moves.table[:, side : side + 4].T
    strides = table.strides[rows]
    start = table.base[rows] + ((moves.lo - table.lo[rows]) * strides).sum(axis=1)
    _fail(moves, (storage != table.storage[rows]) | (offset != start), "start at another element than they claim")
    numel = np.array([ref.numel for ref in table.storages], np.int64)
    lo = np.zeros((len(rows), 2), np.int64)
    last = last_addresses(offset, lo, moves.table[:, 8:], np.stack([stride0, stride1], axis=1))
    _fail(moves, (offset < 0) | (last >= numel[storage]), "leave their storage")
    place = _places(table, moves)
    walked = place[:, 0] * stride0[:, None] + place[:, 1] * stride1[:, None]
    real = moves.hi - moves.lo > 1
    _fail(moves, (real & (walked != strides)).any(axis=1), "walk another lattice than their box")


def _places(table: Table, moves: Moves) -> Ints:
    """How many rows and columns one step along each dimension of the box advances, (M, 2, D).

    Dimensions fill the columns first, by destination stride, then the rows, as digits of a mixed radix number do: so
    every element of the box is met once. Fails where the digits do not fill rows and columns exactly.
    """
    shape = moves.hi - moves.lo
    order = np.argsort(table.strides[moves.dst], axis=1, kind="stable")
    cols, rows = moves.table[:, 9], moves.table[:, 8]
    across, down = np.ones_like(cols), np.ones_like(rows)
    place = np.zeros((len(shape), 2, shape.shape[1]), np.int64)
    each = np.arange(len(shape))
    for d in range(shape.shape[1]):
        at = order[:, d]
        extent = shape[each, at]
        column = across * extent <= cols
        place[each, 0, at] = np.where(column, 0, down)
        place[each, 1, at] = np.where(column, across, 0)
        across = np.where(column, across * extent, across)
        down = np.where(column, down, down * extent)
    _fail(moves, (across != cols) | (down != rows), "have other rows and columns than their box")
    return place


def _owned(table: Table, held: Mapping[str, Held]) -> dict[int, list[Box]]:
    """Disjoint boxes of what each member row holds already."""
    owned: dict[int, list[Box]] = {}
    members = np.flatnonzero((table.role() == MEMBER) & (table.name >= 0))
    for row in members.tolist() if held else ():
        known = held.get(table.ranks[int(table.rank[row])].key)
        boxes = known.boxes.get(table.names[int(table.name[row])], ()) if known else ()
        if boxes:
            piece = _row_box(table, row, len(boxes[0].lo))
            owned[row] = [common for box in _apart(boxes) if (common := box.intersect(piece))]
    return owned


def _row_box(table: Table, row: int, dims: int) -> Box:
    return Box(tuple(table.lo[row, :dims].tolist()), tuple(table.hi[row, :dims].tolist()))


def _apart(boxes: Sequence[Box]) -> list[Box]:
    result: list[Box] = []
    for box in boxes:
        result += difference(box, result)
    return result


def _cover(table: Table, moves: Moves, owned: Mapping[int, Sequence[Box]]) -> None:
    """Boxes cover their piece exactly once: their corners, signed by parity, cancel against the piece's corners."""
    _fail(moves, table.role()[moves.dst] != MEMBER, "write to a rank that receives nothing")
    pieces = np.flatnonzero(table.role() == MEMBER)
    width = table.lo.shape[1]
    spare = [_padded(box, width) for row in owned for box in owned[row]]
    held = np.array(spare, np.int64).reshape(len(spare), 2, width)
    held_rows = np.array([row for row in owned for _ in owned[row]], np.int64)
    row = np.concatenate([moves.dst, held_rows, pieces])
    lo = np.concatenate([moves.lo, held[:, 0], table.lo[pieces]]) - table.lo[row]
    hi = np.concatenate([moves.hi, held[:, 1], table.hi[pieces]]) - table.lo[row]
    sign = np.ones(len(row), np.int64)
    sign[len(row) - len(pieces) :] = -1
    bad = _uncancelled(row, lo, hi, table.hi[row] - table.lo[row] + 1, sign)
    if len(bad):
        piece = int(bad[0])
        key, name = table.ranks[int(table.rank[piece])].key, table.names[int(table.name[piece])]
        raise ProofError(f"{len(bad)} pieces are not written exactly once; the first is {name} on {key}")


def _padded(box: Box, width: int) -> list[list[int]]:
    spare = width - len(box.lo)
    return [[*box.lo, *(0,) * spare], [*box.hi, *(1,) * spare]]


def _uncancelled(row: Ints, lo: Ints, hi: Ints, radix: Ints, sign: Ints) -> Ints:
    code, signs = np.zeros((len(row), 1), np.int64), sign[:, None]
    for d in range(lo.shape[1]):
        if (hi[:, d] == 1).all():
            continue
        code = code * radix[:, d : d + 1]
        code = np.concatenate([code + lo[:, d : d + 1], code + hi[:, d : d + 1]], axis=1)
        signs = np.concatenate([signs, -signs], axis=1)
    rows, codes, signs = np.repeat(row, code.shape[1]), code.ravel(), signs.ravel()
    order = np.lexsort((codes, rows))
    rows, codes = rows[order], codes[order]
    fresh = np.append(True, (rows[1:] != rows[:-1]) | (codes[1:] != codes[:-1]))
    starts = np.flatnonzero(fresh[: len(rows)])
    if not len(starts):
        return starts
    return np.unique(rows[starts[np.add.reduceat(signs[order], starts) != 0]])


def _senders(table: Table, moves: Moves, owned: Mapping[int, Sequence[Box]]) -> None:
    """Stage 0 reads sources. Stage 1 reads neighbours, or what a member of the node holds or got in stage 0."""
    role = table.role()[moves.src]
    _fail(moves, (moves.stage == 0) != (role == SOURCE), "read from a rank that has nothing yet")
    _fail(moves, (moves.stage < 0) | (moves.stage > 1), "belong to no stage")
    dtype_src, dtype_dst = table.dtype[moves.src], table.dtype[moves.dst]
    _fail(moves, (moves.stage == 1) & (dtype_src != dtype_dst), "cast twice")
    count = len(table.dtypes)
    allowed = np.array([[cast_allowed(a, b) for b in table.dtypes] for a in table.dtypes], bool).reshape(count, count)
    _fail(moves, ~allowed[dtype_src, dtype_dst], "cast in a way that is not allowed")
    _have_landed(moves, np.flatnonzero((moves.stage == 1) & (role != NEIGHBOUR)), owned)


def _have_landed(moves: Moves, passed_on: Ints, owned: Mapping[int, Sequence[Box]]) -> None:
    landed: dict[tuple[int, int], list[Box]] = {}
    lo, hi, chunk = moves.lo.tolist(), moves.hi.tolist(), moves.chunk.tolist()
    src, dst = moves.src.tolist(), moves.dst.tolist()
    for move in np.flatnonzero(moves.stage == 0).tolist() if len(passed_on) else ():
        landed.setdefault((dst[move], chunk[move]), []).append(Box(tuple(lo[move]), tuple(hi[move])))
    seen: set[tuple[int, int, Box]] = set()
    for move in passed_on.tolist():
        box = Box(tuple(lo[move]), tuple(hi[move]))
        claim = (src[move], chunk[move], box)
        if claim in seen:
            continue
        seen.add(claim)
        have = [
            *landed.get(claim[:2], ()),
            *(Box(*map(tuple, _padded(b, len(box.lo)))) for b in owned.get(src[move], ())),
        ]
        if difference(box, have):
            raise ProofError(f"move {move} passes on {box} of a piece that has not landed there")


def _buckets(table: Table, moves: Moves, buckets: Sequence[Bucket], bucket_bytes: int) -> None:
    rank_src, rank_dst = table.rank[moves.src].tolist(), table.rank[moves.dst].tolist()
    stages, elements = moves.stage.tolist(), (moves.table[:, 8] * moves.table[:, 9]).tolist()
    dtype_src, dtype_dst = table.dtype[moves.src].tolist(), table.dtype[moves.dst].tolist()
    at = 0
    for number, bucket in enumerate(buckets):
        span = range(bucket.first, bucket.last)
        facts = {(rank_src[m], rank_dst[m], stages[m], dtype_src[m], dtype_dst[m]) for m in span}
        if bucket.id != number or bucket.first != at or len(facts) != 1:
            raise ProofError(f"bucket {bucket.id} is not the next run of moves over one edge")
        src, dst, stage, _, dtype = facts.pop()
        nbytes = sum(elements[m] for m in span) * ITEMSIZE[table.dtypes[dtype]]
        expected = (table.ranks[src].key, table.ranks[dst].key, link_of(table, src, dst), stage, nbytes)
        if bucket[1:6] != expected or nbytes > bucket_bytes:
            raise ProofError(f"bucket {bucket.id} says {bucket[1:6]} and carries {expected}")
        at = bucket.last
    if at != len(stages):
        raise ProofError(f"{len(stages) - at} moves are in no bucket")
