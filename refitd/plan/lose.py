"""Plan what is left when ranks are lost on the way: the same flows, further on, without the lost ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from refitd.errors import InputError
from refitd.layout.box import Ints
from refitd.plan.canon import Ranks
from refitd.plan.content import plan_digest
from refitd.plan.cutting import Parcels, cut
from refitd.plan.flows import NEAR_FABRIC, NEAR_LOCAL, NEAR_PEER, NET, Flows, near_flows
from refitd.plan.lines import Lines
from refitd.plan.proof_lines import prove_cuts
from refitd.plan.ranksets import RankSets, distinct, ends, ragged, stable_order
from refitd.plan.relays import drop_empty, parcel_out
from refitd.plan.side_plan import Core, SidePlan
from refitd.plan.spans import WHOLE, Spans, grain_at, join, make_spans


def lose(plan: SidePlan, ranks: Sequence[str], at: float) -> SidePlan:
    """The remainder of a whole ``plan`` after ``ranks`` are lost, when the part ``at`` (0 to 1) of every flow had
    landed.

    What a lost rank alone held is taken from destinations where it had landed. ``unrecoverable_bytes`` of the result's
    totals is what no rank that is left has. Raises InputError for ranks that are not of the plan, for ``at`` out of
    range and for a plan that is a remainder itself.
    """
    start = _thousandths(plan, at)
    content = plan.content
    lost = distinct(content.ranks.numbers(list(ranks)))
    alive = _alive(content.sets, len(content.ranks.keys), lost)
    flows = content.flows._replace(needers=alive[content.flows.needers], holders=alive[content.flows.holders])
    flows = flows.take(np.flatnonzero(flows.needers >= 0))
    holders = alive[content.lines.holders]
    flows = _rerouted(flows, holders, content.ranks, content.sets)
    dead = _Dead(content.lines, flows, holders, start)
    spans, parcels = _parcels(content.lines, flows, holders, start, dead, content.ranks, content.sets)
    sets = content.sets.table()
    cutting = cut(content.lines, spans, parcels, sets, len(content.ranks.keys), plan.topology.least_share, start)
    needers = alive[content.lines.needers]
    count = np.where(needers >= 0, sets.size()[needers], 0)
    due = count * (_remaining(content.lines, start) - np.where(holders < 0, dead.gone, 0))
    prove_cuts(content.lines, cutting, sets, content.ranks, due, lost)
    part = np.zeros(len(content.lines.holders), np.int64)
    digest = plan_digest(content, cutting, part, (start, *lost.tolist()))
    gone = int(dead.gone[(holders < 0) & (needers >= 0)].sum())
    return SidePlan(digest, plan.topology, plan.bucket_bytes, Core(content, cutting, part), gone)


def _thousandths(plan: SidePlan, at: float) -> int:
    if not 0 <= at <= 1:
        raise InputError("at", "a part from 0 to 1", repr(at))
    if plan.cutting.start:
        raise InputError("plan", "a whole plan", "a remainder")
    return round(at * WHOLE)


def _alive(sets: RankSets, ranks: int, lost: Ints) -> Ints:
    """For each set the set of those of its ranks that are left, or -1."""
    table = sets.table()
    count = len(table.first) - 1
    gone = np.zeros(ranks, dtype=bool)
    gone[lost] = True
    alive = np.arange(count)
    for number in distinct(table.owner()[gone[table.member]]).tolist():
        members = table.of(number)
        left = members[~gone[members]]
        alive[number] = sets.add(left) if len(left) else -1
    return alive


def _rerouted(flows: Flows, holders: Ints, ranks: Ranks, sets: RankSets) -> Flows:
    """Near flows whose near holders are lost come from the line's other holders, if there are any.

    Each rank had a near flow of its own; over the network a line enters a domain once, for all of them.
    """
    stray = (flows.link != NET) & (flows.holders < 0) & (holders[flows.line] >= 0)
    if not stray.any():
        return flows
    kept, at = flows.take(np.flatnonzero(~stray)), np.flatnonzero(stray)
    line, needers = flows.line[at], flows.needers[at]
    table = sets.table()
    near = np.array(
        [bool((ranks.domain[table.of(h)] == ranks.domain[n]).any()) for h, n in
         zip(holders[line].tolist(), needers.tolist(), strict=True)], dtype=bool,
    )  # fmt: skip
    far = _one_a_domain(flows.take(at[~near]), ranks, sets)
    far = far._replace(holders=holders[far.line], link=np.full(len(far.line), NET, np.int64))
    close = (
        near_flows(line[near], holders[line[near]], needers[near], ranks, sets) if near.any() else flows.take(at[:0])
    )
    found = Flows(*(np.concatenate(column) for column in zip(kept, far, close, strict=True)))
    network, near_ones = np.flatnonzero(found.link == NET), np.flatnonzero(found.link != NET)
    order = np.lexsort((_domain(found.take(network), ranks, sets), found.line[network]))
    return found.take(np.concatenate([network[order], near_ones]))


def _domain(flows: Flows, ranks: Ranks, sets: RankSets) -> Ints:
    """Into which each flow goes."""
    table = sets.table()
    return ranks.domain[table.member[table.first[flows.needers]]]


def _one_a_domain(flows: Flows, ranks: Ranks, sets: RankSets) -> Flows:
    """One flow for all that bring a line into a domain, to all of their needers."""
    domain = _domain(flows, ranks, sets)
    code = flows.line * (int(domain.max(initial=0)) + 1) + domain
    flows = flows.take(stable_order(code))
    _, first, count = np.unique(np.sort(code), return_index=True, return_counts=True)
    table, needers = sets.table(), flows.needers[first]
    for number in np.flatnonzero(count > 1).tolist():
        mine = flows.needers[first[number] : first[number] + count[number]]
        needers[number] = sets.add(distinct(np.concatenate([table.of(one) for one in mine.tolist()])))
    return flows.take(first)._replace(needers=needers)


def _remaining(lines: Lines, start: int) -> Ints:
    """Bytes of each line that are left for a flow that is ``start`` thousandths on."""
    left = (lines.grains - grain_at(lines.grains, start)) * lines.grain_bytes()
    return np.add.reduceat(left, lines.first[:-1]) if len(lines.holders) else left


class _Dead:
    """Lines whose holders are all lost: which parts of them had landed where. ``gone`` (lines,): bytes that are
    nowhere."""

    def __init__(self, lines: Lines, flows: Flows, holders: Ints, start: int) -> None:
        self.gone = np.where(holders < 0, _remaining(lines, start), 0)
        self.windows: list[_Windows] = []
        flow = np.flatnonzero(holders[flows.line] < 0)
        flow = flow[np.lexsort((flow, flows.line[flow]))]
        owner, first, count = np.unique(flows.line[flow], return_index=True, return_counts=True)
        for copies in distinct(count).tolist():
            mine = np.flatnonzero(count == copies)
            table = flow[first[mine][:, None] + np.arange(copies)]
            self._add(lines, flows, owner[mine], table, start)

    def _add(self, lines: Lines, flows: Flows, owner: Ints, table: Ints, start: int) -> None:
        """``table`` (lines, copies): the flows of each line of ``owner``."""
        row, place = ragged(lines.first[owner + 1] - lines.first[owner])
        entry = lines.first[owner][row] + place
        grains = lines.grains[entry]
        turn = grains[:, None] * flows.place[table][row] // flows.of[table][row]
        ahead = (turn[:, None, :] - turn[:, :, None]) % grains[:, None, None]  # (entries, receiver, sender)
        order = np.argsort(ahead, axis=2, kind="stable")
        ahead = np.take_along_axis(ahead, order, axis=2)
        landed = grain_at(grains, start)[:, None, None]
        after = np.concatenate([ahead[:, :, 1:], np.broadcast_to(grains[:, None, None], ahead[:, :, :1].shape)], axis=2)
        low = np.maximum(landed, ahead)
        count = np.maximum(np.minimum(ahead + landed, after) - low, 0)
        found = (count[:, 0].sum(axis=1) * lines.grain_bytes()[entry]).astype(np.int64)
        np.subtract.at(self.gone, owner[row], found)
        self.windows.append(_Windows(table, row, entry, order, low, count))


class _Windows(NamedTuple):
    """Of lines with equally many copies: entry e of line ``row[e]`` gets, for receiver r, ``length[e, r, k]`` grains
    from ``low[e, r, k]`` on from copy ``order[e, r, k]``. ``table`` (lines, copies): the flows."""

    table: Ints
    row: Ints
    entry: Ints
    order: Ints
    low: Ints
    length: Ints


def _parcels(
    lines: Lines, flows: Flows, holders: Ints, start: int, dead: _Dead, ranks: Ranks, sets: RankSets
) -> tuple[Spans, Parcels]:
    live = flows.take(np.flatnonzero(holders[flows.line] >= 0))
    spans, parcels = parcel_out(lines, live, start, np.zeros(len(lines.holders), np.int64))
    for windows in dead.windows:
        more, extra = _landed(lines, flows, windows, ranks, sets)
        extra = extra._replace(span=extra.span + len(spans.first) - 1)
        spans = join(spans, more)
        columns = [np.concatenate(pair) for pair in zip(parcels.flows, extra.flows, strict=True)]
        rest = (np.concatenate(pair) for pair in zip(parcels[1:], extra[1:], strict=True))
        parcels = Parcels(Flows(*columns), *rest)
    return spans, drop_empty(spans, parcels)


def _landed(lines: Lines, flows: Flows, windows: _Windows, ranks: Ranks, sets: RankSets) -> tuple[Spans, Parcels]:
    """A parcel for each line, receiver and copy that it reads; spans with a row for every window."""
    copies = windows.table.shape[1]
    shape = windows.length.shape
    receiver = np.broadcast_to(np.arange(copies)[None, :, None], shape)
    key = (windows.row[:, None, None] * copies + receiver) * copies + windows.order
    used = np.flatnonzero(windows.length.ravel())
    used = used[np.argsort(key.ravel()[used], kind="stable")]
    keys, count = np.unique(key.ravel()[used], return_counts=True)
    entry = np.broadcast_to(windows.entry[:, None, None], shape).ravel()[used]
    spans = make_spans(lines, ends(count), entry, windows.low.ravel()[used], windows.length.ravel()[used])
    line, rest = np.divmod(keys, copies * copies)
    to, source = windows.table[line, rest // copies], windows.table[line, rest % copies]
    table = sets.table()
    here, there = (table.member[table.first[flows.needers[f]]] for f in (to, source))
    near = np.where(ranks.node[here] == ranks.node[there], NEAR_PEER, NEAR_FABRIC)
    link = np.where(ranks.domain[here] != ranks.domain[there], NET, np.where(here == there, NEAR_LOCAL, near))
    taken = flows.take(to)._replace(holders=flows.needers[source], link=link)
    twos = np.full(len(keys), 2, np.int64)
    return spans, Parcels(taken, np.arange(len(keys)), twos, flows.place[source])
