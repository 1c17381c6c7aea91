"""Whom a lane does without: failed edges, silent nodes and dissenting plans, each with its reason.

Suspicion is kept by edge, in the lane's record, until the refit ends or one of the ends lives anew. The last holder of
a region is never excluded.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from refitd.epoch.holders import Covers, hold_without, holders
from refitd.epoch.records import Ack, Exclusion, Lane, PubId, SlotId, Suspicion
from refitd.epoch.stage import digests
from refitd.epoch.view import View

KEEP_SUSPICIONS = 64
MayGo = Callable[[SlotId], bool]


class Judgement(NamedTuple):
    """What a lane's next record says of whom it does without, and why it suspects whom."""

    excluded: tuple[Exclusion, ...]
    suspicions: tuple[Suspicion, ...]

    def barred(self, view: View) -> set[SlotId]:
        """The live slots that the exclusions mean."""
        found = {e.slot for e in self.excluded}
        slots = view.slots()
        return found | {slots[e.slot.key].id for e in self.excluded if e.parked and e.slot.key in slots}


def failures(view: View, lane: Lane) -> list[tuple[str, Ack]]:
    """Failed acks under the lane's present token, by node."""
    if not view.has_failed(lane.replica):
        return []
    kinds = (f"acks/{lane.replica}", f"lanes/{lane.replica}")
    return view.memo(("failures", lane.replica), kinds, lambda: _failures(view, lane))


def _failures(view: View, lane: Lane) -> list[tuple[str, Ack]]:
    acks = zip(lane.nodes, view.lane_acks(lane.replica, lane.nodes), strict=True)
    return [(node, ack) for node, ack in acks if ack and ack.phase == "failed"]


def judge(
    view: View, lane: Lane | None, target: PubId | None, silent: frozenset[tuple[str, str]], covers: Covers
) -> Judgement:
    """Exclusions and suspicions that still stand, and the new ones.

    ``silent``: (replica, node) pairs that have said nothing for too long. A slot that lives anew is another slot, and
    welcome; with a ``parked`` exclusion only a new life of its daemon is.
    """
    if lane is None:
        return Judgement((), ())
    kept = {e.slot: e for e in lane.excluded if _stands(view, e) and not (e.passing and target is None)}
    old = [s for s in lane.suspicions if target and view.live(s.source) and view.live(s.destination)]
    new = list(_new_suspicions(view, lane, target))
    may_go = functools.partial(_may_go, view, lane, target, covers, kept)
    for exclusion in itertools.chain(  # one after another: whoever goes may leave another as the last holder
        _blamed(lane, old, new, may_go), _silent(lane, silent, may_go), _dissenting(view, lane, may_go)
    ):
        if view.live(exclusion.slot) and exclusion.slot not in kept:
            kept[exclusion.slot] = exclusion
    suspicions = tuple(dict.fromkeys([*old, *(suspicion for suspicion, _reason in new)]))
    ordered = tuple(sorted(kept.values(), key=lambda e: e.slot.key))
    return Judgement(ordered, suspicions[-KEEP_SUSPICIONS:])


def _stands(view: View, exclusion: Exclusion) -> bool:
    live = view.slots().get(exclusion.slot.key)
    if exclusion.parked:
        newest = view.memo("newest_join", ("members",), lambda: max(s.created for s in view.members.values()))
        same = live is not None and (live.node, live.member) == (exclusion.slot.node, exclusion.slot.member)
        return same and newest <= exclusion.parked
    return view.live(exclusion.slot) is not None


def _new_suspicions(view: View, lane: Lane, target: PubId | None) -> Iterator[tuple[Suspicion, str]]:
    """Edges that failed under the present token; a source that took its word back has not failed, and where one end has
    ended nothing else need be wrong."""
    for node, ack in failures(view, lane):
        ends = [lane.ids[key] for key in ack.edge if key in lane.ids]
        if len(ends) != 2 or not all(map(view.live, ends)):
            continue
        source, destination = ends
        withdrawn = target is not None and source in lane.source_ids and source.key not in holders(view, target)
        if not withdrawn:
            yield Suspicion(source, destination, node), f"{node}: {ack.reason}"


