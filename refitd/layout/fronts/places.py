"""Where ranks run: keys, nodes and domains in rank order."""

from __future__ import annotations

from typing import NamedTuple

from refitd.errors import InputError


class Hosts(NamedTuple):
    """Ranks of one node and of one domain. A domain is a node, or several nodes joined by NVLink."""

    node: int
    domain: int


def places(keys: list[str], name: str, hosts: Hosts) -> list[tuple[str, str, str]]:
    """(key, node, domain) of each rank: nodes and domains are filled in rank order. ``name`` tells the sides apart."""
    if hosts.node < 1 or hosts.domain < 1 or hosts.domain % hosts.node:
        raise InputError("hosts", "a node of at least one rank and a domain of whole nodes", str(tuple(hosts)))
    return [(key, f"{name}-n{i // hosts.node}", f"{name}-d{i // hosts.domain}") for i, key in enumerate(keys)]


def trainer_keys(world: int, run: str = "run") -> list[str]:
    """Rank keys of a trainer."""
    return [f"trainer/{run}/{rank}" for rank in range(world)]


def engine_keys(replicas: int, world: int) -> list[str]:
    """Rank keys of engines: replica by replica."""
    return [f"engine/r{replica}/{rank}" for replica in range(replicas) for rank in range(world)]
