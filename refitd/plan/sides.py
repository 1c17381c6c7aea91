"""`plan_sides`: a whole plan between two factored sides, with its proof, from which each rank's program follows."""

from __future__ import annotations

import numpy as np

from refitd.errors import InputError
from refitd.layout.box import Ints
from refitd.layout.side import Side
from refitd.plan.axes import AxesPlan, by_axes
from refitd.plan.content import Content, make_content, plan_digest
from refitd.plan.cost import hop, network_bounds, slowest
from refitd.plan.cutting import Cutting, cut, demand
from refitd.plan.flows import NET, Flows
from refitd.plan.lines import Lines
from refitd.plan.loads import count_loads
from refitd.plan.proof_lines import prove_cuts
from refitd.plan.ranksets import SetTable
from refitd.plan.relays import choose, depth, parcel_out, relayable
from refitd.plan.share import bound, pour
from refitd.plan.side_plan import Core, SidePlan
from refitd.plan.spans import WHOLE, window
from refitd.plan.topology import Topology

SIDE_BUCKET_BYTES = 32 << 20
ROUNDS = 4
SMALL = 1 << 30  # bytes to move; a plan of less is made twice, with shares of at least `FINE` bytes too
FINE = 512
MIN_BUCKET_BYTES = 16  # a bucket is filled in halves, and each holds one element of the widest dtype
_TOLERANCE = 100  # relay where the busiest NIC has a hundredth more than the bound


def plan_sides(
    source: Side, destination: Side, topology: Topology, relays: bool = True, bucket_bytes: int = SIDE_BUCKET_BYTES
) -> SidePlan:
    """Plan and prove a refit from ``source`` to ``destination``.

    ``relays``: destination ranks may send on what they have, where the sources' NICs would take longer. Raises
    InputError (ranks, bucket size), MismatchError (the sides differ), PlanError (a region without holder), ProofError
    (never, unless the planner is wrong).
    """
    if type(bucket_bytes) is not int or bucket_bytes < MIN_BUCKET_BYTES:
        raise InputError("bucket_bytes", f"an int of at least {MIN_BUCKET_BYTES}", repr(bucket_bytes))
    simple = by_axes(source, destination)
    if simple is not None:
        return AxesPlan(
            simple, topology, bucket_bytes, lambda: make_core(source, destination, topology, relays, bucket_bytes)
        )
    core = make_core(source, destination, topology, relays, bucket_bytes)
    return SidePlan(plan_digest(core.content, core.cutting, core.part, ()), topology, bucket_bytes, core)


def make_core(source: Side, destination: Side, topology: Topology, relays: bool, bucket_bytes: int) -> Core:
    """Everything of a plan but its digest, proven. Raises what `plan_sides` raises."""
    content = make_content(source, destination)
    cutting, part, times = _fastest(content, topology, relays, bucket_bytes)
    sets = content.sets.table()
    due = content.lines.nbytes * sets.size()[content.lines.needers]
    prove_cuts(content.lines, cutting, sets, content.ranks, due, np.zeros(0, np.int64))
    return Core(content, cutting, part, times)


def _fastest(
    content: Content, topology: Topology, relays: bool, bucket_bytes: int
) -> tuple[Cutting, Ints, tuple[int, int] | None]:
    """The way that takes least time, in integers: with relays or directly, in shares worth a message or finer ones.

    Finer shares are tried in small plans only. Going directly is not tried where the bytes of its busiest source
    alone take longer than all of the way with relays.
    """
    fine = [FINE] if int(content.lines.nbytes[content.flows.line].sum()) < SMALL else []

    def best(relayed: bool) -> tuple[int, Cutting, Ints]:
        made = [share_out(content, topology, relayed, least) for least in (*fine, None)]
        priced = [(cost(*each, content, topology, bucket_bytes), *each) for each in made]
        return min(priced, key=lambda each: each[0])

    first = best(relays)
    if not first[2].any() or _least_direct(content, topology) > first[0]:
        return first[1], first[2], None
    direct = best(relayed=False)
    return *(direct if direct[0] <= first[0] else first)[1:], (first[0], direct[0])


def _least_direct(content: Content, topology: Topology) -> int:
    """Nanoseconds of the busiest source's bytes without relays; no cut makes it faster."""
    flows, sets = content.flows, content.sets.table()
    network = np.flatnonzero(flows.link == NET)
    asked = demand(flows.holders, content.lines.nbytes[flows.line], network, len(sets.first) - 1)
    load = pour(asked, sets, len(content.ranks.keys), topology.least_share).load
    return bound(asked, sets, load) * 1000 // max(topology.entry_bandwidth // 10**6, 1)


def cost(cutting: Cutting, part: Ints, content: Content, topology: Topology, bucket_bytes: int) -> int:
    """Nanoseconds of the slowest rank and of the last bucket's way through relays, in integers, so that every processor
    chooses alike."""
    loads = count_loads(cutting, content.sets.table(), content.ranks)
    return slowest(loads, topology) + depth(cutting.parcels, part) * hop(loads, topology, bucket_bytes)


def share_out(content: Content, topology: Topology, relays: bool, least: int | None = None) -> tuple[Cutting, Ints]:
    """Cut the flows into shares of at least ``least`` bytes (default: those worth a message); and what part of each
    line goes by relay, in thousandths."""
    lines, flows, ranks = content.lines, content.flows, len(content.ranks.keys)
    sets = content.sets.table()
    part = np.zeros(len(lines.holders), np.int64)
    if relays and (relayable(lines, flows) > 0).any():
        part = _relayed(lines, flows, sets, ranks, topology.least_share)
    spans, parcels = parcel_out(lines, flows, 0, part)
    return cut(lines, spans, parcels, sets, ranks, least or topology.least_share), part


def _relayed(lines: Lines, flows: Flows, sets: SetTable, ranks: int, least: int) -> Ints:
    """The part of each line to relay, so that the busiest source is near the bound."""
    part = np.zeros(len(lines.holders), np.int64)
    network, count = np.flatnonzero(flows.link == NET), len(sets.first) - 1
    nbytes = lines.nbytes[flows.line]
    ingress = pour(demand(flows.needers, nbytes, network, count), sets, ranks, least)
    egress = pour(demand(flows.holders, nbytes, network, count), sets, ranks, least)
    landed = np.zeros(len(flows.line), dtype=bool)
    target = network_bounds(flows, nbytes, landed, (egress.load, ingress.load), sets).egress
    for _ in range(ROUNDS):
        over = int(egress.load.max(initial=0)) - target
        if over <= target // _TOLERANCE or over < least:  # a relay costs messages, too
            break
        more = choose(lines, flows, sets, egress, target, part)
        if (more == part).all():
            break
        part = more
        direct = window(lines, 0, WHOLE - part).nbytes()[flows.line]
        egress = pour(demand(flows.holders, direct, network, count), sets, ranks, least)
    return part
