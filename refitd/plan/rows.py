"""From boxes of tensors to rows of a program: strided two-dimensional moves between two storages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.canon import Ranks
from refitd.plan.classes import Classes
from refitd.plan.expand import Deliveries, Grains, PieceIndex, range_boxes
from refitd.plan.laid import Laid
from refitd.plan.lines import Lines
from refitd.plan.moves import merge
from refitd.plan.ranksets import product, ragged


class Rows(NamedTuple):
    """Moves of a program, before they are put in order. ``table`` (N, 10) has `MOVE_COLUMNS`; the storage columns are
    storages of the side that the end is on. ``want``, ``lo``, ``hi`` (N, D): the box that a move fills; ``src_piece``,
    ``dst_piece``: the pieces that it goes between, numbers of `PieceIndex`."""

    table: Ints
    delivery: Ints
    phase: Ints
    stage: Ints
    want: Ints
    lo: Ints
    hi: Ints
    src_piece: Ints
    dst_piece: Ints

    def take(self, at: Ints) -> Rows:
        """The rows of these numbers."""
        return Rows(*(column[at] for column in self))


class Ends(NamedTuple):
    """What a program is made from: both sides, and where their pieces are."""

    classes: Classes
    lines: Lines
    ranks: Ranks
    source: PieceIndex
    destination: PieceIndex


def make_rows(ends: Ends, work: Deliveries, grains: Grains) -> Rows:
    """The rows of these boxes."""
    unit, first = _units(grains)
    held = work.held[grains.delivery[first]].astype(bool)
    source, destination = _pieces(ends, work, grains, first, held)
    columns = [
        np.where(held[:, None] if a.ndim == 2 else held, b, a) for a, b in zip(*_at(ends, source, held), strict=True)
    ]
    target = [column[destination] for column in ends.destination.columns]
    box = grains.lo[first], grains.hi[first]
    index, lo, hi = _shallow(*box, columns[4], target[4])
    shape = hi - lo
    level, inner, outer = merge(shape, columns[4][index], target[4][index])
    start = columns[3][index] + ((lo - columns[1][index]) * columns[4][index]).sum(axis=1)
    stop = target[3][index] + ((lo - target[1][index]) * target[4][index]).sum(axis=1)
    rows = np.where(level >= 2, outer[:, 0], 1)
    counts = np.bincount(index, minlength=len(first))
    row, place = ragged(counts[unit])
    at = (np.cumsum(counts) - counts)[unit[row]] + place
    want = grains.want[row]
    src_storage, src_base = _instance(ends, want, columns[0][index[at]], held[index[at]])
    dst_storage, dst_base = _placed(ends.classes.destination, ends.classes.dst[want], target[0][index[at]])
    table = np.stack([
        src_storage, src_base + start[at], outer[at, 1], inner[at, 1],
        dst_storage, dst_base + stop[at], outer[at, 2], inner[at, 2], rows[at], inner[at, 0],
    ], axis=1)  # fmt: skip
    return Rows(
        table, grains.delivery[row], grains.phase[row], grains.stage[row], want, lo[at], hi[at], source[index[at]],
        destination[index[at]],
    )  # fmt: skip


def limited(grains: Grains, itemsize: Ints, most: int) -> Grains:
    """Boxes of more than ``most`` bytes in parts of at most that. ``itemsize`` (grains,): of the destination's
    dtype."""
    volume = product(grains.hi - grains.lo)
    large = np.flatnonzero(volume * itemsize > most)
    if not len(large):
        return grains
    pieces: list[tuple[int, list[int], list[int]]] = []
    for at in large.tolist():
        lo, hi = grains.lo[at].tolist(), grains.hi[at].tolist()
        step, total = _step(lo, hi, max(most // int(itemsize[at]), 1)), int(volume[at])
        for start in range(0, total, step):
            pieces += [(at, *box) for box in range_boxes(lo, hi, start, min(start + step, total))]
    keep = np.flatnonzero(volume * itemsize <= most)
    index = np.concatenate([keep, np.array([p[0] for p in pieces], np.int64)])
    lo_, hi_ = (np.array([p[i] for p in pieces], np.int64) for i in (1, 2))
    rows = Grains(*(column[index] for column in grains))
    return rows._replace(lo=np.concatenate([grains.lo[keep], lo_]), hi=np.concatenate([grains.hi[keep], hi_]))


def _step(lo: list[int], hi: list[int], most: int) -> int:
    """Elements, at most ``most``: whole slices of the outermost dimension whose slices are small enough."""
    inner = 1
    for a, b in zip(lo, hi, strict=True):
        inner *= b - a
    for a, b in zip(lo, hi, strict=True):
        inner //= b - a
        if inner <= most:
            return most - most % inner
    return most


def _units(grains: Grains) -> tuple[Ints, Ints]:
    """Runs of grains of one delivery and box: the run of each grain, and the first grain of each run."""
    fresh = np.ones(len(grains.entry), dtype=bool)
    same = (grains.delivery[1:] == grains.delivery[:-1]) & (grains.entry[1:] == grains.entry[:-1])
    for column in (*grains.lo.T, *grains.hi.T):
        same &= column[1:] == column[:-1]
    fresh[1:] = ~same
    return np.cumsum(fresh) - 1, np.flatnonzero(fresh)


def _pieces(ends: Ends, work: Deliveries, grains: Grains, first: Ints, held: Ints) -> tuple[Ints, Ints]:
    """The source and destination piece of each unit."""
    classes, lines = ends.classes, ends.lines
    delivery, entry = grains.delivery[first], grains.entry[first]
    number, cell = lines.entry_class[entry], lines.entry_cell[entry]
    needs = classes.destination.atom[classes.dst_combo[number]] + classes.dst_atom[cell]
    holds = classes.source.atom[classes.src_combo[number]] + classes.src_atom[cell]
    source = np.zeros(len(first), np.int64)
    source[~held] = ends.source.find(holds[~held], work.src[delivery[~held]])
    source[held] = ends.destination.find(needs[held], work.src[delivery[held]])
    return source, ends.destination.find(needs, work.dst[delivery])


def _at(ends: Ends, piece: Ints, held: Ints) -> tuple[list[Ints], list[Ints]]:
    """Columns of the pieces on the source side (where not held), and on the destination side (where held)."""
    return tuple(  # type: ignore[return-value]
        [column[np.where(mine, piece, 0)] if len(column) else np.zeros((len(piece), *column.shape[1:]), np.int64)
         for column in index.columns]
        for index, mine in ((ends.source, ~held), (ends.destination, held))
    )  # fmt: skip


def _instance(ends: Ends, want: Ints, part: Ints, held: Ints) -> tuple[Ints, Ints]:
    classes = ends.classes
    storage, base = np.zeros(len(want), np.int64), np.zeros(len(want), np.int64)
    for laid, tensor, mine in ((classes.source, classes.src, ~held), (classes.destination, classes.dst, held)):
        at = np.flatnonzero(mine)
        storage[at], base[at] = _placed(laid, tensor[want[at]], part[at])
    return storage, base


def _placed(laid: Laid, tensor: Ints, part: Ints) -> tuple[Ints, Ints]:
    """Storage and base of a part of tensors (rows of `Laid`)."""
    rows = laid.rows[laid.first[tensor] + part]
    return laid.side.instances[rows, 3], laid.side.instances[rows, 4]


def _shallow(lo: Ints, hi: Ints, src_strides: Ints, dst_strides: Ints) -> tuple[Ints, Ints, Ints]:
    """Boxes cut until each is two-dimensional in both views: (which box each is from, lo, hi), in order."""
    index = np.arange(len(lo))
    while True:
        deep = merge(hi - lo, src_strides[index], dst_strides[index])[0] > 2
        if not deep.any():
            return index, lo, hi
        shape = hi - lo
        axis = np.where(shape > 1, dst_strides[index], -1).argmax(axis=1)
        count = np.where(deep, np.take_along_axis(shape, axis[:, None], axis=1)[:, 0], 1)
        run, step = ragged(count)
        index, lo, hi = index[run], lo[run], hi[run]
        cut = np.flatnonzero(deep[run])
        lo[cut, axis[run[cut]]] += step[cut]
        hi[cut, axis[run[cut]]] = lo[cut, axis[run[cut]]] + 1
