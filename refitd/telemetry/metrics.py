"""What a daemon counts, in a registry of its own. The number of series is fixed by the lists below.

No label ever carries a version, a step, a parameter, a peer or an error's text. Label values that are in none of the
lists are counted as ``other``. All methods may be called from any thread and cost about a microsecond. What others own,
and what comes and goes, is asked at each scrape: see `refitd.telemetry.collector`.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Mapping
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

from refitd.failpoints import PHASES
from refitd.telemetry.collector import FactsCollector
from refitd.telemetry.facts import NodeFacts
from refitd.telemetry.history import History, Refit
from refitd.telemetry.pulse import Pulse

OUTCOMES = ("ok", "failed", "superseded", "skipped")
LINKS = ("network", "fabric", "peer", "local")
GPUS = (*map(str, range(16)), "other")
CAUSES = ("join", "leave", "death", "failure", "generation", "other")
METHODS = ("init", "shrink", "grow", "reconnect", "other")
PLANS = ("whole", "remainder")
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


class Metrics:
    """The metrics of one daemon, the history of its refits, and the pulse of its loops."""

    def __init__(self, process: bool = True) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.history = History()
        self.pulse = Pulse()
        self._slots: dict[str, str] = {}
        self._lock = threading.Lock()
        self._refits(self.registry)
        self._traffic(self.registry)
        self._lanes(self.registry)
        self._hook_and_store(self.registry)
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def watch(self, facts: Callable[[], NodeFacts]) -> None:
        """Ask ``facts`` at each scrape. It may raise TimeoutError: that scrape says that the loop does not answer."""
        self.registry.register(FactsCollector(facts))

    # Refits.

    def phase(self, phase: str, seconds: float, outcome: str = "ok", of: Refit | None = None) -> None:
        """A refit has spent ``seconds`` in ``phase``, one of the six. Raises KeyError for a phase that is none."""
        self._durations[phase, outcome if outcome in OUTCOMES else "failed"].observe(seconds)
        if of:
            self.history.phase(of, phase, seconds)

    def refit(self, outcome: str, of: Refit | None = None, why: str = "") -> None:
        """A replica's refit ended: ``ok``, ``failed`` (it is tried again), ``superseded`` or ``skipped``."""
        self._outcomes[outcome if outcome in OUTCOMES else "failed"].inc()
        if of and outcome == "failed":
            self.history.failed(of, why)
        elif of:
            self.history.ended(of, outcome, why)

    def interrupted(self, of: Refit, why: str) -> None:
        """An attempt of this node came to nothing because somebody else's did; where it began, it is counted."""
        self.history.failed(of, why)

    def fault(self, job: str, what: str) -> None:
        """Something broke here, in one sentence that names it."""
        self.history.fault(job, what)

    def ended(self, of: Refit, outcome: str, why: str = "") -> None:
        """A refit has ended for this node, whoever counts it."""
        self.history.ended(of, outcome, why)

    def attempt(self, plan: str) -> None:
        """An attempt began, of the ``whole`` plan or of the ``remainder`` of one."""
        self._attempts[plan].inc()

    def planned(self, plan: str, seconds: float) -> None:
        """A plan, ``whole`` or ``remainder``, was made in ``seconds``."""
        self._planning[plan].observe(seconds)

    # Bytes.

    def rank_came(self, rank: str, gpu: int | None = None) -> None:
        """A rank is registered. Its bytes count under its GPU's number, or under the lowest number that is free."""
        with self._lock:
            free = (number for number in GPUS if number not in self._slots.values())
            label = next(free, "other") if gpu is None else str(gpu)
            self._slots[rank] = label if label in GPUS else "other"
        for link in LINKS:
            self.transferred(link, rank=rank)  # so that rate() sees its first bytes

    def rank_gone(self, rank: str) -> None:
        """A rank is not registered any more; its number is free."""
        with self._lock:
            self._slots.pop(rank, None)

    def transferred(self, link: str, rx: int = 0, tx: int = 0, rank: str = "", of: Refit | None = None) -> None:
        """Payload bytes that a rank moved over one of LINKS. Raises KeyError for another link."""
        gpu = self._slots.get(rank, "other")
        if link not in LINKS:
            raise KeyError(link)
        self._bytes.labels(gpu, link, "rx").inc(rx)
        self._bytes.labels(gpu, link, "tx").inc(tx)
        if of and rx:
            self.history.moved(of, link, rx)

    def achieved(self, seconds: float, moved: Mapping[str, int]) -> None:
        """A transfer brought in ``moved`` bytes, by link, in ``seconds``."""
        for link, nbytes in moved.items():
            if seconds > 0 and nbytes:
                self._achieved[link].set(nbytes / seconds)

    # Lanes and movers.

    def lane_turned(self, cause: str) -> None:
        """A lane got new members or sources because of one of CAUSES."""
        _pick(self._turns, cause).inc()

    def repaired(self, method: str, seconds: float) -> None:
        """A lane's communicator was made again, after ``seconds``, by one of METHODS (TCP can only reconnect)."""
        _pick(self._repairs, method).observe(seconds)

    def mover_restarted(self) -> None:
        """A mover was killed, or died, and was started anew."""
        self._restarts.inc()

    # Hook, store, loops.

    def hook_error(self, code: str) -> None:
        """A client got an error answer."""
        _pick(self._errors, code).inc()

    def store_up(self, up: bool) -> None:
        """Whether the last call to the store was answered."""
        self._store_up.set(up)

    def reloaded(self, good: bool) -> None:
        """The configuration was read again, and was good or not."""
        self._reload.set(good)

    def beat(self, loop: str) -> None:
        """A loop of the daemon begins another pass."""
        self.pulse.beat(loop)

    def over(self, loop: str) -> None:
        """A loop of the daemon has ended."""
        self.pulse.end(loop)

    # What there is.

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
        attempts = Counter("refitd_attempts_total", "Executions of a plan that began.", ("plan",), registry=registry)
        self._attempts = {p: attempts.labels(p) for p in PLANS}
        planning = Histogram(
            "refitd_plan_duration_seconds", "Time to make a plan.", ("plan",), registry=registry, buckets=BUCKETS
        )
        self._planning = {p: planning.labels(p) for p in PLANS}

    def _traffic(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter(
            "refitd_transfer_bytes_total",
            "Payload bytes of weights moved.",
            ("gpu", "link", "direction"),
            registry=registry,
        )
        achieved = Gauge(
            "refitd_achieved_bandwidth_bytes_per_second",
            "What the last transfer of a lane brought in, over the time that it took.",
            ("link",),
            registry=registry,
        )
        self._achieved = {link: achieved.labels(link) for link in LINKS}

    def _lanes(self, registry: CollectorRegistry) -> None:
        turns = Counter(
            "refitd_lane_turns_total", "Changes of a lane's members or sources.", ("cause",), registry=registry
        )
        self._turns = {c: turns.labels(c) for c in CAUSES}
        repairs = Histogram(
            "refitd_communicator_repair_duration_seconds",
            "Time from a lane's turn until its communicator works again.",
            ("method",),
            registry=registry,
            buckets=BUCKETS,
        )
        self._repairs = {m: repairs.labels(m) for m in METHODS}
        self._restarts = Counter("refitd_mover_restarts_total", "Movers started anew after a death.", registry=registry)

    def _hook_and_store(self, registry: CollectorRegistry) -> None:
        errors = Counter(
            "refitd_hook_errors_total", "Error answers to clients of the hook.", ("code",), registry=registry
        )
        self._errors = {c: errors.labels(c) for c in CODES}
        self._store_up = Gauge("refitd_store_up", "Whether the store answered the last call.", registry=registry)
        self._reload = Gauge(
            "refitd_config_last_reload_successful",
            "Whether the configuration was good when it was last read.",
            registry=registry,
        )
        self._reload.set(1)
        info = Gauge("refitd_build_info", "The running build; always 1.", ("version",), registry=registry)
        info.labels(version()).set(1)


def _pick(children: Mapping[str, V], label: str) -> V:
    return children.get(label) or children["other"]


def version() -> str:
    """The version of the package that runs."""
    try:
        return importlib.metadata.version("refitd")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
