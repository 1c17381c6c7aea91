"""What a daemon counts, in a registry of its own. The number of series is fixed, but for two per live replica.

No label ever carries a version, a step, a parameter or a peer. Label values that are in none of the lists below are
counted as ``other``. All methods may be called from any thread and cost about a microsecond.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from refitd.failpoints import PHASES

OUTCOMES = ("ok", "failed", "superseded", "skipped")
LINKS = ("network", "peer", "local")
CAUSES = ("join", "leave", "death", "failure", "generation", "other")
CODES = (
    "protocol",
    "refused",
    "layout",
    "mismatch",
    "plan",
    "unknown_method",
    "store_unavailable",
    "store_timeout",
    "internal",
    "other",
)
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a replica of this node serves: the training ``step`` and the ``revision`` of its publication."""

    replica: str
    step: int
    revision: int


Replicas = Callable[[], Iterable[ReplicaState]]


class Metrics:
    """The metrics of one daemon. ``replicas`` is asked at each scrape, so that series vanish with their replica."""

    def __init__(self, replicas: Replicas = tuple, process: bool = True) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._refits(self.registry)
        self._hook_and_store(self.registry)
        self.registry.register(_ReplicaCollector(replicas))
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def phase(self, phase: str, seconds: float, outcome: str = "ok") -> None:
        """A refit has spent ``seconds`` in ``phase``, one of the six. Raises KeyError for a phase that is none."""
        self._durations[phase, outcome if outcome in OUTCOMES else "failed"].observe(seconds)

    def refit(self, outcome: str) -> None:
        """A replica's refit ended: ``ok``, ``failed``, ``superseded`` or ``skipped``."""
        self._outcomes[outcome if outcome in OUTCOMES else "failed"].inc()

    def transferred(self, link: str, rx: int = 0, tx: int = 0) -> None:
        """Payload bytes moved over ``network``, ``peer`` or ``local``. Raises KeyError for another link."""
        self._bytes[link, "rx"].inc(rx)
        self._bytes[link, "tx"].inc(tx)

    def lane_turned(self, cause: str) -> None:
        """A lane got new members or sources because of one of CAUSES."""
        _pick(self._turns, cause).inc()

    def mover_restarted(self) -> None:
        """A mover was killed, or died, and was started anew."""
        self._restarts.inc()

    def hook_connections(self, number: int) -> None:
        """How many clients are connected now."""
        self._connections.set(number)

    def hook_error(self, code: str) -> None:
        """A client got an error answer."""
        _pick(self._errors, code).inc()

    def store_up(self, up: bool) -> None:
        """Whether the last call to the store was answered."""
        self._store_up.set(up)

    def leader(self, is_leader: bool) -> None:
        """Whether this node leads the job."""
        self._leader.set(is_leader)

    def _refits(self, registry: CollectorRegistry) -> None:
        durations = Histogram(
            "refitd_refit_duration_seconds",
            "Time that refits spend in a phase.",
            ("phase", "outcome"),
            registry=registry,
            buckets=BUCKETS,
        )
        self._durations = {(p, o): durations.labels(p, o) for p in PHASES for o in OUTCOMES}
        refits = Counter("refitd_refits_total", "Refits of replicas that ended.", ("outcome",), registry=registry)
        self._outcomes = {o: refits.labels(o) for o in OUTCOMES}
        moved = Counter(
            "refitd_transfer_bytes_total", "Payload bytes of weights moved.", ("link", "direction"), registry=registry
        )
        self._bytes = {(link, d): moved.labels(link, d) for link in LINKS for d in ("rx", "tx")}
        turns = Counter(
            "refitd_lane_turns_total", "Changes of a lane's members or sources.", ("cause",), registry=registry
        )
        self._turns = {c: turns.labels(c) for c in CAUSES}
        self._restarts = Counter("refitd_mover_restarts_total", "Movers started anew after a death.", registry=registry)

    def _hook_and_store(self, registry: CollectorRegistry) -> None:
        self._connections = Gauge("refitd_hook_connections", "Clients connected to the hook.", registry=registry)
        errors = Counter(
            "refitd_hook_errors_total", "Error answers to clients of the hook.", ("code",), registry=registry
        )
        self._errors = {c: errors.labels(c) for c in CODES}
        self._store_up = Gauge("refitd_store_up", "Whether the store answered the last call.", registry=registry)
        self._leader = Gauge("refitd_is_leader", "Whether this node leads the job.", registry=registry)
        info = Gauge("refitd_build_info", "The running build; always 1.", ("version",), registry=registry)
        info.labels(_version()).set(1)


class _ReplicaCollector(Collector):
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        step = GaugeMetricFamily("refitd_replica_step", "Training step that a replica serves.", labels=("replica",))
        revision = GaugeMetricFamily(
            "refitd_replica_revision", "Revision of the publication that a replica serves.", labels=("replica",)
        )
        for state in self._replicas():
            step.add_metric((state.replica,), state.step)
            revision.add_metric((state.replica,), state.revision)
        yield from (step, revision)


def _pick(children: Mapping[str, V], label: str) -> V:
    return children.get(label) or children["other"]


def _version() -> str:
    try:
        return importlib.metadata.version("refitd")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
