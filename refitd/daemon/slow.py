"""What a refit waits for, seen from this node: links, of what was planned on them what has come, and what broke.

Of a refit that goes wrong three names are always told: the rank, the link, the phase.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from refitd.telemetry.page import size

if TYPE_CHECKING:
    from refitd.daemon.job import Job
    from refitd.daemon.lane import LaneDriver

Row = dict[str, Any]
# Seconds after which a stage is worth a word. Engines lend, and take tickets, at their own step boundaries.
LONG = {"build": 3.0, "transfer": 3.0, "prepare": 10.0, "commit": 5.0}
SHOWN, REFITS = 40, 8  # so that the answer to `status` stays small however many ranks there are


def links(job: Job) -> list[Row]:
    """Links into this node in the attempts that run or ran last: src, dst, link, bytes planned and moved, late."""
    return [row for lane in job.lanes.values() for row in _lane_links(lane)]


def busiest(job: Job) -> list[Row]:
    """The `SHOWN` links of `links` that are furthest from done, as far as bytes are concerned, then the largest."""
    rows = sorted(links(job), key=lambda row: (row["moved"] - row["planned"], -row["planned"], row["src"], row["dst"]))
    return rows[:SHOWN]


def lately(job: Job) -> list[Row]:
    """What broke on this node for this job, the newest first: ``age`` (seconds) and ``what`` (a sentence)."""
    now = time.time()
    faults = job.metrics.history.faults()
    return [{"age": max(0.0, now - fault.at), "what": fault.what} for fault in faults if fault.job == job.job]


def recent(job: Job) -> list[Row]:
    """The last `REFITS` refits of the job in which this node took part, the newest first."""
    records = [record for record in job.metrics.history.last() if record.refit.job == job.job]
    return [
        {
            "replica": record.refit.replica, "publication": [record.refit.generation, record.refit.revision],
            "phases": record.phases, "moved": record.moved, "outcome": record.outcome, "failures": record.failures,
            "why": record.why,
        }
        for record in records[:REFITS]
    ]  # fmt: skip


def held_up(job: Job, key: str) -> str:
    """What waits for the mover of a rank of ours: replica, phase and link of each lane; empty where nothing does."""
    waiting = [lane for _name, lane in sorted(job.lanes.items()) if lane.built and key in lane.built.handles]
    said = [f"replica {lane.replica} was in {lane.stage.name}{_at(lane, key)}" for lane in waiting if _busy(lane)]
    return "; ".join(said)


def _busy(lane: LaneDriver) -> bool:
    return lane.stage.name in LONG


def _at(lane: LaneDriver, key: str) -> str:
    """The link of a rank that is furthest behind; of one whose bytes are not counted here, only its ends."""
    counted = [row for row in _lane_links(lane) if key in (row["src"], row["dst"]) and row["moved"] < row["planned"]]
    if counted:
        return f": {_behind(counted)}"
    planned = lane.built.program(key).buckets if lane.built else ()
    return f": {planned[0].src} -> {planned[0].dst} over {planned[0].link}" if planned else ""


def _behind(rows: Sequence[Row]) -> str:
    """The row of which the least has come, in words."""
    worst = min(rows, key=lambda row: (row["moved"] / row["planned"], row["src"], row["dst"]))
    came = f"{size(worst['moved'])} of {size(worst['planned'])}"
    return f"{worst['src']} -> {worst['dst']} over {worst['link']}, {came}"


def _lane_links(lane: LaneDriver) -> list[Row]:
    found: dict[tuple[str, str, str], list[int]] = {}
    for bucket, verified in lane.attempt.arrivals() if lane.attempt else ():
        row = found.setdefault((bucket.src, bucket.dst, bucket.link), [0, 0])
        row[0] += bucket.nbytes
        row[1] += bucket.nbytes if verified else 0
    late = _is_slow(lane) and lane.stage.name == "transfer"
    return [
        {"src": src, "dst": dst, "link": link, "planned": planned, "moved": moved, "late": late and moved < planned}
        for (src, dst, link), (planned, moved) in sorted(found.items())
    ]


def slow(job: Job) -> Iterator[str]:
    """A sentence for each lane that has been in one stage for too long: replica, phase, and the rank or link."""
    for name, lane in sorted(job.lanes.items()):
        if _is_slow(lane):
            yield f"replica {name} has been in {lane.stage.name} for {lane.stage_seconds:.1f} s: {_waits_for(lane)}"


def _is_slow(lane: LaneDriver) -> bool:
    return lane.stage_seconds > LONG.get(lane.stage.name, float("inf"))


def _waits_for(lane: LaneDriver) -> str:
    if lane.stage.name == "build" and lane.built and lane.built.waiting:
        return f"{', '.join(sorted(lane.built.waiting))} must connect; {lane.stage.reason}"
    behind = [row for row in _lane_links(lane) if row["late"]]
    return f"{_behind(behind)}; {lane.stage.reason}" if behind else lane.stage.reason
