"""What is counted, and how many series that makes."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client import generate_latest

from refitd.failpoints import PHASES
from refitd.telemetry.facts import JobFacts, NodeFacts, ReplicaFacts
from refitd.telemetry.history import Refit
from refitd.telemetry.metrics import BUCKETS, CAUSES, CODES, LINKS, METHODS, OUTCOMES, PLANS, Metrics
from refitd.telemetry.scrape import busy_node, series


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def a_job(name: str = "grpo", **other: object) -> JobFacts:
    given = {
        "leads": True, "joined": True, "paused": False, "generation": 2, "revision": 41, "step": 7,
        "lease_held": True, "contact_at": 1000.5, **other,
    }  # fmt: skip
    return JobFacts(name, **given)  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_everything_starts_at_zero(metrics: Metrics) -> None:
    """Each label value that can come is there from the start, so that rate() sees the first event."""
    for outcome in OUTCOMES:
        assert value(metrics, "refitd_refits_total", outcome=outcome) == 0
        for phase in PHASES:
            assert value(metrics, "refitd_refit_duration_seconds_count", phase=phase, outcome=outcome) == 0
    for plan in PLANS:
        assert value(metrics, "refitd_attempts_total", plan=plan) == 0
        assert value(metrics, "refitd_plan_duration_seconds_count", plan=plan) == 0
    for method in METHODS:
        assert value(metrics, "refitd_communicator_repair_duration_seconds_count", method=method) == 0
    assert {value(metrics, "refitd_lane_turns_total", cause=cause) for cause in CAUSES} == {0}
    assert {value(metrics, "refitd_hook_errors_total", code=code) for code in CODES} == {0}
    assert {value(metrics, "refitd_achieved_bandwidth_bytes_per_second", link=link) for link in LINKS} == {0}
    assert value(metrics, "refitd_mover_restarts_total") == 0
    assert value(metrics, "refitd_store_up") == 0
    assert value(metrics, "refitd_config_last_reload_successful") == 1


def test_phases_are_timed(metrics: Metrics) -> None:
    """A phase's time lands in its bucket; buckets go from 10 ms to 60 s."""
    assert (BUCKETS[0], BUCKETS[-1]) == (0.01, 60.0)
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
    metrics.attempt("remainder")
    metrics.planned("whole", 0.02)
    metrics.lane_turned("death")
    metrics.repaired("reconnect", 0.6)
    metrics.mover_restarted()
    metrics.hook_error("refused")
    metrics.store_up(True)
    metrics.reloaded(False)
    metrics.achieved(0.5, {"network": 1000, "peer": 0})
    metrics.achieved(0.0, {"network": 5})
    assert value(metrics, "refitd_refits_total", outcome="ok") == 1
    assert value(metrics, "refitd_attempts_total", plan="remainder") == 1
    assert value(metrics, "refitd_plan_duration_seconds_sum", plan="whole") == 0.02
    assert value(metrics, "refitd_lane_turns_total", cause="death") == 1
    assert value(metrics, "refitd_communicator_repair_duration_seconds_sum", method="reconnect") == 0.6
    assert value(metrics, "refitd_mover_restarts_total") == 1
    assert value(metrics, "refitd_hook_errors_total", code="refused") == 1
    assert value(metrics, "refitd_store_up") == 1
    assert value(metrics, "refitd_config_last_reload_successful") == 0
    assert value(metrics, "refitd_achieved_bandwidth_bytes_per_second", link="network") == 2000
    assert value(metrics, "refitd_achieved_bandwidth_bytes_per_second", link="peer") == 0


def test_bytes_count_under_the_gpu_of_their_rank(metrics: Metrics) -> None:
    """A rank has its GPU's number, or the lowest free one; a rank that goes frees it; a stranger's bytes are other."""
    metrics.rank_came("engine/r0/0")
    metrics.rank_came("engine/r1/0", gpu=5)
    metrics.rank_came("engine/r2/0")
    assert value(metrics, "refitd_transfer_bytes_total", gpu="1", link="fabric", direction="tx") == 0
    metrics.transferred("peer", rx=10, tx=3, rank="engine/r2/0")
    metrics.transferred("peer", rx=5, rank="engine/r2/0")
    metrics.transferred("network", tx=2, rank="engine/r1/0")
    metrics.transferred("network", tx=4, rank="engine/nobody/0")
    assert value(metrics, "refitd_transfer_bytes_total", gpu="1", link="peer", direction="rx") == 15
    assert value(metrics, "refitd_transfer_bytes_total", gpu="1", link="peer", direction="tx") == 3
    assert value(metrics, "refitd_transfer_bytes_total", gpu="5", link="network", direction="tx") == 2
    assert value(metrics, "refitd_transfer_bytes_total", gpu="other", link="network", direction="tx") == 4
    metrics.rank_gone("engine/r0/0")
    metrics.rank_came("engine/r9/0")
    metrics.transferred("local", rx=1, rank="engine/r9/0")
    assert value(metrics, "refitd_transfer_bytes_total", gpu="0", link="local", direction="rx") == 1
    with pytest.raises(KeyError):
        metrics.transferred("carrier pigeon", rx=1)


