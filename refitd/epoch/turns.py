"""When a lane's record is written: made, turned, closed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.holders import Covers
from refitd.epoch.lanes import away, differs, lane_after, target_of
from refitd.epoch.records import Lane, PubId
from refitd.epoch.suspicion import Judgement, failures, judge
from refitd.epoch.view import View


def lanes(view: View, facts: Facts, covers: Covers) -> Iterator[Write]:
    """Records of lanes that are to change, by replica. Lanes that no change touches keep record and token."""
    for replica in sorted({*view.replicas(), *view.lanes}):
        yield from _lane(view, replica, facts, covers)


def _lane(view: View, replica: str, facts: Facts, covers: Covers) -> Iterator[Write]:
    present = view.lanes.get(replica)
    if present and not facts.store_settled and any(node not in view.members for node in present.value.nodes):
        return  # nobody is removed for absence yet
    lane = present.value if present else None
    target = target_of(view, replica, lane)
    judged = judge(view, lane, target, facts.silent, covers)
    wanted = lane_after(view, replica, lane, target, judged, covers)
    key, expected = f"lanes/{replica}", present.revision if present else 0
    if isinstance(wanted, str):
        if lane and lane.members and _broken(view, lane, target, judged):
            shut = Lane(replica, (), (), (), judged.excluded, wanted, judged.suspicions)
            yield Write(key, encode(shut), expected, wanted)
        return
    reason = _turn(view, lane, wanted, facts) if lane else _made(wanted, facts)
    if reason:
        yield Write(key, encode(dataclasses.replace(wanted, reason=reason)), expected, reason)


def _made(wanted: Lane, facts: Facts) -> str:
    return f"the replica is whole; {wanted.reason}" if facts.joins_settled else ""


def _turn(view: View, lane: Lane, wanted: Lane, facts: Facts) -> str:
    """Why the lane turns. Newcomers alone wait until no more of them come; whoever goes is not waited for."""
    changed, somebody_goes = differs(lane, wanted)
    retry = next((f"{node}: {ack.reason}" for node, ack in failures(view, lane) if not ack.permanent), "")
    if changed and not retry and not somebody_goes and lane.members and not facts.joins_settled:
        return ""
    return changed or (f"again, after {retry}" if retry else "")


def _broken(view: View, lane: Lane, target: PubId | None, judged: Judgement) -> bool:
    """Whether a lane must close: a member is gone, suspect, or on a node that must or wants to go."""
    slots, barred = view.slots(), judged.barred(view)
    works = all(slots.get(slot.key) == slot and slot.id not in barred for slot in lane.members)
    return not works or bool(away(view, lane, target, lane.members))
