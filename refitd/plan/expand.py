"""From a rank's segments to boxes of tensors: which grains, of which tensor, seen through which two pieces."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Ints
from refitd.plan.canon import Ranks
from refitd.plan.classes import Classes, pad
from refitd.plan.cutting import Cutting
from refitd.plan.flows import NEAR_FABRIC, NEAR_PEER
from refitd.plan.laid import Laid
from refitd.plan.lines import PARTS, Lines
from refitd.plan.ranksets import SetTable, ends, product, ragged
from refitd.plan.relays import hops


class Deliveries(NamedTuple):
    """Bytes ``start`` to ``stop`` of the span of a ``parcel`` from rank ``src`` to rank ``dst``.

    ``spread`` is 1 where ``src`` is the rank through which they entered; ``held`` is 0 where ``src`` reads its source
    tensors, 1 where it passes on what it received.
    """

    parcel: Ints
    start: Ints
    stop: Ints
    src: Ints
    dst: Ints
    link: Ints
    spread: Ints
    held: Ints

    def take(self, at: Ints) -> Deliveries:
        """The deliveries of these numbers."""
        return Deliveries(*(column[at] for column in self))


def deliveries(cutting: Cutting, sets: SetTable, ranks: Ranks, rank: int) -> Deliveries:
    """All that ``rank`` sends or receives: its segments, and what it passes on to, or gets from, others of its sets."""
    parcel, start, stop, src, dst = cutting.segments
    flows, relay = cutting.parcels.flows, cutting.parcels.relay
    mine = np.flatnonzero((src == rank) | (dst == rank))
    first = Deliveries(
        parcel[mine], start[mine], stop[mine], src[mine], dst[mine], flows.link[parcel[mine]],
        np.zeros(len(mine), np.int64),
        (relay[parcel[mine]] > 0).astype(np.int64),
    )  # fmt: skip
    has = np.zeros(len(sets.first) - 1, dtype=bool)
    has[sets.owner()[sets.member == rank]] = True
    has &= sets.size() > 1
    near = np.flatnonzero(has[flows.needers[parcel]])
    passed = [_passed(cutting, sets, ranks, near[dst[near] != rank], rank)]
    passed += [_passed(cutting, sets, ranks, near[dst[near] == rank], -1)]
    return Deliveries(*(np.concatenate(column) for column in zip(first, *passed, strict=True)))


def _passed(cutting: Cutting, sets: SetTable, ranks: Ranks, at: Ints, to: int) -> Deliveries:
    """Segments ``at`` passed on by their receivers: to rank ``to``, or to all others of their sets where that is -1."""
    parcel, start, stop, _, entry = (column[at] for column in cutting.segments)
    needers = cutting.parcels.flows.needers[parcel]
    if to >= 0:
        run, dst = np.arange(len(at)), np.full(len(at), to, np.int64)
    else:
        run, place = ragged(sets.size()[needers])
        dst = sets.member[sets.first[needers[run]] + place]
        others = dst != entry[run]
        run, dst = run[others], dst[others]
    src = entry[run]
    link = np.where(ranks.node[src] == ranks.node[dst], NEAR_PEER, NEAR_FABRIC)
    ones = np.ones(len(run), np.int64)
    return Deliveries(parcel[run], start[run], stop[run], src, dst, link, ones, ones)


class Grains(NamedTuple):
    """Rows of boxes: ``delivery``; ``want`` (number in `Classes`); the box ``lo``, ``hi`` (N, D); ``phase`` of the
    order; ``stage``: 0 from holders, 2 for each hop of a chain of relays, and 1 more where it is spread inside a
    domain."""

    delivery: Ints
    entry: Ints
    want: Ints
    phase: Ints
    stage: Ints
    lo: Ints
    hi: Ints


def expand(lines: Lines, classes: Classes, cutting: Cutting, part: Ints, work: Deliveries) -> Grains:
    """The boxes of all deliveries. ``part`` (lines,): the thousandths that go by relay."""
    spans, flows = cutting.spans, cutting.parcels.flows
    span = cutting.parcels.span[work.parcel]
    base = spans.offset[spans.first[span]]
    low = np.searchsorted(spans.offset, base + work.start, side="right") - 1
    high = np.searchsorted(spans.offset, base + work.stop, side="left")
    run, place = ragged(high - low)
    row = low[run] + place
    keep = spans.length[row] > 0
    run, row = run[keep], row[keep]
    entry = spans.entry[row]
    size = lines.grain_bytes()[entry]
    begin = np.maximum(base[run] + work.start[run] - spans.offset[row], 0)
    end = np.minimum(base[run] + work.stop[run], spans.offset[row + 1]) - spans.offset[row]
    first, last = begin // size, -(-end // size)
    unit, step = ragged(last - first)
    grain = first[unit] + step
    place = spans.grain[row[unit]] + grain
    parcel = work.parcel[run[unit]]
    entry, size = entry[unit], size[unit]
    turn = lines.grains[entry] * flows.place[parcel] // flows.of[parcel]
    number = (place + turn) % lines.grains[entry]
    tensor, slice_ = np.divmod(number, lines.parts[entry])
    cell = lines.entry_cell[entry]
    lo, hi = _part(lines, classes, entry, cell, slice_)
    want = classes.first[lines.entry_class[entry]] + tensor
    stage = work.spread[run[unit]].copy()
    late = np.flatnonzero(cutting.parcels.relay[parcel] == 1)
    stage[late] += 2 * hops(lines, part, flows, parcel[late], entry[late], place[late])
    whole = Grains(run[unit], entry, want, place * PARTS // lines.grains[entry], stage, lo, hi)
    item = lines.cell_bytes[entry] // product(classes.hi - classes.lo)[cell]
    inner = np.maximum(begin[unit] - grain * size, 0) // item, np.minimum(end[unit] - grain * size, size) // item
    return _cut_inside(whole, inner[0], inner[1], size // item)


def _part(lines: Lines, classes: Classes, entry: Ints, cell: Ints, part: Ints) -> tuple[Ints, Ints]:
    lo, hi = classes.lo[cell], classes.hi[cell]
    several = np.flatnonzero(lines.parts[entry] > 1)
    axis = lines.axis[entry[several]]
    step = (hi[several, axis] - lo[several, axis]) // lines.parts[entry[several]]
    lo[several, axis] += step * part[several]
    hi[several, axis] = lo[several, axis] + step
    return lo, hi


def _cut_inside(grains: Grains, start: Ints, stop: Ints, elements: Ints) -> Grains:
    """Replace boxes of which only the elements ``start`` to ``stop`` (row-major) are meant by the boxes of those."""
    partial = np.flatnonzero((start > 0) | (stop < elements))
    if not len(partial):
        return grains
    pieces = [
        (at, lo, hi)
        for at, a, b in zip(partial.tolist(), start[partial].tolist(), stop[partial].tolist(), strict=True)
        for lo, hi in range_boxes(grains.lo[at].tolist(), grains.hi[at].tolist(), a, b)
    ]
    keep = np.ones(len(start), dtype=bool)
    keep[partial] = False
    at = np.concatenate([np.flatnonzero(keep), np.array([p[0] for p in pieces], np.int64)])
    dims = grains.lo.shape[1]
    lo, hi = (np.array([p[i] for p in pieces], np.int64).reshape(len(pieces), dims) for i in (1, 2))
    kept = grains.lo[keep], grains.hi[keep]
    rows = Grains(*(column[at] for column in grains))
    return rows._replace(lo=np.concatenate([kept[0], lo]), hi=np.concatenate([kept[1], hi]))


def range_boxes(lo: list[int], hi: list[int], start: int, stop: int) -> list[tuple[list[int], list[int]]]:
    """Boxes of the elements ``start`` to ``stop`` (row-major) of a box."""
    if start >= stop:
        return []
    if not lo or (len(lo) == 1 and start == 0 and stop == hi[0] - lo[0]):
        return [(lo, hi)]
    inner = 1
    for a, b in zip(lo[1:], hi[1:], strict=True):
        inner *= b - a
    first, last = -(-start // inner), stop // inner

    def within(row: int, a: int, b: int) -> list[tuple[list[int], list[int]]]:
        parts = range_boxes(lo[1:], hi[1:], a, b)
        return [([lo[0] + row, *low], [lo[0] + row + 1, *high]) for low, high in parts]

    if first > last:
        return within(last, start - last * inner, stop - last * inner)
    head = within(first - 1, start - (first - 1) * inner, inner) if start % inner else []
    body = [([lo[0] + first, *lo[1:]], [lo[0] + last, *hi[1:]])] if first < last else []
    return head + body + (within(last, 0, stop - last * inner) if stop % inner else [])


class PieceIndex:
    """Which piece of a rank an atom lies in."""

    def __init__(self, laid: Laid) -> None:
        self._laid = laid

    @cached_property
    def _codes(self) -> tuple[Ints, Ints, int]:
        laid = self._laid
        top = max([1, *(int(slots.max(initial=0)) + 1 for slots in laid.slots)])
        codes, pieces = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        base = self.form_base
        for combo, number in enumerate(laid.form.tolist()):
            form = laid.forms[number]
            atom = np.repeat(np.arange(len(form.lo)), form.first[1:] - form.first[:-1]) + laid.atom[combo]
            codes.append(atom * top + laid.slots[combo][form.slot])
            pieces.append(form.piece + base[number])
        joined = np.concatenate(codes)
        order = np.argsort(joined, kind="stable")
        return joined[order], np.concatenate(pieces)[order], top

    @cached_property
    def form_base(self) -> Ints:
        """Where the pieces of each form begin among those of all forms."""
        return ends(np.array([len(form.piece_lo) for form in self._laid.forms], np.int64))

    @cached_property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Of the pieces of all forms: part, lo, hi, offset, strides."""
        forms = self._laid.forms
        dims = max([1, *(form.lo.shape[1] for form in forms)])
        none = np.zeros(0, np.int64)
        return (
            np.concatenate([none, *(form.piece_part for form in forms)]),
            np.concatenate([np.zeros((0, dims), np.int64), *(pad(form.piece_lo, dims, 0) for form in forms)]),
            np.concatenate([np.zeros((0, dims), np.int64), *(pad(form.piece_hi, dims, 1) for form in forms)]),
            np.concatenate([none, *(form.piece_offset for form in forms)]),
            np.concatenate([np.zeros((0, dims), np.int64), *(pad(form.piece_strides, dims, 0) for form in forms)]),
        )

    def find(self, atom: Ints, rank: Ints) -> Ints:
        """Numbers of the pieces (of all forms) that hold ``atom`` (number over all combos) on ``rank``."""
        codes, pieces, top = self._codes
        wanted = atom * top + rank
        at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        if (codes[at] != wanted).any():
            raise ProofError("a rank is to move what it has no piece of")
        return pieces[at]
