"""``python -m refitd.telemetry.scrape``: what a scrape of an 8-GPU node's daemon costs: series, bytes, milliseconds.

The node has the facts and counts of `busy_node`: eight ranks, four jobs, and every label value used.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request

from refitd.failpoints import PHASES
from refitd.telemetry.collector import REQUESTS, SIDES
from refitd.telemetry.facts import JobFacts, NodeFacts, ReplicaFacts
from refitd.telemetry.http import MetricsServer
from refitd.telemetry.metrics import CAUSES, CODES, LINKS, METHODS, OUTCOMES, PLANS, Metrics

JOBS, GPUS, SCRAPES = 4, 8, 200


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


def main() -> int:
    """Print one JSON object. ``cpu_ms``: processor time of a scrape, the client's part too, whatever else runs."""
    metrics = busy_node()
    server = MetricsServer("127.0.0.1", 0, metrics.registry)
    times, body, spent = [], b"", time.process_time()
    for _ in range(SCRAPES):
        start = time.perf_counter()
        with urllib.request.urlopen(server.url + "/metrics", timeout=5) as answer:  # noqa: S310 - our own address
            body = answer.read()
        times.append((time.perf_counter() - start) * 1e3)
    spent = (time.process_time() - spent) / SCRAPES * 1e3
    server.close()
    cuts = statistics.quantiles(times, n=100)
    found = {
        "series": series(metrics), "bytes": len(body), "cpu_ms": round(spent, 2), "p50_ms": round(cuts[49], 2),
        "p99_ms": round(cuts[98], 2),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
