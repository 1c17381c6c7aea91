"""Where a lane stands, read from the records alone: every daemon comes to the same answer, and says why."""

from __future__ import annotations

from typing import NamedTuple

from refitd.epoch.records import PHASES, Ack, Lane, PubId
from refitd.epoch.view import View

Word = tuple[str, int, int, str]  # phase, publication, plan digest


class Stage(NamedTuple):
    """``name``: gone, build, failed, parked, idle, prepare, transfer, commit, committed."""

    name: str
    publication: PubId | None
    reason: str


class Said(NamedTuple):
    """What the nodes of a lane have said under its present token, in one pass over their acks.

    ``words``: (phase, publication, plan digest) and the nodes that said it, in order; ``silent``: nodes without a word.
    """

    words: dict[Word, list[str]]
    silent: list[str]


def said(view: View, replica: str) -> Said:
    """The words of a replica's lane, which has a record."""
    return view.memo(("said", replica), (f"acks/{replica}", f"lanes/{replica}"), lambda: _said(view, replica))


def _said(view: View, replica: str) -> Said:
    words: dict[Word, list[str]] = {}
    silent = []
    nodes = view.lanes[replica].value.nodes
    for node, ack in zip(nodes, view.lane_acks(replica, nodes), strict=True):
        if ack is None:
            silent.append(node)
            continue
        word = ack.phase, ack.generation, ack.revision, ack.digest
        if word in words:
            words[word].append(node)
        else:
            words[word] = [node]
    return Said(words, silent)


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
    return committed(view, lane, publication) or not _waiting(view, lane, publication, "verified")


def started(view: View, lane: Lane, publication: PubId) -> bool:
    """Whether a byte of the publication may have moved in the lane under its present token."""
    return not _waiting(view, lane, publication, "prepared")


def hopeless(view: View, lane: Lane) -> str:
    """Why trying again under this token is useless; empty where it is not."""
    if not view.has_failed(lane.replica):
        return ""
    acks = zip(lane.nodes, view.lane_acks(lane.replica, lane.nodes), strict=True)
    return next((f"{node}: {ack.reason}" for node, ack in acks if ack and ack.phase == "failed" and ack.permanent), "")


def stable(view: View, lane: Lane) -> bool:
    """Whether all nodes of the lane have built it under its present token, to one plan."""
    words, silent = said(view, lane.replica)
    return not silent and not any(word[0] == "failed" for word in words) and len({word[3] for word in words}) < 2


def digests(view: View, lane: Lane) -> dict[str, set[str]]:
    """The plan digests that nodes of the lane have said under its present token, and who said which."""
    found: dict[str, set[str]] = {}
    for (phase, _generation, _revision, digest), nodes in said(view, lane.replica).words.items():
        if phase in PHASES:
            found.setdefault(digest, set()).update(nodes)
    return found


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
        waiting = ", ".join(_waiting(view, lane, publication, "prepared"))
        return Stage("prepare", publication, f"waiting for {waiting} to lend memory")
    if not verified(view, lane, publication):
        waiting = ", ".join(_waiting(view, lane, publication, "verified"))
        return Stage("transfer", publication, f"waiting for {waiting} to verify")
    return Stage("commit", publication, "every member verified every planned byte")


def _waiting(view: View, lane: Lane, publication: PubId, phase: str) -> list[str]:
    """Nodes that the phase still waits for: all must have prepared, only members verify."""
    kinds = (f"acks/{lane.replica}", f"lanes/{lane.replica}")
    return view.memo(
        ("waiting", lane.replica, publication, phase), kinds, lambda: _late(view, lane, publication, phase)
    )


def _late(view: View, lane: Lane, publication: PubId, phase: str) -> list[str]:
    words, silent = said(view, lane.replica)
    late = set(silent)
    for word, nodes in words.items():
        if not _at_least(word, publication, phase):
            late.update(nodes)
    return [node for node in (lane.member_nodes if phase == "verified" else lane.nodes) if node in late] if late else []


def _at_least(word: Word, publication: PubId, phase: str) -> bool:
    said_phase, generation, revision, _digest = word
    if (generation, revision) != publication or said_phase not in PHASES:
        return False
    return PHASES.index(said_phase) >= PHASES.index(phase)
