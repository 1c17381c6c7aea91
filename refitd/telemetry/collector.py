"""Gauges of what others own, asked at each scrape: a replica, a job, a client that is gone takes its series with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from refitd.telemetry.facts import JobFacts, NodeFacts, ReplicaFacts

SIDES = ("trainer", "engine", "admin")
REQUESTS = ("get", "list", "put", "txn", "grant", "keepalive", "revoke", "watch", "compact", "login")

JOB = "refit_job"  # not "job": that label is the scraper's own, and it would rename ours
Rows = Iterable[tuple[tuple[str, ...], float]]


class FactsCollector(Collector):
    """Asks ``facts`` once a scrape. A daemon whose loop does not answer says only that."""

    def __init__(self, facts: Callable[[], NodeFacts]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples too, so that their names are always there."""
        try:
            facts, answers = self._facts(), 1.0
        except TimeoutError:
            facts, answers = NodeFacts(), 0.0
        yield _gauge("refitd_loop_up", "Whether the daemon's loop answered this scrape.", (), [((), answers)])
        if answers:
            yield from _node(facts)
        yield from _replicas(facts.replicas)
        yield from _jobs(facts.jobs)


def _node(facts: NodeFacts) -> Iterator[Metric]:
    yield _gauge(
        "refitd_hook_connections",
        "Clients connected to the hook.",
        ("side",),
        [((side,), facts.connections.get(side, 0)) for side in SIDES],
    )
    yield _counter(
        "refitd_store_requests", "Requests sent to the store.", ("kind",), _known(facts.store_requests, REQUESTS)
    )
    yield _gauge(
        "refitd_planned_bandwidth_bytes_per_second",
        "What plans count on, where it is known.",
        ("link",),
        [((link,), value) for link, value in facts.planned_bandwidth.items()],
    )


def _replicas(replicas: tuple[ReplicaFacts, ...]) -> Iterator[Metric]:
    names = (JOB, "replica")
    where = [(fact, (fact.job, fact.replica)) for fact in replicas]
    yield _gauge(
        "refitd_replica_step", "Training step that a replica serves.", names, [(key, fact.step) for fact, key in where]
    )
    yield _gauge(
        "refitd_replica_revision",
        "Revision of the publication that a replica serves.",
        names,
        [(key, fact.revision) for fact, key in where],
    )
    yield _gauge(
        "refitd_replica_lag",
        "Publications that a replica is behind the newest of its generation.",
        names,
        [(key, fact.lag) for fact, key in where if fact.lag is not None],
    )
    yield _gauge(
        "refitd_replica_ready",
        "Whether a replica serves weights that are new enough.",
        names,
        [(key, fact.ready) for fact, key in where],
    )


def _jobs(jobs: tuple[JobFacts, ...]) -> Iterator[Metric]:
    def plain(name: str, words: str, value: Callable[[JobFacts], float]) -> Metric:
        return _gauge(name, words, (JOB,), [((fact.job,), value(fact)) for fact in jobs])

    yield plain("refitd_is_leader", "Whether this node leads the job.", lambda fact: fact.leads)
    yield plain("refitd_is_member", "Whether the job knows this node as a member.", lambda fact: fact.joined)
    yield plain("refitd_job_paused", "Whether an operator has paused the job.", lambda fact: fact.paused)
    yield plain("refitd_generation", "Complete trainer runs of the job so far.", lambda fact: fact.generation)
    yield plain("refitd_publication_revision", "Revision of the newest publication.", lambda fact: fact.revision)
    yield plain("refitd_publication_step", "Training step of the newest publication.", lambda fact: fact.step)
    yield plain("refitd_store_lease_held", "Whether this node's lease surely stands.", lambda fact: fact.lease_held)
    yield _gauge(
        "refitd_store_last_contact_timestamp_seconds",
        "When the store last renewed this node's lease, by this node's clock.",
        (JOB,),
        [((fact.job,), fact.contact_at) for fact in jobs if fact.contact_at],  # without a lease there is no such time
    )
    yield _by_state(jobs, "refitd_members", "Nodes of the job, as its leader sees them.", "state", lambda f: f.members)
    yield _by_state(
        jobs, "refitd_replicas", "Replicas of the job, as its leader sees them.", "state", lambda f: f.replicas
    )
    yield _by_state(jobs, "refitd_loans", "Memories that clients lend now.", "side", lambda f: f.loans)
    yield _by_state(jobs, "refitd_movers", "Movers of this node's ranks.", "state", lambda f: f.movers)


def _by_state(
    jobs: tuple[JobFacts, ...], name: str, words: str, label: str, counts: Callable[[JobFacts], Mapping[str, int]]
) -> Metric:
    rows = [((fact.job, state), float(number)) for fact in jobs for state, number in counts(fact).items()]
    return _gauge(name, words, (JOB, label), rows)


def _known(counts: Mapping[str, int], names: tuple[str, ...]) -> Rows:
    """Counts under their names, those of no known name together as ``other``."""
    yield from (((name,), counts.get(name, 0)) for name in names)
    yield ("other",), sum(number for name, number in counts.items() if name not in names)


def _gauge(name: str, words: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counter(name: str, words: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family
