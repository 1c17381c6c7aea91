"""Which link a refit waits for, seen from this node: what has come of what was planned, and what takes too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from refitd.telemetry.page import size

if TYPE_CHECKING:
    from refitd.daemon.job import Job
    from refitd.daemon.lane import LaneDriver

# Seconds after which a stage is worth a word. Engines lend, and take tickets, at their own step boundaries.
LONG = {"build": 3.0, "transfer": 3.0, "prepare": 10.0, "commit": 5.0}


def links(job: Job) -> list[dict[str, Any]]:
    """Links into this node in the attempts that run or ran last: src, dst, link, bytes planned and moved, late."""
    return [row for lane in job.lanes.values() for row in _lane_links(lane)]


def _lane_links(lane: LaneDriver) -> list[dict[str, Any]]:
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
    if not behind:
        return lane.stage.reason
    worst = min(behind, key=lambda row: (row["moved"] / row["planned"], row["src"], row["dst"]))
    came = f"{size(worst['moved'])} of {size(worst['planned'])}"
    return f"{worst['src']} -> {worst['dst']} over {worst['link']}, {came}; {lane.stage.reason}"
