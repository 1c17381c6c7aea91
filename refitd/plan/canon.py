"""The ranks of both sides under one numbering that does not depend on the order in which they were given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.errors import InputError
from refitd.layout.box import Ints
from refitd.layout.side import Side


class Ranks(NamedTuple):
    """All ranks by number, in the order of their keys: ``node`` and ``domain`` are indices of the sorted names.

    ``source`` and ``destination`` map a side's rank index to the number.
    """

    keys: tuple[str, ...]
    node: Ints
    domain: Ints
    nodes: tuple[str, ...]
    domains: tuple[str, ...]
    source: Ints
    destination: Ints

    def numbers(self, keys: list[str] | tuple[str, ...]) -> Ints:
        """Numbers of these keys. Raises InputError for one that is not known."""
        known = {key: i for i, key in enumerate(self.keys)}
        for key in keys:
            if key not in known:
                raise InputError("rank", "a rank of this plan", key)
        return np.array([known[key] for key in keys], np.int64)


def number_ranks(source: Side, destination: Side) -> Ranks:
    """Number the ranks. A key on both sides is one rank. Raises InputError where it is given two places."""
    holders, needers = _places(source), _places(destination)
    place = holders | needers
    for key in sorted(holders.keys() & needers.keys()) if len(place) < len(holders) + len(needers) else ():
        if holders[key] != needers[key]:
            raise InputError(f"rank {key}", f"one place: {list(holders[key])}", str(list(needers[key])))
    keys = tuple(sorted(place))
    where = list(map(place.__getitem__, keys))
    # A node is a host of one domain: hosts of one name in two domains are two.
    node_of = {pair: f"{pair[1]}/{pair[0]}" for pair in set(where)}
    nodes, domains = tuple(sorted(set(node_of.values()))), tuple(sorted({domain for _, domain in node_of}))
    by_node, by_domain, number = _index(nodes), _index(domains), _index(keys)
    pairs = {pair: i for i, pair in enumerate(node_of)}
    at = np.array(list(map(pairs.__getitem__, where)), np.int64)
    return Ranks(
        keys,
        np.array([by_node[name] for name in node_of.values()], np.int64)[at],
        np.array([by_domain[domain] for _, domain in pairs], np.int64)[at],
        nodes,
        domains,
        np.array(list(map(number.__getitem__, source.ranks)), np.int64),
        np.array(list(map(number.__getitem__, destination.ranks)), np.int64),
    )


def _places(side: Side) -> dict[str, tuple[str, str]]:
    """(node, domain) of every rank of a side."""
    place = dict(zip(side.ranks, zip(side.nodes, side.domains, strict=True), strict=True))
    if len(place) < len(side.ranks):
        raise InputError("rank keys", "each rank once on a side", "one that is there twice")
    return place


def _index(names: tuple[str, ...]) -> dict[str, int]:
    return dict(zip(names, range(len(names)), strict=True))
