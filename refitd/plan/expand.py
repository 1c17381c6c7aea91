"""From a rank's segments to boxes of tensors: which grains, of which tensor, and the box of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Bools, Ints
from refitd.plan.canon import Ranks
from refitd.plan.classes import Classes
from refitd.plan.cutting import Cutting
from refitd.plan.flows import NEAR_FABRIC, NEAR_PEER
from refitd.plan.lines import PARTS, Lines
from refitd.plan.ranksets import SetTable, ends, product, ragged, stable_order
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
    """What deliveries are made of: grains that follow each other in one delivery are a *unit*, one box of many tensors.

    Of each grain: its ``unit``; ``want`` (number in `Classes`); ``phase`` of the order; ``stage``: 0 from holders, 2
    for each hop of a chain of relays, and 1 more where it is spread inside a domain. Boxes are in the order of their
    units, which have one or several: ``box_unit``, ``delivery``, ``entry``, ``lo``, ``hi`` (B, D).
    """

    unit: Ints
    want: Ints
    phase: Ints
    stage: Ints
    box_unit: Ints
    delivery: Ints
    entry: Ints
    lo: Ints
    hi: Ints

    def boxes(self, at: Ints, lo: Ints, hi: Ints) -> Grains:
        """With these boxes instead: parts of the boxes ``at``, in order."""
        return self._replace(box_unit=self.box_unit[at], delivery=self.delivery[at], entry=self.entry[at], lo=lo, hi=hi)


class _Runs(NamedTuple):
    """Runs of grains of one ``entry`` in a ``delivery``: ``grains`` from place ``first`` of the order on, the first of
    them number ``start`` of all grains. Of these the bytes ``begin`` to ``end`` are meant; a grain has ``size``."""

    delivery: Ints
    entry: Ints
    first: Ints
    grains: Ints
    start: Ints
    begin: Ints
    end: Ints
    size: Ints


def expand(lines: Lines, classes: Classes, cutting: Cutting, part: Ints, work: Deliveries) -> Grains:
    """The boxes of all deliveries. ``part`` (lines,): the thousandths that go by relay."""
    flows, runs = cutting.parcels.flows, _runs(lines, cutting, work)
    parcel, grains, parts = work.parcel[runs.delivery], lines.grains[runs.entry], lines.parts[runs.entry]
    run = np.repeat(np.arange(len(runs.grains)), runs.grains)
    place = (runs.first - runs.start)[run] + np.arange(len(run))
    number = place + (grains * flows.place[parcel] // flows.of[parcel])[run]
    number -= np.where(number >= grains[run], grains[run], 0)
    several, slice_ = np.flatnonzero((parts > 1)[run]), np.zeros(len(run), np.int64)
    number[several], slice_[several] = np.divmod(number[several], parts[run[several]])
    fresh = _fresh(runs, several)
    head = np.flatnonzero(fresh)
    lo, hi = _part(lines, classes, runs.entry[run[head]], slice_[head])
    whole = Grains(
        np.cumsum(fresh) - 1, classes.first[lines.entry_class[runs.entry]][run] + number,
        quotient(place * PARTS, grains[run]), _stages(lines, cutting, part, work, runs, run, place),
        np.arange(len(head)), runs.delivery[run[head]], runs.entry[run[head]], lo, hi,
    )  # fmt: skip
    return _cut_inside(lines, classes, whole, *_inside(runs, run[head], head))


def _stages(lines: Lines, cutting: Cutting, part: Ints, work: Deliveries, runs: _Runs, run: Ints, place: Ints) -> Ints:
    """The stage of each grain, which is number ``place`` of the order in its ``run``."""
    stage, parcel = work.spread[runs.delivery][run], work.parcel[runs.delivery]
    late = np.flatnonzero((cutting.parcels.relay[parcel] == 1)[run])
    flow, entry = parcel[run[late]], runs.entry[run[late]]
    stage[late] += 2 * hops(lines, part, cutting.parcels.flows, flow, entry, place[late])
    return stage


def _runs(lines: Lines, cutting: Cutting, work: Deliveries) -> _Runs:
    spans = cutting.spans
    base = spans.offset[spans.first[cutting.parcels.span[work.parcel]]]
    low = np.searchsorted(spans.offset, base + work.start, side="right") - 1
    high = np.searchsorted(spans.offset, base + work.stop, side="left")
    delivery, place = ragged(high - low)
    row = low[delivery] + place
    keep = spans.length[row] > 0
    delivery, row = delivery[keep], row[keep]
    entry = spans.entry[row]
    size = lines.grain_bytes()[entry]
    begin = np.maximum((base + work.start)[delivery] - spans.offset[row], 0)
    end = np.minimum((base + work.stop)[delivery], spans.offset[row + 1]) - spans.offset[row]
    first = begin // size
    count = -(-end // size) - first
    begin, end = begin - first * size, end - first * size
    return _Runs(delivery, entry, spans.grain[row] + first, count, ends(count)[:-1], begin, end, size)


def _fresh(runs: _Runs, several: Ints) -> Bools:
    """Which grains begin a unit: the first of a run, one of ``several`` of a tensor, and whole ones beside cut ones."""
    fresh = np.zeros(int(runs.grains.sum()), dtype=bool)
    real, stop = runs.grains > 0, runs.start + runs.grains
    fresh[runs.start[real]] = True
    fresh[several] = True
    fresh[runs.start[(runs.begin > 0) & (runs.grains > 1)] + 1] = True
    fresh[stop[real & (runs.end < runs.grains * runs.size)] - 1] = True
    return fresh


def _inside(runs: _Runs, run: Ints, head: Ints) -> tuple[Ints, Ints, Ints]:
    """Which bytes of the grains ``head`` are meant: (start, stop, size) of each."""
    place, size = head - runs.start[run], runs.size[run]
    stop = np.minimum(runs.end[run] - place * size, size)
    return np.where(place > 0, 0, runs.begin[run]), stop, size


def quotient(a: Ints, b: Ints) -> Ints:
    """``a // b`` of numbers that are not negative: narrow ones divide several times as fast."""
    if max(int(a.max(initial=0)), int(b.max(initial=0))) >> 32:
        return a // b
    return (a.astype(np.uint32) // b.astype(np.uint32)).astype(np.int64)


def _part(lines: Lines, classes: Classes, entry: Ints, part: Ints) -> tuple[Ints, Ints]:
    cell = lines.entry_cell[entry]
    lo, hi = classes.lo[cell], classes.hi[cell]
    several = np.flatnonzero(lines.parts[entry] > 1)
    axis = lines.axis[entry[several]]
    step = (hi[several, axis] - lo[several, axis]) // lines.parts[entry[several]]
    lo[several, axis] += step * part[several]
    hi[several, axis] = lo[several, axis] + step
    return lo, hi


def _cut_inside(lines: Lines, classes: Classes, grains: Grains, start: Ints, stop: Ints, size: Ints) -> Grains:
    """Replace boxes of which only the bytes ``start`` to ``stop`` (row-major) are meant by the boxes of those."""
    partial = np.flatnonzero((start > 0) | (stop < size))
    cell = lines.entry_cell[grains.entry[partial]]
    item = lines.cell_bytes[grains.entry[partial]] // product(classes.hi[cell] - classes.lo[cell])
    return divide(grains, partial, start[partial] // item, stop[partial] // item)


def divide(grains: Grains, at: Ints, start: Ints, stop: Ints) -> Grains:
    """Replace the boxes ``at`` (sorted; a box may be there several times) by those of their elements ``start`` to
    ``stop``, row-major."""
    if not len(at):
        return grains
    lo, hi = grains.lo[at], grains.hi[at]
    inner = product(hi[:, 1:] - lo[:, 1:])
    hi[:, 0] = lo[:, 0] + stop // inner
    lo[:, 0] += start // inner
    ragged_ = np.flatnonzero((start % inner > 0) | (stop % inner > 0))
    pieces = [
        (row, a, b)
        for row in ragged_.tolist()
        for a, b in range_boxes(
            grains.lo[at[row]].tolist(), grains.hi[at[row]].tolist(), int(start[row]), int(stop[row])
        )
    ]
    whole, even = np.ones(len(grains.lo), dtype=bool), np.ones(len(at), dtype=bool)
    whole[at], even[ragged_] = False, False
    even &= start < stop
    kept, dims = np.flatnonzero(whole), lo.shape[1]
    low, high = (np.array([p[k] for p in pieces], np.int64).reshape(len(pieces), dims) for k in (1, 2))
    box = np.concatenate([kept, at[even], at[np.array([p[0] for p in pieces], np.int64)]])
    order = stable_order(box)
    return grains.boxes(
        box[order],
        np.concatenate([grains.lo[kept], lo[even], low])[order],
        np.concatenate([grains.hi[kept], hi[even], high])[order],
    )


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
