"""Cut flows into segments: which bytes, from which holder, through which needer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.flows import NET, Flows
from refitd.plan.lines import Lines
from refitd.plan.ranksets import SetTable, distinct, ends, stable_order
from refitd.plan.share import Shares, pour
from refitd.plan.spans import Spans, snap


class Parcels(NamedTuple):
    """Flows with the span that each carries.

    ``relay``: 0 where ``holders`` hold the publication; 1 where they get it before, in the same plan; 2 where they had
    got it when the plan was made. ``origin``: which of the line's domains these holders are (as `Flows.place`).
    """

    flows: Flows
    span: Ints
    relay: Ints
    origin: Ints

    def take(self, at: Ints) -> Parcels:
        """The parcels of these numbers."""
        return Parcels(self.flows.take(at), self.span[at], self.relay[at], self.origin[at])


class Segments(NamedTuple):
    """Bytes ``start`` to ``stop`` of a parcel's span, sent by rank ``src`` to rank ``dst``, which passes them on to the
    other needers of the parcel. In order of parcel and start."""

    parcel: Ints
    start: Ints
    stop: Ints
    src: Ints
    dst: Ints


class Cutting(NamedTuple):
    """A plan in lines and cuts, from ``start`` thousandths of the order of reception on. ``egress``, ``ingress``
    (network) and ``spread`` (near holders): what each shares out."""

    spans: Spans
    parcels: Parcels
    segments: Segments
    egress: Shares
    ingress: Shares
    relayed: Shares
    spread: Shares
    start: int = 0


class Division(NamedTuple):
    """Parcels in the order of their sets, as one run of bytes, and where it is cut.

    ``offset`` (P,): where each parcel whose set has several members begins in the run; ``cuts``: places in
    the run, sorted; ``before`` (sets,): how many cuts belong to earlier sets; ``parcel``, ``at``: the cuts by parcel.
    """

    offset: Ints
    cuts: Ints
    before: Ints
    parcel: Ints
    at: Ints

    def member(self, sets: SetTable, number: Ints, parcel: Ints, start: Ints) -> Ints:
        """Which member (from 0) of set ``number`` has the byte ``start`` of ``parcel``; 0 for sets of one."""
        several = np.flatnonzero(sets.size()[number] > 1)
        member = np.zeros(len(number), np.int64)
        place = self.offset[parcel[several]] + start[several]
        member[several] = np.searchsorted(self.cuts, place, side="right") - self.before[number[several]]
        return member


def demand(column: Ints, nbytes: Ints, chosen: Ints, sets: int) -> Ints:
    """Bytes of the ``chosen`` parcels by their set in ``column``."""
    total = np.zeros(sets, np.int64)
    if len(chosen) == len(column):
        np.add.at(total, column, nbytes)
    else:
        np.add.at(total, column[chosen], nbytes[chosen])
    return total


def divide(
    lines: Lines, spans: Spans, parcels: Parcels, nbytes: Ints, column: Ints, chosen: Ints, sets: SetTable, share: Ints
) -> Division:
    """Cut the ``chosen`` parcels of each set into the members' shares. ``column``: the set of every parcel."""
    several = chosen[sets.size()[column[chosen]] > 1]
    order = several[stable_order(column[several])]
    run = ends(nbytes[order])
    offset = np.zeros(len(column), np.int64)
    offset[order] = run[:-1]
    used, first = np.unique(column[order], return_index=True)
    size = sets.size()[used]
    before = np.zeros(len(sets.first) - 1, np.int64)
    before[used] = ends(size - 1)[:-1]
    owner = np.repeat(np.arange(len(used)), size - 1)
    row = sets.first[used][owner] + 1 + np.arange(len(owner)) - before[used][owner]
    shared = ends(share)
    place = run[first][owner] + shared[row] - shared[sets.first[used]][owner]
    at = np.searchsorted(run, place, side="right") - 1
    at = np.minimum(at, len(order) - 1) if len(order) else at
    parcel = order[at]
    within = place - run[at]
    inside = within < nbytes[parcel]
    within = np.where(inside, snap(lines, spans, parcels.span[parcel], np.where(inside, within, 0)), within)
    return Division(offset, run[at] + within, before, parcel, within)


def cut(
    lines: Lines, spans: Spans, parcels: Parcels, sets: SetTable, ranks: int, least: int, start: int = 0
) -> Cutting:
    """Share out and cut. Parcels must carry something each."""
    flows, nbytes = parcels.flows, spans.nbytes()[parcels.span]
    far, passed = flows.link == NET, parcels.relay == 1
    jobs = (
        (flows.holders, np.flatnonzero(far & ~passed)),
        (flows.needers, np.flatnonzero(far & ~passed)),
        (flows.needers, np.flatnonzero(passed)),
        (flows.holders, np.flatnonzero(~far)),
    )
    count, shares = len(sets.first) - 1, list[Shares]()
    for column, chosen in jobs:
        # Relays enter on top of what comes from holders: each kind by itself enters through all needers.
        before = shares[1].load if len(shares) == 2 else None
        shares.append(pour(demand(column, nbytes, chosen, count), sets, ranks, least, before))
    divisions = [
        divide(lines, spans, parcels, nbytes, column, chosen, sets, share.share)
        for (column, chosen), share in zip(jobs, shares, strict=True)
    ]
    egress, ingress, relayed, spread = shares
    segments = _segments(parcels, nbytes, divisions, sets)
    return Cutting(spans, parcels, segments, egress, ingress, relayed, spread, start)


def _segments(parcels: Parcels, nbytes: Ints, divisions: list[Division], sets: SetTable) -> Segments:
    line = ends(nbytes)
    cuts = distinct(np.concatenate([line[d.parcel] + d.at for d in divisions]))
    at = np.searchsorted(line, cuts)
    new = line[at] != cuts
    points = np.insert(line[:-1], at[new], cuts[new])
    fresh = np.ones(len(points), np.int64)
    fresh[at[new] + np.arange(int(new.sum()))] = 0
    parcel = np.cumsum(fresh) - 1
    start = points - line[parcel]
    stop = np.append(points[1:], line[-1])[: len(points)] - line[parcel]
    flows = parcels.flows
    holders, needers = flows.holders[parcel], flows.needers[parcel]
    by_holder, by_needer, by_next, by_near = (
        division.member(sets, numbers, parcel, start)
        for division, numbers in zip(divisions, (holders, needers, needers, holders), strict=True)
    )
    near, relayed = flows.link[parcel] != NET, parcels.relay[parcel] == 1
    into = np.where(near, 0, np.where(relayed, by_next, by_needer))
    out = np.where(near, by_near, np.where(relayed, into % sets.size()[holders], by_holder))
    return Segments(
        parcel, start, stop, sets.member[sets.first[holders] + out], sets.member[sets.first[needers] + into]
    )
