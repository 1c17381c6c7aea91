"""Flows: what one line owes to one domain (over the network) or to one rank (from a holder in its own domain)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.canon import Ranks
from refitd.plan.lines import Lines
from refitd.plan.program import FABRIC, LINKS, LOCAL, NETWORK, PEER
from refitd.plan.ranksets import RankSets, distinct, ends, ragged

NET, NEAR_PEER, NEAR_LOCAL, NEAR_FABRIC = (LINKS.index(link) for link in (NETWORK, PEER, LOCAL, FABRIC))


class Flows(NamedTuple):
    """F flows. ``line``; ``holders`` and ``needers``: numbers of sets of ranks; ``link``: index of `LINKS`.

    Flow f is number ``place`` of the ``of`` domains that get the line over the network. Its domain starts to receive
    every entry at grain ``grains * place // of``, so that the domains hold different parts at any time.
    """

    line: Ints
    holders: Ints
    needers: Ints
    link: Ints
    place: Ints
    of: Ints

    def take(self, at: Ints) -> Flows:
        """The flows of these numbers."""
        return Flows(*(column[at] for column in self))


def make_flows(lines: Lines, ranks: Ranks, sets: RankSets) -> Flows:
    """Flows of all lines: network flows first, by line, then those from near holders, by holders."""
    domain_first, domain, part = _by_domain(lines.needers, ranks, sets)
    line, at = ragged(domain_first[lines.needers + 1] - domain_first[lines.needers])
    at += domain_first[lines.needers[line]]
    needers, where = part[at], domain[at]
    near = _present(lines.holders, ranks, sets)[lines.holders[line], where]
    network = np.flatnonzero(~near)
    of = np.bincount(line[network], minlength=len(lines.holders))
    place = np.arange(len(network)) - (ends(of)[:-1])[line[network]]
    far = Flows(
        line[network], lines.holders[line[network]], needers[network], np.full(len(network), NET, np.int64), place,
        of[line[network]],
    )  # fmt: skip
    if not near.any():
        return far
    close = near_flows(line[near], lines.holders[line[near]], needers[near], ranks, sets)
    return Flows(*(np.concatenate(pair) for pair in zip(far, close, strict=True)))


def _by_domain(numbers: Ints, ranks: Ranks, sets: RankSets) -> tuple[Ints, Ints, Ints]:
    """For every set: runs of (domain, the part of the set in it). Sets that are not asked for have empty runs."""
    table = sets.table()
    asked = distinct(numbers)
    count = len(table.first) - 1
    sizes, domains, parts = np.zeros(count, np.int64), [], []
    single = asked[asked < len(ranks.keys)]
    sizes[single] = 1
    for number in asked[len(single) :].tolist():
        members = table.of(number)
        members = members[np.argsort(ranks.domain[members], kind="stable")]
        own = ranks.domain[members]
        starts = np.flatnonzero(np.append(True, own[1:] != own[:-1]))
        sizes[number] = len(starts)
        domains.append(own[starts])
        parts.append(sets.add_runs(members, np.append(starts, len(members))) if len(starts) < len(members) else members)
    none = np.zeros(0, np.int64)
    return (
        ends(sizes),
        np.concatenate([ranks.domain[single], *domains, none]),
        np.concatenate([single, *parts, none]),
    )


def _present(numbers: Ints, ranks: Ranks, sets: RankSets) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Whether a set has a rank in a domain, (sets, domains); rows of sets that are not asked for are empty."""
    table = sets.table()
    asked = np.zeros(len(table.first) - 1, dtype=bool)
    asked[numbers] = True
    owner = table.owner()
    mine = asked[owner]
    present = np.zeros((len(asked), len(ranks.domains)), dtype=bool)
    present[owner[mine], ranks.domain[table.member[mine]]] = True
    return present


def near_flows(line: Ints, holders: Ints, needers: Ints, ranks: Ranks, sets: RankSets) -> Flows:
    """Flows to each rank of ``needers`` from the nearest of ``holders``: itself, else its node, else its domain."""
    code = holders * (int(needers.max(initial=0)) + 1) + needers
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    table = sets.table()
    routes = [
        [
            (*_nearest(table.of(int(holders[at])), rank, ranks, sets), rank)
            for rank in table.of(int(needers[at])).tolist()
        ]
        for at in first.tolist()
    ]
    sizes = np.array([len(route) for route in routes], np.int64)
    rows = np.array([row for route in routes for row in route], np.int64).reshape(-1, 3)
    flow, place = ragged(sizes[inverse.reshape(-1)])
    at = ends(sizes)[inverse.reshape(-1)][flow] + place
    order = np.argsort(rows[at, 0], kind="stable")
    at, count = at[order], len(at)
    zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    return Flows(line[flow[order]], rows[at, 0], rows[at, 2], rows[at, 1], zeros, ones)


def _nearest(holders: Ints, rank: int, ranks: Ranks, sets: RankSets) -> tuple[int, int]:
    """(set of the nearest holders, link) of one needer that has a holder in its domain."""
    if rank in holders:
        return rank, NEAR_LOCAL
    same = holders[ranks.node[holders] == ranks.node[rank]]
    if len(same):
        return sets.add(same), NEAR_PEER
    return sets.add(holders[ranks.domain[holders] == ranks.domain[rank]]), NEAR_FABRIC