def _blamed(lane: Lane, old: list[Suspicion], new: list[tuple[Suspicion, str]], may_go: MayGo) -> Iterator[Exclusion]:
    """One end for each new suspicion: first those with whom several others have trouble, who clear their accusers.

    A closed lane blames nobody: it has no sources, by which to see who is the last holder of a region, and its record
    is not written again, by which the blamed one's node would hear of it and start another mover.
    """
    if not lane.members:
        return
    left = dict.fromkeys([*old, *(suspicion for suspicion, _reason in new)])
    reasons = dict(new)
    while left:
        peers = _peers(left)
        worst = max(peers, key=lambda slot: (len(peers[slot]), slot.key))
        if len(peers[worst]) < 2 or not may_go(worst):
            break
        others = ", ".join(sorted(peers[worst]))
        yield Exclusion(worst, worst in lane.neighbours, f"edges between it and {others} fail")
        left = {s: None for s in left if worst not in (s.source, s.destination)}
    both = {(s.source, s.destination, s.by) for s in left}
    for suspicion in left:
        if suspicion in reasons:
            yield from _one_end(lane, suspicion, reasons[suspicion], both, may_go)


def _peers(suspicions: dict[Suspicion, None]) -> dict[SlotId, set[str]]:
    """Nodes at the other ends of each slot's suspected edges."""
    peers: dict[SlotId, set[str]] = collections.defaultdict(set)
    for suspicion in suspicions:
        peers[suspicion.source].add(suspicion.destination.node)
        peers[suspicion.destination].add(suspicion.source.node)
    return peers


def _one_end(
    lane: Lane, suspicion: Suspicion, reason: str, all_said: set[tuple[SlotId, SlotId, str]], may_go: MayGo
) -> Iterator[Exclusion]:
    """The source is to blame, unless only its own node complains."""
    source, destination, by = suspicion.source, suspicion.destination, suspicion.by
    if source in lane.neighbours:
        yield Exclusion(source, True, reason)
    elif source.node == by != destination.node and (source, destination, destination.node) not in all_said:
        yield Exclusion(destination, False, reason)
    elif may_go(source):
        yield Exclusion(source, False, reason)


def _may_go(
    view: View, lane: Lane, target: PubId | None, covers: Covers, gone: Mapping[SlotId, Exclusion], slot: SlotId
) -> bool:
    """The last holder of a region is never excluded, whether the lane reads from the others now or not; members and
    neighbours hold nothing that others wait for. ``gone``: who goes already."""
    if slot not in lane.source_ids:
        return True
    out = {exclusion.slot for exclusion in lane.excluded} | gone.keys() | {slot}
    rest = [live.digest for other in lane.sources if other not in out and (live := view.live(other))]
    if rest and covers(lane.replica, rest):
        return True
    return target is not None and hold_without(view, lane.replica, target, out, covers)


def _silent(lane: Lane, silent: frozenset[tuple[str, str]], may_go: MayGo) -> Iterator[Exclusion]:
    for replica, node in sorted(silent):
        if replica == lane.replica and node in lane.nodes:
            yield from _node(lane, node, "its node is there and has not said a word", 0, may_go)


def _node(lane: Lane, node: str, reason: str, parked: int, may_go: MayGo) -> Iterator[Exclusion]:
    for slot in (*(member.id for member in lane.members), *lane.sources):
        if slot.node == node and may_go(slot):
            yield Exclusion(slot, False, f"{node}: {reason}", parked)


def _dissenting(view: View, lane: Lane, may_go: MayGo) -> Iterator[Exclusion]:
    """Nodes whose plan has another digest than most nodes of the lane; on a tie the lead's plan counts."""
    votes = digests(view, lane)
    if len(votes) < 2 or sum(map(len, votes.values())) < len(lane.nodes):
        return
    agreed = max(votes, key=lambda digest: (len(votes[digest]), lane.lead.node in votes[digest]))
    for digest, nodes in votes.items():
        for node in nodes if digest != agreed else ():
            reason = f"its plan is {digest[:12]}, that of the others {agreed[:12]}"
            yield from _node(lane, node, reason, view.lanes[lane.replica].revision, may_go)
