"""Where a lane stands, read from the records alone: every daemon comes to the same answer, and says why."""

from __future__ import annotations

from typing import NamedTuple

from refitd.epoch.records import PHASES, Ack, Lane, PubId
from refitd.epoch.view import View


class Stage(NamedTuple):
    """``name``: gone, build, failed, parked, idle, prepare, transfer, commit, committed."""

    name: str
    publication: PubId | None
    reason: str


def stage(view: View, replica: str) -> Stage:
    """The stage of a replica's lane under its present token."""
    stored = view.lanes.get(replica)
    if stored is None or not stored.value.members:
        return Stage("gone", None, stored.value.reason if stored else "the replica has no lane")
    lane = stored.value
    target = view.refits.get(replica)
    publication = target.value.id if target else None
    if publication and committed(view, lane, publication):
        return Stage("committed", publication, "every member verified it and the lead took the ticket")
    acks = view.lane_acks(replica, lane.nodes)
    return _building(lane, acks, publication) or _refitting(view, lane, publication)


def committed(view: View, lane: Lane, publication: PubId) -> bool:
    """Whether the lane's present members are the ones that committed the publication."""
    commit = view.commits.get(lane.replica)
    if commit is None or commit.value.id != publication:
        return False
    return commit.value.incarnations == lane.incarnations


def served(view: View, lane: Lane, publication: PubId) -> bool:
    """Whether every member node says that its ranks serve the publication (or a newer one)."""
    acks = [view.ack(lane.replica, node) for node in lane.member_nodes]
    return all(ack is not None and PubId(*ack.served) >= publication for ack in acks)


def verified(view: View, lane: Lane, publication: PubId) -> bool:
    """Whether every member node has verified every planned byte, so that no source is needed any more."""
    return committed(view, lane, publication) or _reached(
        view, lane.replica, lane.member_nodes, publication, "verified"
    )


def started(view: View, lane: Lane, publication: PubId) -> bool:
    """Whether a byte of the publication may have moved in the lane under its present token."""
    return _reached(view, lane.replica, lane.nodes, publication, "prepared")


def hopeless(view: View, lane: Lane) -> str:
    """Why trying again under this token is useless; empty where it is not."""
    if not view.has_failed(lane.replica):
        return ""
    acks = zip(lane.nodes, view.lane_acks(lane.replica, lane.nodes), strict=True)
    return next((f"{node}: {ack.reason}" for node, ack in acks if ack and ack.phase == "failed" and ack.permanent), "")


def stable(view: View, lane: Lane) -> bool:
    """Whether all nodes of the lane have built it under its present token, to one plan."""
    kinds = (f"acks/{lane.replica}", "lanes")

    def compute() -> bool:
        return _building(lane, view.lane_acks(lane.replica, lane.nodes), None) is None

    return view.memo(("stable", lane.replica), kinds, compute)


def digests(view: View, lane: Lane) -> dict[str, set[str]]:
    """The plan digests that nodes of the lane have said under its present token, and who said which."""

    def compute() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for node, ack in zip(lane.nodes, view.lane_acks(lane.replica, lane.nodes), strict=True):
            if ack and ack.phase in PHASES:
                found.setdefault(ack.digest, set()).add(node)
        return found

    return view.memo(("digests", lane.replica), (f"acks/{lane.replica}", "lanes"), compute)


def _building(lane: Lane, acks: list[Ack | None], publication: PubId | None) -> Stage | None:
    failed = [(node, ack) for node, ack in zip(lane.nodes, acks, strict=True) if ack and ack.phase == "failed"]
    if failed:
        node, ack = failed[0]
        return Stage("failed", publication, f"{node}: {ack.reason}")
    silent = [node for node, ack in zip(lane.nodes, acks, strict=True) if ack is None]
    if silent:
        return Stage("build", publication, f"waiting for {', '.join(silent)} to build")
    if len({ack.digest for ack in acks if ack}) > 1:
        return Stage("parked", publication, "the nodes computed different plans")
    return None


def _refitting(view: View, lane: Lane, publication: PubId | None) -> Stage:
    if publication is None:
        return Stage("idle", None, "nothing is published")
    if not started(view, lane, publication):
        waiting = _waiting(view, lane.replica, lane.nodes, publication, "prepared")
        return Stage("prepare", publication, f"waiting for {waiting} to lend memory")
    if not verified(view, lane, publication):
        waiting = _waiting(view, lane.replica, lane.member_nodes, publication, "verified")
        return Stage("transfer", publication, f"waiting for {waiting} to verify")
    return Stage("commit", publication, "every member verified every planned byte")


def _reached(view: View, replica: str, nodes: tuple[str, ...], publication: PubId, phase: str) -> bool:
    return not _waiting(view, replica, nodes, publication, phase)


def _waiting(view: View, replica: str, nodes: tuple[str, ...], publication: PubId, phase: str) -> str:
    def compute() -> str:
        acks = zip(nodes, view.lane_acks(replica, nodes), strict=True)
        return ", ".join(node for node, ack in acks if not _at_least(ack, publication, phase))

    name = "waiting", replica, len(nodes), publication, phase
    return view.memo(name, (f"acks/{replica}", "lanes"), compute)


def _at_least(ack: Ack | None, publication: PubId, phase: str) -> bool:
    if ack is None or ack.id != publication or ack.phase not in PHASES:
        return False
    return PHASES.index(ack.phase) >= PHASES.index(phase)