def test_more_ranks_than_gpus(metrics: Metrics) -> None:
    """The seventeenth rank of a node counts as other, and so does a GPU number that no node has."""
    for number in range(17):
        metrics.rank_came(f"engine/r{number}/0")
    metrics.rank_came("engine/odd/0", gpu=99)
    metrics.transferred("peer", rx=7, rank="engine/r16/0")
    metrics.transferred("peer", rx=1, rank="engine/odd/0")
    assert value(metrics, "refitd_transfer_bytes_total", gpu="other", link="peer", direction="rx") == 8


def test_the_history_hears_of_phases_bytes_and_ends(metrics: Metrics) -> None:
    """What is counted for a refit is also told of it."""
    refit = Refit("grpo", "r0", 2, 41)
    metrics.phase("transfer", 0.5, of=refit)
    metrics.transferred("peer", rx=10, tx=99, of=refit)
    metrics.refit("failed", of=refit, why="trainer/x/0 -> engine/r0/1: no progress")
    metrics.refit("ok", of=refit)
    (record,) = metrics.history.last()
    assert (record.refit, record.phases, record.moved) == (refit, {"transfer": 0.5}, {"peer": 10})
    assert (record.outcome, record.failures, record.why) == ("ok", 1, "trainer/x/0 -> engine/r0/1: no progress")


def test_unknown_labels_make_no_series(metrics: Metrics) -> None:
    """A cause, code or method that is in no list counts as other."""
    before = series(metrics)
    metrics.lane_turned("node gpu-17 stopped answering")
    metrics.hook_error("brand_new")
    metrics.repaired("magic", 1.0)
    metrics.refit("odd")
    assert value(metrics, "refitd_lane_turns_total", cause="other") == 1
    assert value(metrics, "refitd_hook_errors_total", code="other") == 1
    assert value(metrics, "refitd_communicator_repair_duration_seconds_count", method="other") == 1
    assert value(metrics, "refitd_refits_total", outcome="failed") == 1
    assert series(metrics) == before


def test_what_others_own_comes_and_goes(metrics: Metrics) -> None:
    """Series of a job, a replica or a state are there while it is, and vanish with it."""
    facts = [NodeFacts()]
    metrics.watch(lambda: facts[0])
    assert value(metrics, "refitd_loop_up") == 1
    assert value(metrics, "refitd_is_leader", refit_job="grpo") is None
    replicas = (ReplicaFacts("grpo", "r0", 7, 41, 0, True), ReplicaFacts("grpo", "r1", 6, 39, None, False))
    job = a_job(members={"active": 3}, replicas={"behind": 1}, loans={"trainer": 2}, movers={"running": 4})
    facts[0] = NodeFacts((job,), replicas, {"trainer": 2}, {"txn": 12, "brand_new": 3}, {"network": 5e10})
    assert value(metrics, "refitd_replica_step", refit_job="grpo", replica="r0") == 7
    assert value(metrics, "refitd_replica_revision", refit_job="grpo", replica="r1") == 39
    assert value(metrics, "refitd_replica_lag", refit_job="grpo", replica="r0") == 0
    assert value(metrics, "refitd_replica_lag", refit_job="grpo", replica="r1") is None
    assert value(metrics, "refitd_replica_ready", refit_job="grpo", replica="r0") == 1
    assert value(metrics, "refitd_replica_ready", refit_job="grpo", replica="r1") == 0
    assert value(metrics, "refitd_is_leader", refit_job="grpo") == 1
    assert value(metrics, "refitd_is_member", refit_job="grpo") == 1
    assert value(metrics, "refitd_job_paused", refit_job="grpo") == 0
    assert value(metrics, "refitd_generation", refit_job="grpo") == 2
    assert value(metrics, "refitd_publication_revision", refit_job="grpo") == 41
    assert value(metrics, "refitd_publication_step", refit_job="grpo") == 7
    assert value(metrics, "refitd_store_lease_held", refit_job="grpo") == 1
    assert value(metrics, "refitd_store_last_contact_timestamp_seconds", refit_job="grpo") == 1000.5
    assert value(metrics, "refitd_members", refit_job="grpo", state="active") == 3
    assert value(metrics, "refitd_replicas", refit_job="grpo", state="behind") == 1
    assert value(metrics, "refitd_loans", refit_job="grpo", side="trainer") == 2
    assert value(metrics, "refitd_movers", refit_job="grpo", state="running") == 4
    assert value(metrics, "refitd_hook_connections", side="trainer") == 2
    assert value(metrics, "refitd_hook_connections", side="engine") == 0
    assert value(metrics, "refitd_store_requests_total", kind="txn") == 12
    assert value(metrics, "refitd_store_requests_total", kind="other") == 3
    assert value(metrics, "refitd_planned_bandwidth_bytes_per_second", link="network") == 5e10
    facts[0] = NodeFacts((a_job(contact_at=0.0, lease_held=False),))
    assert value(metrics, "refitd_store_lease_held", refit_job="grpo") == 0
    assert value(metrics, "refitd_store_last_contact_timestamp_seconds", refit_job="grpo") is None
    facts[0] = NodeFacts((job,), replicas[1:])
    assert value(metrics, "refitd_replica_step", refit_job="grpo", replica="r0") is None
    assert value(metrics, "refitd_replica_step", refit_job="grpo", replica="r1") == 6


