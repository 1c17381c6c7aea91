"""Why a plan between two sides is as it is, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refitd.plan.flows import NET

if TYPE_CHECKING:
    from refitd.plan.side_plan import SidePlan


def reasons(plan: SidePlan) -> tuple[str, ...]:
    """A sentence for each choice."""
    content, totals = plan.content, plan.totals
    flows, sets = content.flows, content.sets.table()
    count = len(content.classes.dst), len(content.classes.pair), len(content.lines.holders), len(flows.line)
    found = [f"{count[0]} tensors in {count[1]} classes make {count[2]} lines and {count[3]} flows"]
    network = flows.link == NET
    if network.any():
        domains = len(np.unique(content.ranks.domain[sets.member[sets.first[flows.needers[network]]]]))
        found.append(
            f"each byte enters each of {domains} domains once: {totals['network_bytes']} bytes over the network"
        )
    if (~network).any():
        found.append("what a rank of the same domain holds is read there, from the needer itself or its node first")
    if bool((sets.size()[flows.needers[network]] > 1).any()):
        found.append(
            f"what several ranks of a domain need enters through all of them in stripes of at least "
            f"{plan.topology.least_share} bytes (less is not worth a message), then spreads inside"
        )
    return (*found, _relays(plan), *_loss(plan))


def _relays(plan: SidePlan) -> str:
    bounds, relayed, times = plan.bounds, plan.totals["relay_bytes"], plan.times
    if relayed:
        chain = f"chains of up to {plan.depth} domains" if plan.depth > 1 else "one hop"
        direct = f"; directly it would take {times[1] // 1000} us, so {times[0] // 1000} us" if times else ""
        return (
            f"{relayed} bytes go on from a domain that has them to the next ({chain}): without, the busiest source "
            f"would send at least {bounds.direct} bytes, where {bounds.egress} are enough{direct}"
        )
    if times:
        return (
            f"no relays: their messages and hops would take {times[0] // 1000} us, where going directly takes "
            f"{times[1] // 1000} us"
        )
    return (
        f"no relays: sources send at most {int(plan.loads.egress.max(initial=0))} bytes, the bound is {bounds.egress}"
    )


def _loss(plan: SidePlan) -> tuple[str, ...]:
    start = plan.cutting.start
    if start or plan.unrecoverable:
        return (f"a remainder: {start} of 1000 parts had landed; {plan.unrecoverable} bytes are held by no rank",)
    several = plan.content.flows.of.max(initial=0) > 1
    return (
        ("each domain starts at its own part of a line, so that together they soon have all of it",) if several else ()
    )
