"""What a cut plan makes every rank move, by class of link. Counted from the segments, not from how they were chosen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.canon import Ranks
from refitd.plan.cutting import Cutting
from refitd.plan.flows import NEAR_FABRIC, NEAR_LOCAL, NEAR_PEER, NET
from refitd.plan.ranksets import SetTable, ragged


class Loads(NamedTuple):
    """Bytes by rank: ``egress`` and ``ingress`` over the network, ``near_out`` and ``near_in`` inside domains.

    ``sent`` and ``received``: network peers of each rank. ``relayed``, ``peer``, ``fabric``, ``local``: bytes in all.
    """

    egress: Ints
    ingress: Ints
    near_out: Ints
    near_in: Ints
    sent: Ints
    received: Ints
    relayed: int
    peer: int
    fabric: int
    local: int


def count_loads(cutting: Cutting, sets: SetTable, ranks: Ranks) -> Loads:
    """Loads of all ranks."""
    parcel, start, stop, src, dst = cutting.segments
    flows, nbytes = cutting.parcels.flows, stop - start
    link = flows.link[parcel]
    number = len(ranks.keys)
    network = np.flatnonzero(link == NET)
    egress, ingress = _sum(number, src[network], nbytes[network]), _sum(number, dst[network], nbytes[network])
    pairs = np.zeros((number, number), dtype=bool)
    pairs[src[network], dst[network]] = True
    close = np.flatnonzero((link == NEAR_PEER) | (link == NEAR_FABRIC))
    near_out, near_in = _sum(number, src[close], nbytes[close]), _sum(number, dst[close], nbytes[close])
    peer, fabric = _spread(cutting, sets, ranks, near_out, near_in)
    return Loads(
        egress, ingress, near_out, near_in, pairs.sum(axis=1), pairs.sum(axis=0),
        int(nbytes[cutting.parcels.relay[parcel] == 1].sum()),
        peer + int(nbytes[link == NEAR_PEER].sum()),
        fabric + int(nbytes[link == NEAR_FABRIC].sum()),
        int(nbytes[link == NEAR_LOCAL].sum()),
    )  # fmt: skip


def _sum(count: int, index: Ints, amount: Ints) -> Ints:
    total = np.zeros(count, np.int64)
    np.add.at(total, index, amount)
    return total


def _spread(cutting: Cutting, sets: SetTable, ranks: Ranks, near_out: Ints, near_in: Ints) -> tuple[int, int]:
    """Add what entering ranks pass on to the others of their set; bytes by peer reads and across hosts."""
    parcel, start, stop, _, dst = cutting.segments
    needers = cutting.parcels.flows.needers[parcel]
    size = sets.size()
    several = np.flatnonzero(size[needers] > 1)
    needers, dst, nbytes = needers[several], dst[several], (stop - start)[several]
    np.add.at(near_out, dst, nbytes * (size[needers] - 1))
    np.add.at(near_in, dst, -nbytes)
    total = _sum(len(size), needers, nbytes)
    used = np.flatnonzero(total)
    run, place = ragged(size[used])
    np.add.at(near_in, sets.member[sets.first[used][run] + place], total[used][run])
    pairs, inverse = np.unique(needers * len(ranks.keys) + dst, return_inverse=True)
    same = np.array(
        [
            int((ranks.node[sets.of(p // len(ranks.keys))] == ranks.node[p % len(ranks.keys)]).sum())
            for p in pairs.tolist()
        ],
        np.int64,
    )[inverse.reshape(-1)]
    return int((nbytes * (same - 1)).sum()), int((nbytes * (size[needers] - same)).sum())


def links(cutting: Cutting, ranks: Ranks) -> Ints:
    """Network bytes from each domain to each domain, (domains, domains)."""
    parcel, start, stop, src, dst = cutting.segments
    network = np.flatnonzero(cutting.parcels.flows.link[parcel] == NET)
    count = len(ranks.domains)
    code = ranks.domain[src[network]] * count + ranks.domain[dst[network]]
    return _sum(count * count, code, (stop - start)[network]).reshape(count, count)
