"""What links ranks, how fast each class of link is, and how ranks are placed in domains. Figures are integers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from refitd.errors import InputError
from refitd.plan.program import FABRIC, NETWORK, PEER

MEDIA = (NETWORK, FABRIC, PEER)
_GROUPED = 8


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a class of link at one GPU: ``bandwidth`` in bytes a second, ``latency`` in ns a message."""

    bandwidth: int
    latency: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The links of a cluster, and how its GPUs are grouped (docs/planning.md has the file format).

    ``network`` is one NIC; a GPU has ``nics``. ``node`` GPUs share a host and its ``peer`` links; ``domain`` GPUs share
    ``fabric`` links, of which ``usable`` take part in a job (a domain of 72 gives 64 to ranks that come in powers of
    two).
    """

    name: str
    network: Link
    fabric: Link
    peer: Link
    node: int
    domain: int
    usable: int
    nics: int = 1

    def place(self, count: int, prefix: str) -> list[tuple[str, str]]:
        """(node, domain) of ``count`` ranks in order, filling the usable GPUs of one domain after the other."""
        result = []
        for rank in range(count):
            domain, within = divmod(rank, self.usable)
            result.append((f"{prefix}d{domain:04d}n{within // self.node:02d}", f"{prefix}d{domain:04d}"))
        return result

    @property
    def entry_bandwidth(self) -> int:
        """Bytes a second that one GPU moves over the network, one way."""
        return self.network.bandwidth * self.nics

    @property
    def least_share(self) -> int:
        """The least bytes of a line that are worth a message of their own: what the NIC moves in the message's time,
        over `_GROUPED`, as the messages of a rank are posted together."""
        return max(1, self.entry_bandwidth * self.network.latency // 10**9 // _GROUPED)

    @classmethod
    def from_text(cls, text: str) -> Topology:
        """From the text of a topology file, TOML or JSON. Raises InputError naming the field that is wrong."""
        try:
            document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        except ValueError as error:
            raise InputError("topology", "TOML or JSON", str(error)[:80]) from None
        return cls.from_document(document)

    @classmethod
    def from_document(cls, document: object) -> Topology:
        """From a parsed topology file. Raises InputError naming the field that is wrong."""
        if not isinstance(document, Mapping):
            raise InputError("topology", "a table", type(document).__name__)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(document) - known):
            raise InputError("topology", f"no fields but {', '.join(sorted(known))}", ", ".join(unknown))
        links = {medium: _link(f"topology {medium}", document.get(medium)) for medium in MEDIA}
        numbers = {name: _count(f"topology {name}", document.get(name)) for name in ("node", "domain")}
        usable = _count("topology usable", document.get("usable", numbers["domain"]))
        nics = _count("topology nics", document.get("nics", 1))
        name = document.get("name")
        if not isinstance(name, str):
            raise InputError("topology name", "a string", repr(name))
        if not numbers["node"] <= usable <= numbers["domain"]:
            raise InputError("topology usable", f"from {numbers['node']} to {numbers['domain']}", str(usable))
        network, fabric, peer = (links[medium] for medium in MEDIA)
        return cls(name, network, fabric, peer, numbers["node"], numbers["domain"], usable, nics)


def topology(name: str) -> Topology:
    """A topology by its name. Raises InputError for names that are not known."""
    if name not in TOPOLOGIES:
        raise InputError("topology", f"one of {', '.join(sorted(TOPOLOGIES))}, or a file", name)
    return TOPOLOGIES[name]


def _link(field: str, value: Any) -> Link:
    if not isinstance(value, Mapping) or set(value) != {"bandwidth", "latency"}:
        raise InputError(field, "a table with bandwidth (bytes a second) and latency (ns)", repr(value)[:80])
    return Link(_count(f"{field} bandwidth", value["bandwidth"]), _count(f"{field} latency", value["latency"], 0))


def _count(field: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise InputError(field, f"an integer of at least {least}", repr(value)[:80])
    return value


# Assumptions (docs/planning.md): line rates of the NICs (400 Gbit/s a GPU); NVLink as one GPU was measured to read
# another's memory on H200 (380 to 385 GB/s), and four fifths of the line rate (900 GB/s one way) on GB200, which was
# not measured; 30 us a batched NCCL operation (measured) and 5 us a peer read.
_NIC = Link(50_000_000_000, 30_000)
TOPOLOGIES: Mapping[str, Topology] = {
    t.name: t
    for t in (
        Topology("h100-nvl8", _NIC, Link(380_000_000_000, 30_000), Link(380_000_000_000, 5_000), 8, 8, 8),
        Topology("gb200-nvl72", _NIC, Link(720_000_000_000, 30_000), Link(720_000_000_000, 5_000), 4, 72, 64),
        Topology("h200-1host", _NIC, Link(380_000_000_000, 30_000), Link(380_000_000_000, 5_000), 8, 8, 8),
    )
}
