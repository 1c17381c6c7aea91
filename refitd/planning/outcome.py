"""A plan, how long it took, and its report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from refitd.errors import InputError
from refitd.layout.side import Side
from refitd.plan import SidePlan, Topology, lose, plan_sides
from refitd.planning.arguments import Lost

KEYS = (
    "plan_seconds", "program_seconds", "tensors", "ranks", "network_bytes", "network_bytes_min", "relay_bytes",
    "peer_bytes", "egress_max_over_bound", "ingress_max_over_bound", "est_seconds", "bound_seconds",
    "gather_broadcast_bytes", "gather_broadcast_est_seconds", "coverage", "digest",
)  # fmt: skip
LOSS_KEYS = ("replan_seconds", "remaining_bytes", "unrecoverable_bytes")


@dataclass(frozen=True)
class Outcome:
    """``plan``, its remainder ``rest`` where ranks are lost, and the seconds that each took."""

    plan: SidePlan
    plan_seconds: float
    program_seconds: float
    rest: SidePlan | None = None
    replan_seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        """`KEYS` of the whole plan, in this order; `LOSS_KEYS` of the remainder where there is one."""
        facts = {**self.plan.report, "plan_seconds": self.plan_seconds, "program_seconds": self.program_seconds}
        found = {key: facts[key] for key in KEYS}
        if self.rest is not None:
            facts = {**self.rest.totals, "replan_seconds": self.replan_seconds}
            found |= {key: facts[key] for key in LOSS_KEYS}
        return found


def plan_case(
    source: Side, destination: Side, topology: Topology, lost: Lost | None = None, at: float = 0.5
) -> Outcome:
    """Plan, make one program, and plan anew without the ``lost`` ranks. Raises what `plan_sides` and `lose` raise."""
    keys = lost_ranks(source, destination, lost) if lost is not None else []
    began = time.perf_counter()
    plan = plan_sides(source, destination, topology)
    planned = time.perf_counter()
    plan.program(destination.ranks[0])
    made = time.perf_counter()
    if not keys:
        return Outcome(plan, planned - began, made - planned)
    again = time.perf_counter()
    rest = lose(plan, keys, at)
    return Outcome(plan, planned - began, made - planned, rest, time.perf_counter() - again)


def lost_ranks(source: Side, destination: Side, lost: Lost) -> list[str]:
    """Keys of ranks that are given by number in rank order. Raises InputError where a side has not so many."""
    ranks = source.ranks if lost.side == "src" else destination.ranks
    if lost.numbers[-1] >= len(ranks):
        raise InputError("--lose", f"{lost.side} ranks from 0 to {len(ranks) - 1}", str(lost.numbers[-1]))
    return [ranks[number] for number in lost.numbers]
