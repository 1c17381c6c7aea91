"""The fleet: is it healthy, how fast are refits, how far behind are replicas."""

from __future__ import annotations

from panels import Json, Row, bars, board, choice, lines, stat

JOB = '{refit_job=~"$refit_job"}'
RATE = "[$__rate_interval]"


def text() -> str:
    """The board as JSON text."""
    variables = [choice("refit_job", "Job", "label_values(refitd_generation, refit_job)")]
    words = "All daemons together: health, speed of refits, age of the weights that replicas serve."
    return board("refitd-fleet", "refitd: fleet", words, variables, rows())


def rows() -> list[Row]:
    """From "is it healthy" down to "how far behind"."""
    return [
        ("Is it healthy?", 4, _health()),
        ("How fast?", 8, _speed()),
        ("How far behind?", 8, _behind()),
    ]


def _health() -> list[Json]:
    leaders = f"max(sum by (refit_job) (refitd_is_leader{JOB}))"
    return [
        stat(
            "Daemons down", "short", "Daemons that did not answer the last scrape.",
            'count(up{job="refitd"} == 0) or vector(0)', ("green", None), ("red", 1),
        ),
        stat(
            "Alerts", "short", "Alerts of refitd that fire now.",
            'count(ALERTS{alertname=~"Refitd.*", alertstate="firing"}) or vector(0)', ("green", None), ("red", 1),
        ),
        stat(
            "Leaders", "short", "Nodes that say they lead, in the job with most of them: exactly one.",
            leaders, ("red", None), ("green", 1), ("red", 2),
        ),
        stat(
            "Leases held", "percentunit", "Share of daemons whose lease stands. Without the store transfers under way "
            "finish and nothing new is decided.",
            f"avg(refitd_store_lease_held{JOB})", ("red", None), ("orange", 0.9), ("green", 1),
        ),
        stat(
            "Replicas ready", "percentunit", "Share of replicas that serve weights that are new enough.",
            f"min(refit_job:refitd_replicas:ready_ratio{JOB})", ("red", None), ("orange", 0.5), ("green", 1),
        ),
    ]  # fmt: skip


def _speed() -> list[Json]:
    return [
        lines(
            "Time in each phase, 95th percentile", "s",
            "How long good refits stay in a phase. A line at 60 s means 60 s or more.",
            ("phase:refitd_refit_duration_seconds:p95_5m", "{{phase}}"),
        ),
        lines(
            "Refits", "ops", "Refits that ended, by outcome.",
            ("outcome:refitd_refits:rate5m", "{{outcome}}"),
        ),
        lines(
            "Weights moved", "Bps", "Payload that all nodes bring in a second, by link.",
            ('link_direction:refitd_transfer_bytes:rate5m{direction="rx"}', "{{link}}"),
        ),
        bars(
            "Lane turns", "Lanes that got other members or sources, by cause, counted on every node that is in them.",
            f"sum by (cause) (increase(refitd_lane_turns_total{RATE}))", "{{cause}}",
        ),
    ]  # fmt: skip


def _behind() -> list[Json]:
    behind = f"topk(10, refitd_replica_lag{JOB})"
    return [
        lines("Replicas", "short", "Replicas by state, as the leader counts them.",
              (f"sum by (refit_job, state) (refitd_replicas{JOB})", "{{refit_job}} {{state}}")),
        lines("Publications behind", "short", "The ten replicas that are furthest behind the newest publication.",
              (behind, "{{refit_job}} {{replica}}")),
        lines("Steps", "short", "Training step of the newest publication, and the oldest that a replica serves.",
              (f"max by (refit_job) (refitd_publication_step{JOB})", "{{refit_job}} published"),
              (f"min by (refit_job) (refitd_replica_step{JOB})", "{{refit_job}} oldest served")),
    ]  # fmt: skip