def test_a_loop_that_does_not_answer_is_told_and_its_facts_are_not_guessed(metrics: Metrics) -> None:
    """The scrape has what was counted, and says that the loop does not turn."""

    def silence() -> NodeFacts:
        raise TimeoutError

    metrics.watch(silence)
    metrics.refit("ok")
    assert value(metrics, "refitd_loop_up") == 0
    assert value(metrics, "refitd_refits_total", outcome="ok") == 1
    assert value(metrics, "refitd_hook_connections", side="trainer") is None


def test_o1_the_number_of_series_does_not_grow(metrics: Metrics) -> None:
    """O1: after 10,000 refits there are as many series as after 10, and no label tells a version or a parameter."""
    replicas = (ReplicaFacts("grpo", "r0", 0, 0, 0, True),)
    metrics.watch(lambda: NodeFacts((a_job(),), replicas))
    counts = []
    for number in range(10_000):
        replicas = (ReplicaFacts("grpo", "r0", number, 3 * number, number % 3, True),)
        refit = Refit("grpo", "r0", 1, number)
        metrics.rank_came(f"engine/r0/{number % 8}")
        metrics.phase(PHASES[number % 6], 0.01 * (number % 700), OUTCOMES[number % 4], of=refit)
        metrics.refit("failed", of=refit, why=f"error text {number}")
        metrics.transferred(LINKS[number % 4], number, number, rank=f"engine/r0/{number % 8}", of=refit)
        metrics.lane_turned(f"cause {number}")
        metrics.hook_error(f"code {number}")
        if number in (9, 9_999):
            counts.append(series(metrics))
    assert counts[0] == counts[1] < 800
    ours = [family for family in metrics.registry.collect() if family.name.startswith("refitd")]
    assert {label for family in ours for sample in family.samples for label in sample.labels} == {
        "phase", "outcome", "le", "plan", "gpu", "link", "direction", "cause", "method", "code", "refit_job", "replica",
        "version", "side", "kind",
    }  # fmt: skip
    assert {s.name for family in ours for s in family.samples if "version" in s.labels} == {"refitd_build_info"}
    assert len(metrics.history.last()) == 40


def test_an_eight_gpu_node_has_less_than_2000_series() -> None:
    """Four jobs of eight replicas that all lead here, every label value in use."""
    assert 600 < series(busy_node()) < 2000


def test_two_daemons_in_one_process_count_apart() -> None:
    """Each Metrics has a registry of its own."""
    one, two = Metrics(), Metrics()
    one.refit("ok")
    assert value(two, "refitd_refits_total", outcome="ok") == 0


def test_promtool_finds_no_fault() -> None:
    """Names, units and help texts follow Prometheus' conventions."""
    if shutil.which("promtool") is None:
        pytest.fail("no promtool on PATH: apt-get install prometheus")
    page = generate_latest(busy_node().registry)
    result = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=20)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
