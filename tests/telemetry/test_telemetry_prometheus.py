"""A real Prometheus scrapes a busy daemon: every panel of both boards and every recording rule has data."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from refitd.demo.observe import boards
from refitd.demo.observe.prometheus import Prometheus
from refitd.demo.observe.rules import RULES, names
from refitd.failpoints import PHASES
from refitd.telemetry.http import MetricsServer
from refitd.telemetry.metrics import CAUSES, LINKS, METHODS, PLANS, Metrics
from refitd.telemetry.scrape import busy_node

SECONDS = 40.0


def numbers(prometheus: Prometheus, expr: str) -> list[float]:
    """Values of an expression now."""
    return [value for line in prometheus.query(expr) for _at, value in line.points]


def work(metrics: Metrics) -> None:
    """One more of everything that is counted."""
    for phase in PHASES:
        metrics.phase(phase, 0.3)
    for link in LINKS:
        metrics.transferred(link, 1 << 20, 1 << 20, rank="engine/r0/0")
    for cause in CAUSES:
        metrics.lane_turned(cause)
    for method in METHODS:
        metrics.repaired(method, 0.2)
    for plan in PLANS:
        metrics.planned(plan, 0.05)
    metrics.refit("ok")
    metrics.hook_error("refused")
    metrics.mover_restarted()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, as soon as it has scraped a daemon that works for a few seconds."""
    metrics = busy_node()
    server = MetricsServer("127.0.0.1", 0, metrics.registry)
    folder, address = tmp_path_factory.mktemp("prometheus"), "{}:{}".format(*server.address)
    try:
        with Prometheus(folder, RULES.read_text(), {address: address}, scrape=1) as running:
            running.wait_ready()
            _await_samples(running, metrics)
            yield running
    finally:
        server.close()


def _await_samples(prometheus: Prometheus, metrics: Metrics) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        work(metrics)
        time.sleep(0.5)
        if numbers(prometheus, "count_over_time(link_direction:refitd_transfer_bytes:rate5m[1m]) > 3"):
            return
    pytest.fail(f"Prometheus has no data after {SECONDS} s")


def test_every_panel_and_every_record_has_data(prometheus: Prometheus) -> None:
    """Each query of each panel, with Grafana's variables filled in, and each recording rule gives a number."""
    exprs = [expr for _name, expr in boards.queries()] + names(RULES.read_text(), "record")
    assert len(exprs) > 30
    assert [expr for expr in exprs if not numbers(prometheus, expr)] == []


def test_the_targets_own_labels_are_not_ours(prometheus: Prometheus) -> None:
    """Prometheus renames a label of ours that it uses itself; none has been."""
    for name in ("refitd_replica_step", "refitd_transfer_bytes_total", "refitd_members"):
        labels = {label for line in prometheus.query(name) for label in line.labels}
        assert {label for label in labels if label.startswith("exported_")} == set()
        assert {"instance", "job"} <= labels
