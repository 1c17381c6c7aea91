"""What there is to plan: presets with the topology that they are meant for, side files, topologies by name or file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from refitd.errors import InputError
from refitd.layout.fronts.places import Hosts
from refitd.layout.presets import PRESETS, preset
from refitd.layout.side import Side
from refitd.plan import TOPOLOGIES, Topology, topology

Sides = tuple[Side, Side]


def own_topology(name: str) -> Topology:
    """The topology that a preset is named after; `tiny` and others go with ``h100-nvl8``."""
    return topology("gb200-nvl72" if "gb200" in name else "h100-nvl8")


def preset_case(name: str, topology_name: str | None = None) -> tuple[Sides, Topology]:
    """Sides and topology of a preset. Another topology also places the ranks anew, in its nodes and domains.

    Raises InputError on names that are not known.
    """
    if topology_name is None:
        return preset(name), own_topology(name)
    links = find_topology(topology_name)
    if name not in PRESETS:
        return preset(name), links
    return replace(PRESETS[name], hosts=Hosts(links.node, links.usable)).sides(), links


def find_topology(name: str) -> Topology:
    """A topology by its name, else from a file. Raises InputError where there is neither, or the file is wrong."""
    if name in TOPOLOGIES:
        return topology(name)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return topology(name)  # says which there are
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"topology file {name}", "readable text", str(error)[:80]) from None
    return Topology.from_text(text)
