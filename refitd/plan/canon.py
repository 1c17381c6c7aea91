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
    place = {key: where for key, *where in zip(source.ranks, source.nodes, source.domains, strict=True)}
    for key, *where in zip(destination.ranks, destination.nodes, destination.domains, strict=True):
        if place.setdefault(key, where) != where:
            raise InputError(f"rank {key}", f"one place: {place[key]}", str(where))
    if len(set(source.ranks)) < len(source.ranks) or len(set(destination.ranks)) < len(destination.ranks):
        raise InputError("rank keys", "each rank once on a side", "one that is there twice")
    keys = tuple(sorted(place))
    number = {key: i for i, key in enumerate(keys)}
    # A node is a host of one domain: hosts of one name in two domains are two.
    nodes = [f"{place[key][1]}/{place[key][0]}" for key in keys]
    domains = [place[key][1] for key in keys]
    node_names, domain_names = tuple(sorted(set(nodes))), tuple(sorted(set(domains)))
    node_index = {name: i for i, name in enumerate(node_names)}
    domain_index = {name: i for i, name in enumerate(domain_names)}
    return Ranks(
        keys,
        np.array([node_index[name] for name in nodes], np.int64),
        np.array([domain_index[name] for name in domains], np.int64),
        node_names,
        domain_names,
        np.array([number[key] for key in source.ranks], np.int64),
        np.array([number[key] for key in destination.ranks], np.int64),
    )
