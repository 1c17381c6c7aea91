"""Under which of a few words an event of a lane is counted."""

from __future__ import annotations

import re
from collections.abc import Collection

from refitd.epoch.records import Lane
from refitd.epoch.stage import Stage


def outcome_of(left: Stage, now: Stage) -> str:
    """How a phase ended: the lane went on, went for another publication, or must try again."""
    if now.name in ("transfer", "commit", "committed"):
        return "ok"
    return "superseded" if now.publication != left.publication and now.name in ("prepare", "idle") else "failed"


def cause_of(before: Lane | None, after: Lane, drained: Collection[str]) -> str:
    """Why a lane turned: what its record says, and whether a node that goes had asked to (``drained``)."""
    if before and set(before.nodes).difference(after.nodes).intersection(drained):
        return "leave"
    if after.reason.startswith("again"):
        return "failure"
    if len(set(re.findall(r"trainer/([^/]+)/", after.reason))) > 1:  # one run goes and another comes
        return "generation"
    return "death" if "-(" in after.reason else "join"
