"""Bounds that no plan can beat, and what a plan is expected to take. Nothing here enters the digest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Bools, Ints
from refitd.plan.canon import Ranks
from refitd.plan.flows import NET, Flows
from refitd.plan.loads import Loads
from refitd.plan.ranksets import SetTable
from refitd.plan.share import bound
from refitd.plan.topology import Topology


class Bounds(NamedTuple):
    """Least bytes of the busiest NIC: ``ingress``; ``egress`` where destinations may relay; ``direct`` where not."""

    egress: int
    ingress: int
    direct: int


def network_bounds(flows: Flows, nbytes: Ints, landed: Bools, loads: tuple[Ints, Ints], sets: SetTable) -> Bounds:
    """Bounds of flows of ``nbytes`` each (docs/planning.md proves them). ``landed``: flows that any of several could
    send. ``loads``: bytes of every rank out and in, by which ranks are ordered.

    Ingress: for any ranks T, the bytes that only ranks of T may bring in, over the number of T. Egress with relays: at
    least the ingress bound; all network bytes over all NICs that may send; and, for any T, the bytes of which only T
    has copies, once, over the number of T. Direct: the same with every copy counted.
    """
    count = len(sets.first) - 1
    network = flows.link == NET
    into, out, once = (np.zeros(count, np.int64) for _ in range(3))
    np.add.at(into, flows.needers[network], nbytes[network])
    held = network & ~landed
    np.add.at(out, flows.holders[held], nbytes[held])
    first = np.flatnonzero(held & (flows.place == 0))
    np.add.at(once, flows.holders[first], nbytes[first])
    ingress = bound(into, sets, loads[1])
    able = np.zeros(len(loads[1]), dtype=bool)
    able[sets.member[((into + out) > 0)[sets.owner()]]] = True
    mean = -(-int(nbytes[network].sum()) // max(int(able.sum()), 1))
    egress = max(ingress, mean, bound(once, sets, loads[0]))
    return Bounds(egress, ingress, bound(out, sets, loads[0]))


def near_bound(loads: Loads, ranks: Ranks) -> int:
    """Bytes that the busiest domain must move inside itself, over its ranks."""
    total, size = np.zeros(len(ranks.domains), np.int64), np.bincount(ranks.domain, minlength=len(ranks.domains))
    np.add.at(total, ranks.domain, loads.near_in)
    return int((-(-total // np.maximum(size, 1))).max(initial=0))


def slowest(loads: Loads, topology: Topology) -> int:
    """Nanoseconds of the slowest rank's bytes and messages on its busiest link."""
    wire, near = topology.entry_bandwidth, min(topology.peer.bandwidth, topology.fabric.bandwidth)
    wait = topology.network.latency
    out, into = loads.egress * 1000 // max(wire // 10**6, 1), loads.ingress * 1000 // max(wire // 10**6, 1)
    inside = np.maximum(loads.near_out, loads.near_in) * 1000 // max(near // 10**6, 1)
    return int(np.max([out + loads.sent * wait, into + loads.received * wait, inside], initial=0))


def hop(loads: Loads, topology: Topology, bucket_bytes: int) -> int:
    """Nanoseconds that a relay holds the last bucket back: one bucket, or the mean message where that is smaller."""
    message = int((-(-loads.ingress // np.maximum(loads.received, 1))).max(initial=0))
    return min(bucket_bytes, message) * 1000 // max(topology.entry_bandwidth // 10**6, 1) + topology.network.latency


def estimate(loads: Loads, topology: Topology, depth: int, bucket_bytes: int) -> float:
    """Seconds: the slowest rank's bytes and messages on its busiest link, and the last bucket's way through a relay."""
    near = min(topology.peer.bandwidth, topology.fabric.bandwidth)
    last = min(bucket_bytes, int(loads.ingress.max(initial=0)))
    inside = int(loads.near_in.max(initial=0))
    tail = topology.peer.latency / 1e9 + min(last, inside) / near if inside else 0.0
    return (slowest(loads, topology) + depth * hop(loads, topology, bucket_bytes)) / 1e9 + tail


def bound_seconds(bounds: Bounds, near: int, topology: Topology) -> float:
    """The largest bound over its link's bandwidth."""
    fast = max(topology.peer.bandwidth, topology.fabric.bandwidth)
    return max(max(bounds.egress, bounds.ingress) / topology.entry_bandwidth, near / fast)


def gather_broadcast(
    total: int, held: int, domains: int, sizes: tuple[int, int], topology: Topology
) -> tuple[int, float]:
    """Bytes and seconds of gathering the model of ``total`` bytes in one source domain, which holds ``held`` of it,
    and broadcasting it to ``domains`` destination domains. ``sizes``: ranks of a source and a destination domain.

    One domain's NICs take the model in, then its copy goes to each domain over all its NICs, one pipelined broadcast.
    """
    if not domains:
        return 0, total / topology.peer.bandwidth
    gather, out = total - held, min(sizes) * topology.entry_bandwidth
    return gather + total * domains, gather / (sizes[0] * topology.entry_bandwidth) + total / out
