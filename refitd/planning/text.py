"""A plan for people: a table, its reasons, and bytes between domains."""

from __future__ import annotations

from collections.abc import Sequence

from refitd.layout.box import Ints
from refitd.plan import SidePlan
from refitd.planning.outcome import Outcome
from refitd.planning.traffic import traffic

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_MEDIA = ("network", "fabric", "peer")


def size(nbytes: int) -> str:
    """Bytes in a unit that people read: three digits and more."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3f} {name}"
    return f"{nbytes} B"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def table(title: str, outcome: Outcome) -> str:
    """All that the report says, a line each, then the reasons of the plan."""
    report, plan = outcome.report(), outcome.plan
    rows = [
        ("topology", _topology(plan)),
        ("tensors, ranks", f"{report['tensors']}, {report['ranks']}"),
        ("planned and proven in", seconds(outcome.plan_seconds)),
        ("one rank's program in", seconds(outcome.program_seconds)),
        ("over the network", f"{size(report['network_bytes'])} (least: {size(report['network_bytes_min'])})"),
        ("of it sent on by engines", size(report["relay_bytes"])),
        ("inside nodes", size(report["peer_bytes"])),
        ("inside domains, between nodes", size(plan.totals["fabric_bytes"])),
        ("busiest sender", f"{report['egress_max_over_bound']:.4f} of the bound {size(plan.bounds.egress)}"),
        ("busiest receiver", f"{report['ingress_max_over_bound']:.4f} of the bound {size(plan.bounds.ingress)}"),
        ("expected time", f"{seconds(report['est_seconds'])} (bound: {seconds(report['bound_seconds'])}), modelled"),
        ("gather, then broadcast", _rival(report["gather_broadcast_bytes"], report["gather_broadcast_est_seconds"])),
        ("coverage", report["coverage"]),
        ("digest", report["digest"]),
    ]
    if outcome.rest is not None:
        rows += [
            ("planned anew after the loss in", seconds(outcome.replan_seconds)),
            ("remaining", size(report["remaining_bytes"])),
            ("held by no rank that is left", size(report["unrecoverable_bytes"])),
        ]
    reasons = plan.reasons if outcome.rest is None else (*plan.reasons, *outcome.rest.reasons[-1:])
    return "\n".join([title, *_aligned(rows), "why", *(f"  {reason}" for reason in reasons)])


def _topology(plan: SidePlan) -> str:
    links = plan.topology
    bandwidths = (links.entry_bandwidth, links.fabric.bandwidth, links.peer.bandwidth)
    speeds = ", ".join(f"{name} {speed / 1e9:g} GB/s" for name, speed in zip(_MEDIA, bandwidths, strict=True))
    return f"{links.name}: {speeds} a GPU and direction"


def _rival(nbytes: int, took: float) -> str:
    return f"{size(nbytes)}, {seconds(took)}, modelled"


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def links_text(domains: Sequence[str], matrix: Ints) -> str:
    """Bytes from each domain (row) to each (column); rows and columns without traffic are left out."""
    senders, receivers, nbytes = traffic(domains, matrix)
    if not senders:
        return "no bytes between domains"
    cells = [["from / to", *receivers]]
    cells += [[name, *map(str, row)] for name, row in zip(senders, nbytes.tolist(), strict=True)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
    lines = ("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(["bytes between domains", *lines])
