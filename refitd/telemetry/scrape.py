"""A daemon on an 8-GPU node at its busiest: eight ranks, four jobs, every label value in use; and how many series."""

from __future__ import annotations

import dataclasses
import time

from refitd.failpoints import PHASES
from refitd.telemetry.collector import REQUESTS, SIDES
from refitd.telemetry.facts import JobFacts, NodeFacts, ReplicaFacts
from refitd.telemetry.metrics import CAUSES, CODES, LINKS, METHODS, OUTCOMES, PLANS, Metrics

JOBS, GPUS = 4, 8


def busy_node() -> Metrics:
    """The metrics of a daemon that leads `JOBS` jobs, each with a replica for every one of `GPUS` GPUs."""
    metrics = Metrics()
    metrics.watch(lambda: busy_facts(time.time()))
    for gpu in range(GPUS):
        metrics.rank_came(f"engine/r{gpu}/0", gpu)
        for link in LINKS:
            metrics.transferred(link, 1 << 30, 1 << 20, rank=f"engine/r{gpu}/0")
    for phase in PHASES:
        for outcome in OUTCOMES:
            metrics.phase(phase, 0.2, outcome)
    for cause in CAUSES:
        metrics.lane_turned(cause)
    for method in METHODS:
        metrics.repaired(method, 0.6)
    for code in CODES:
        metrics.hook_error(code)
    for plan in PLANS:
        metrics.attempt(plan)
        metrics.planned(plan, 0.05)
    metrics.achieved(0.5, dict.fromkeys(LINKS, 1 << 30))
    return metrics


def busy_facts(now: float) -> NodeFacts:
    """Four jobs, each with eight replicas that lead here."""
    jobs = [f"job{number}" for number in range(JOBS)]
    both = {"trainer": GPUS, "engine": GPUS}
    return NodeFacts(
        jobs=tuple(
            JobFacts(
                job, leads=True, joined=True, paused=False, generation=1, revision=900, step=70, lease_held=True,
                contact_at=now, members={"active": 1000, "draining": 1, "parked": 1},
                replicas={"ready": 1000, "behind": 24}, loans=both, movers={"running": GPUS, "starting": 0},
            )
            for job in jobs
        ),
        replicas=tuple(ReplicaFacts(job, f"r{gpu}", 70, 900, 0, True) for job in jobs for gpu in range(GPUS)),
        connections=dict.fromkeys(SIDES, GPUS),
        store_requests=dict.fromkeys(REQUESTS, 100000),
        planned_bandwidth=dict.fromkeys(LINKS, 5e10),
    )  # fmt: skip


def series(metrics: Metrics) -> int:
    """Samples in one scrape."""
    return sum(len(family.samples) for family in metrics.registry.collect())


def shares() -> dict[str, int]:
    """Series by what they come with: a ``node``, its ``bytes``, a ``job`` on a node, a ``replica``, a ``leader``."""
    facts = busy_facts(1.0)
    job = facts.jobs[0]
    follower = dataclasses.replace(job, leads=False, members={}, replicas={})
    empty = _series_of(dataclasses.replace(facts, jobs=(), replicas=()))
    moved = GPUS * len(LINKS) * 2
    alone = _series_of(dataclasses.replace(facts, jobs=(follower,), replicas=()))
    with_replica = _series_of(dataclasses.replace(facts, jobs=(follower,), replicas=facts.replicas[:1]))
    leading = _series_of(dataclasses.replace(facts, jobs=(job,), replicas=()))
    return {
        "node": empty - moved, "bytes": moved, "job": alone - empty, "replica": with_replica - alone,
        "leader": leading - alone,
    }  # fmt: skip


def _series_of(facts: NodeFacts) -> int:
    metrics = Metrics()
    metrics.watch(lambda: facts)
    for gpu in range(GPUS):
        metrics.rank_came(f"engine/r{gpu}/0", gpu)
    return series(metrics)
