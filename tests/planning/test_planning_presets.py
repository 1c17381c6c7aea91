"""Every preset: what it moves, how evenly, and how near to the bound it is expected to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from preset_counts import bytes_by_domain

from refitd.layout.presets import PRESETS
from refitd.plan import SidePlan, plan_sides
from refitd.planning.cases import preset_case

LARGE = [name for name in PRESETS if name.endswith("-2048")]
SMALL = [name for name in PRESETS if name not in LARGE]
NAMES = [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_crosses_once_and_nics_are_even(name: str) -> None:
    """Coverage is exact, the network carries what each domain lacks once, and the busiest NIC is near the bound."""
    (source, destination), topology = preset_case(name)
    plan = plan_sides(source, destination, topology)
    report = plan.report
    needed = bytes_by_domain(destination)
    assert not set(source.domains) & set(destination.domains)
    assert report["coverage"] == "exact"
    assert report["network_bytes"] == report["network_bytes_min"] == sum(needed.values())
    assert _entering(plan) == needed
    assert 0 <= report["relay_bytes"] < report["network_bytes"] // 10
    assert report["ingress_max_over_bound"] <= 1.05
    assert report["egress_max_over_bound"] <= 1.05
    assert report["bound_seconds"] <= report["est_seconds"] <= 1.15 * report["bound_seconds"]


def _entering(plan: SidePlan) -> dict[str, int]:
    """Network bytes into each domain that gets any."""
    domains, matrix = plan.links()
    return {name: int(nbytes) for name, nbytes in zip(domains, matrix.sum(axis=0), strict=True) if nbytes}


def test_a_model_of_a_megabyte_is_ruled_by_latency() -> None:
    """`tiny` at a sixteenth of its width: a NIC's 256 kB take 5 us and one message 30, so nothing is relayed to balance
    what sources send, and the time is that of four messages."""
    small = replace(PRESETS["tiny"], model="tiny")
    topology = preset_case("tiny")[1]
    report = plan_sides(*small.sides(), topology).report
    assert report["egress_max_over_bound"] == pytest.approx(294_176 / 255_760)
    assert report["relay_bytes"] == 0
    assert 4 * topology.network.latency / 1e9 < report["est_seconds"] < 5 * topology.network.latency / 1e9


def test_a_topology_places_the_ranks_of_a_preset_anew() -> None:
    """The same model on hosts of eight: 32 domains where GB200 has 4, and each gets what its ranks need."""
    (source, destination), topology = preset_case("deepseek-v3-gb200", "h100-nvl8")
    own = preset_case("deepseek-v3-gb200")[0][1]
    assert (len(set(destination.domains)), len(set(own.domains)), topology.name) == (32, 4, "h100-nvl8")
    moved = plan_sides(source, destination, topology).report["network_bytes"]
    assert moved == sum(bytes_by_domain(destination).values()) > sum(bytes_by_domain(own).values())
