"""What is counted, and how many series that makes."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client import generate_latest

from refitd.failpoints import PHASES
from refitd.telemetry.metrics import CAUSES, CODES, LINKS, OUTCOMES, Metrics, ReplicaState


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def series(metrics: Metrics) -> int:
    return sum(len(family.samples) for family in metrics.registry.collect())


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_everything_starts_at_zero(metrics: Metrics) -> None:
    """Each label value that can come is there from the start, so that rate() sees the first event."""
    for outcome in OUTCOMES:
        assert value(metrics, "refitd_refits_total", outcome=outcome) == 0
        for phase in PHASES:
            assert value(metrics, "refitd_refit_duration_seconds_count", phase=phase, outcome=outcome) == 0
    for link in LINKS:
        for direction in ("rx", "tx"):
            assert value(metrics, "refitd_transfer_bytes_total", link=link, direction=direction) == 0
    assert {value(metrics, "refitd_lane_turns_total", cause=cause) for cause in CAUSES} == {0}
    assert {value(metrics, "refitd_hook_errors_total", code=code) for code in CODES} == {0}
    for name in ("refitd_mover_restarts_total", "refitd_hook_connections", "refitd_store_up", "refitd_is_leader"):
        assert value(metrics, name) == 0


def test_phases_are_timed(metrics: Metrics) -> None:
    """A phase's time lands in its bucket; buckets go from 10 ms to 60 s."""
    metrics.phase("transfer", 0.3)
    metrics.phase("transfer", 61.0, "failed")
    ok = {"phase": "transfer", "outcome": "ok"}
    assert value(metrics, "refitd_refit_duration_seconds_sum", **ok) == 0.3
    assert value(metrics, "refitd_refit_duration_seconds_bucket", le="0.25", **ok) == 0
    assert value(metrics, "refitd_refit_duration_seconds_bucket", le="0.5", **ok) == 1
    failed = {"phase": "transfer", "outcome": "failed"}
    assert value(metrics, "refitd_refit_duration_seconds_bucket", le="60.0", **failed) == 0
    assert value(metrics, "refitd_refit_duration_seconds_bucket", le="+Inf", **failed) == 1
    with pytest.raises(KeyError):
        metrics.phase("lunch", 1.0)


def test_events_are_counted(metrics: Metrics) -> None:
    """Each method moves its own series, by what it was given."""
    metrics.refit("ok")
    metrics.transferred("peer", rx=10, tx=3)
    metrics.transferred("peer", rx=5)
    metrics.lane_turned("death")
    metrics.mover_restarted()
    metrics.hook_connections(4)
    metrics.hook_error("refused")
    metrics.store_up(True)
    metrics.leader(True)
    assert value(metrics, "refitd_refits_total", outcome="ok") == 1
    assert value(metrics, "refitd_transfer_bytes_total", link="peer", direction="rx") == 15
    assert value(metrics, "refitd_transfer_bytes_total", link="peer", direction="tx") == 3
    assert value(metrics, "refitd_lane_turns_total", cause="death") == 1
    assert value(metrics, "refitd_mover_restarts_total") == 1
    assert value(metrics, "refitd_hook_connections") == 4
    assert value(metrics, "refitd_hook_errors_total", code="refused") == 1
    assert value(metrics, "refitd_store_up") == 1
    assert value(metrics, "refitd_is_leader") == 1


def test_unknown_labels_make_no_series(metrics: Metrics) -> None:
    """A cause or code that is in no list counts as other."""
    before = series(metrics)
    metrics.lane_turned("node gpu-17 stopped answering")
    metrics.hook_error("brand_new")
    metrics.refit("odd")
    assert value(metrics, "refitd_lane_turns_total", cause="other") == 1
    assert value(metrics, "refitd_hook_errors_total", code="other") == 1
    assert value(metrics, "refitd_refits_total", outcome="failed") == 1
    assert series(metrics) == before


def test_replicas_come_and_go() -> None:
    """A replica's series are there while it is, and vanish with it."""
    states = [ReplicaState("r0", 7, 41), ReplicaState("r1", 6, 39)]
    metrics = Metrics(lambda: states)
    assert value(metrics, "refitd_replica_step", replica="r0") == 7
    assert value(metrics, "refitd_replica_revision", replica="r1") == 39
    del states[0]
    assert value(metrics, "refitd_replica_step", replica="r0") is None
    assert value(metrics, "refitd_replica_step", replica="r1") == 6


def test_o1_the_number_of_series_does_not_grow() -> None:
    """O1: after 10,000 refits there are as many series as after 10, and no label tells a version or a parameter."""
    state = ReplicaState("r0", 0, 0)
    metrics = Metrics(lambda: [state])
    counts = []
    for number in range(10_000):
        state = ReplicaState("r0", number, 3 * number)
        for phase in PHASES:
            metrics.phase(phase, 0.01 * (number % 700), OUTCOMES[number % 4])
        metrics.refit("ok")
        metrics.transferred(LINKS[number % 3], number, number)
        metrics.lane_turned(f"cause {number}")
        metrics.hook_error(f"code {number}")
        if number in (9, 9_999):
            counts.append(series(metrics))
    assert counts[0] == counts[1] < 600
    names = {
        label
        for f in metrics.registry.collect()
        if f.name.startswith("refitd")
        for s in f.samples
        for label in s.labels
    }
    assert names == {"phase", "outcome", "le", "link", "direction", "cause", "code", "replica", "version"}
    versioned = {s.name for f in metrics.registry.collect() for s in f.samples if "version" in s.labels}
    assert versioned == {"refitd_build_info", "python_info"}


def test_two_daemons_in_one_process_count_apart() -> None:
    """Each Metrics has a registry of its own."""
    one, two = Metrics(), Metrics()
    one.refit("ok")
    assert value(two, "refitd_refits_total", outcome="ok") == 0


def test_promtool_finds_no_fault() -> None:
    """Names, units and help texts follow Prometheus' conventions."""
    if shutil.which("promtool") is None:
        pytest.fail("no promtool on PATH: apt-get install prometheus")
    page = generate_latest(Metrics(lambda: [ReplicaState("r0", 1, 2)]).registry)
    result = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=20)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
