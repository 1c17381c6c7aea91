"""Relays: domains that have a part pass it on, where the ranks that hold it cannot send all copies in time.

Domains receive a line in one circular order, each from its own start. The last part of a domain's order is what the
domain before it received long ago; that domain sends it. With as many parts as domains this is a pipelined chain: the
holders send every byte once, and the domains pass it round.
"""

from __future__ import annotations

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Ints
from refitd.plan.cutting import Parcels
from refitd.plan.flows import NET, Flows
from refitd.plan.lines import Lines
from refitd.plan.ranksets import SetTable
from refitd.plan.share import Shares
from refitd.plan.spans import WHOLE, Spans, grain_at, join, pick, window

_SHIFT = 16


def relayable(lines: Lines, flows: Flows) -> Ints:
    """For each line the most that may be relayed, in thousandths; 0 where a near holder or a single domain takes
    part."""
    network = flows.link == NET
    of = np.zeros(len(lines.holders), np.int64)
    of[flows.line[network]] = flows.of[network]
    of[flows.line[~network]] = 1
    return np.where(of > 1, WHOLE - -(-WHOLE // np.maximum(of, 1)), 0)


def choose(lines: Lines, flows: Flows, sets: SetTable, shares: Shares, target: int, part: Ints) -> Ints:
    """The thousandths of each line to relay, so that no holder sends much more than ``target`` bytes.

    ``part``: what is relayed already, (lines,); ``shares``: how the rest is shared. Returns ``part`` where nothing is
    to change.
    """
    most = relayable(lines, flows)
    network = flows.link == NET
    of = np.zeros(len(lines.holders), np.int64)
    of[flows.line[network]] = flows.of[network]
    room = np.zeros(len(sets.first) - 1, np.int64)  # what could still be relayed, by set of holders
    np.add.at(room, lines.holders, lines.nbytes // WHOLE * of * (most - part))
    total = np.add.reduceat(shares.share, sets.first[:-1])
    owner = sets.owner()
    fraction = (room << 10) // np.maximum(total, 1)
    mine = np.zeros(len(shares.load), np.int64)
    np.add.at(mine, sets.member, shares.share // 1024 * np.minimum(fraction, 1024)[owner])
    over = np.maximum(shares.load - target, 0)
    need = np.where(over > 0, np.minimum((over << _SHIFT) // np.maximum(mine, 1) + 1, 1 << _SHIFT), 0)
    by_set = np.minimum.reduceat(need[sets.member], sets.first[:-1])
    extra = -(-(most - part) * by_set[lines.holders] >> _SHIFT)
    return np.minimum(part + extra, most)


def parcel_out(lines: Lines, flows: Flows, start: int, part: Ints) -> tuple[Spans, Parcels]:
    """All flows as parcels from ``start`` thousandths of the order on; ``part`` of each line goes by relay."""
    direct, late = window(lines, start, WHOLE - part), window(lines, np.maximum(WHOLE - part, start), WHOLE)
    used = np.flatnonzero(late.nbytes() > 0)
    spans = join(direct, pick(late, used))
    relayed = np.zeros(len(lines.holders), np.int64)
    relayed[used] = len(lines.holders) + np.arange(len(used))
    passed = np.flatnonzero(relayed[flows.line] > 0)
    before = np.where(flows.place[passed] > 0, passed - 1, passed + flows.of[passed] - 1)
    passed_on = flows.take(passed)._replace(holders=flows.needers[before])
    parcels = Parcels(
        Flows(*(np.concatenate(pair) for pair in zip(flows, passed_on, strict=True))),
        np.concatenate([flows.line, relayed[flows.line[passed]]]),
        np.repeat(np.array([0, 1]), [len(flows.line), len(passed)]),
        np.concatenate([flows.place, flows.place[before]]),
    )
    return spans, drop_empty(spans, parcels)


def drop_empty(spans: Spans, parcels: Parcels) -> Parcels:
    """Only the parcels that carry something."""
    real = spans.nbytes()[parcels.span] > 0
    return parcels if real.all() else parcels.take(np.flatnonzero(real))


def hops(lines: Lines, part: Ints, flows: Flows, flow: Ints, entry: Ints, place: Ints) -> Ints:
    """Through how many domains a relayed grain has come when it arrives: 1 where the sender had it from a holder.

    ``flow`` (numbers of ``flows``), ``entry``, ``place`` in the order of that flow's domain: of each grain. Ends
    because the first parts of all domains, which come from holders, are the whole line (`relayable`).
    """
    grains, of, at = lines.grains[entry], flows.of[flow], flows.place[flow]
    direct = grain_at(grains, WHOLE - part[flows.line[flow]])
    number = (place + grains * at // of) % grains
    count = np.zeros(len(flow), np.int64)
    open_ = np.flatnonzero(place >= direct)
    while len(open_):
        count[open_] += 1
        before = (at[open_] - count[open_]) % of[open_]
        late = (number[open_] - grains[open_] * before // of[open_]) % grains[open_] >= direct[open_]
        if (count[open_] > of[open_]).any():
            raise ProofError("a chain of relays has no beginning")
        open_ = open_[late]
    return count


def depth(parcels: Parcels, part: Ints) -> int:
    """Domains that a chain of relays goes through at most."""
    late = parcels.flows.take(np.flatnonzero(parcels.relay == 1))
    return int((-(-part[late.line] * late.of // WHOLE)).max(initial=0))
