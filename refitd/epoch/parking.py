"""Nodes that no lane may use, and the planner version that all use."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.records import Parked, Planner
from refitd.epoch.view import View


def planner(view: View) -> Iterator[Write]:
    """The highest version that all members can plan with, else the one that most of them can."""
    version, reason = view.memo("planner_wanted", ("members", "parked"), lambda: agreed_version(view))
    if version and view.slots() and (view.planner is None or view.planner.value.version != version):
        yield Write("planner", encode(Planner(version, reason)), view.revision_of("planner"), reason)


def agreed_version(view: View) -> tuple[int, str]:
    """The planner version of the job, and why; 0 where there are no members."""
    able = collections.Counter(version for s in view.members.values() for version in set(s.value.planners))
    if not able:
        return 0, "no member"
    best = max(able, key=lambda version: (able[version], version))
    if able[best] == len(view.members):
        return best, f"all {able[best]} members have it"
    return best, f"{able[best]} of {len(view.members)} members have it, no other version more"


def parking(view: View, facts: Facts) -> Iterator[Write]:
    """Nodes to be parked, and nodes that have been long enough."""
    wanted = dict(_wanted(view, facts))
    for node, record in wanted.items():
        if node not in view.parked:
            yield Write(f"parked/{node}", encode(record), 0, record.reason)
    for node, stored in view.parked.items():
        if node not in wanted and (not stored.value.flaps or node in facts.calm):
            reason = "it has been quiet" if stored.value.flaps else "it can plan as the job does"
            yield Write(f"parked/{node}", None, stored.revision, reason)


def _wanted(view: View, facts: Facts) -> Iterator[tuple[str, Parked]]:
    version, _reason = agreed_version(view)
    for node, stored in view.members.items():
        if version not in stored.value.planners:
            mine = ", ".join(map(str, stored.value.planners)) or "none"
            why = f"its planner versions are {mine}, the job plans with {version}"
            yield node, Parked(node, stored.value.incarnation, why)
    for node, flaps in facts.flapping:
        member = view.members.get(node)
        incarnation = member.value.incarnation if member else ""
        yield node, Parked(node, incarnation, f"it has joined {flaps} times in a short while", flaps)
