"""What a replica's lane should look like now: members, sources, neighbours, exclusions."""

from __future__ import annotations

import functools
import itertools

from refitd.epoch.holders import Covers, choose_sources, draining, hold_already, natural
from refitd.epoch.packed import pack_ranks
from refitd.epoch.records import Lane, PubId, Slot, SlotId
from refitd.epoch.stage import committed, served, started, verified
from refitd.epoch.suspicion import Judgement, judge
from refitd.epoch.view import View

NOBODY: frozenset[tuple[str, str]] = frozenset()


def desired_lane(view: View, replica: str, covers: Covers, silent: frozenset[tuple[str, str]] = NOBODY) -> Lane | str:
    """The lane that a replica should have, or why it can have none.

    Compare it with the present record (less its reason): where they differ, or where an ack under the present token has
    failed and another try may help, the lane turns. ``silent``: (replica, node) pairs that have said nothing too long.
    """
    present = view.lanes.get(replica)
    lane = present.value if present else None
    target = target_of(view, replica, lane)
    return lane_after(view, replica, lane, target, judge(view, lane, target, silent, covers), covers)


def lane_after(
    view: View, replica: str, lane: Lane | None, target: PubId | None, judged: Judgement, covers: Covers
) -> Lane | str:
    """`desired_lane`, where it is known what the present ``lane`` is for and whom it does without."""
    barred = judged.barred(view)
    members = _members(view, replica, lane, target, barred)
    if isinstance(members, str):
        return members
    if lane and target and members == lane.members and verified(view, lane, target):
        return lane  # the sources have done their part; losing one now costs nothing
    sources, reason = choose_sources(view, lane, replica, target, barred, covers, len(members))
    if not sources:
        if not (lane and target and hold_already(view, lane, members, target)):
            return reason
        reason = "its own ranks hold it"
    neighbours = _neighbours(view, lane, target, replica, members, barred) if _from_trainers(sources) else ()
    return Lane(replica, members, sources, neighbours, judged.excluded, reason, judged.suspicions)


def differs(lane: Lane, wanted: Lane) -> tuple[str, bool]:
    """What makes a lane turn towards ``wanted`` (empty: nothing does), and whether somebody goes."""
    same = lane.members == wanted.members
    before, after = [frozenset[SlotId]() if same else frozenset(s.id for s in x.members) for x in (lane, wanted)]
    sides = (
        ("members", before, after),
        ("sources", lane.source_ids, wanted.source_ids),
        ("neighbours", frozenset(lane.neighbours), frozenset(wanted.neighbours)),
    )
    changed = [(name, *_change(old, new)) for name, old, new in sides if old is not new and old != new]
    if not changed:
        return "", False
    name, gone, come = changed[0]
    words = [f"-({_keys(gone)})"] * bool(gone) + [f"+({_keys(come)})"] * bool(come)
    return f"{name} changed: {' '.join(words)}", any(gone for _name, gone, _come in changed)


@functools.lru_cache(64)
def _change(old: frozenset[SlotId], new: frozenset[SlotId]) -> tuple[frozenset[SlotId], frozenset[SlotId]]:
    """Who goes and who comes; many lanes share their sources."""
    return old - new, new - old


@functools.lru_cache(64)
def _keys(slots: frozenset[SlotId]) -> str:
    """Rank keys in short, for the reason is part of a record: thousands of trainer ranks may go at once."""
    groups = itertools.groupby(sorted(slots, key=natural), lambda slot: slot.key.rpartition("/")[0])
    return ", ".join(f"{group}/{pack_ranks(natural(slot)[1] for slot in found)}" for group, found in groups)


def target_of(view: View, replica: str, lane: Lane | None) -> PubId | None:
    """The publication that the lane still has to reach; None when it is idle.

    Without members nothing is under way: the newest one is as good a target as any, and has the most holders.
    """
    refit = view.refits.get(replica)
    if lane and lane.members and refit and refit.value.id.generation == _generation(view):
        return None if committed(view, lane, refit.value.id) else refit.value.id
    return view.newest


def _generation(view: View) -> int:
    return view.generation.value.number if view.generation else 0


def _from_trainers(sources: tuple[SlotId, ...]) -> bool:
    return bool(sources) and sources[0].key.startswith("trainer/")  # engines sort before them


def _members(
    view: View, replica: str, lane: Lane | None, target: PubId | None, barred: set[SlotId]
) -> tuple[Slot, ...] | str:
    ranks = view.replicas().get(replica, {})
    world = max((info.world for info in ranks.values()), default=0)
    missing = [str(rank) for rank in range(world) if rank not in ranks]
    if not world or missing:
        return f"rank {', '.join(missing) or '0'} is not registered"
    slots, ids = view.slots(), view.ids()
    keys = [ranks[rank].key for rank in range(world)]
    silent = [key for key in keys if key not in slots or ids[key] in barred]
    if silent:
        return f"{', '.join(silent)}: no working mover"
    if len({ranks[rank].mode == "in_place" for rank in range(world)}) > 1:  # no ticket is for all of them
        return "some of its ranks take weights in_place, and others in a shadow"
    members = tuple(slots[key] for key in keys)
    return away(view, lane, target, members) or members


def away(view: View, lane: Lane | None, target: PubId | None, members: tuple[Slot, ...]) -> str:
    """Why a lane has to do without these members: a parked node at once, a draining one as soon as no refit runs."""
    for slot in members:
        if slot.node in view.parked:
            return f"{slot.node} is parked: {view.parked[slot.node].value.reason}"
    gone = sorted(draining(view).intersection(slot.node for slot in members))
    return f"{', '.join(gone)}: draining" if gone and not _under_way(view, lane, target, members) else ""


def _under_way(view: View, lane: Lane | None, target: PubId | None, members: tuple[Slot, ...]) -> bool:
    """Whether bytes have moved that would be lost, or a commit is on its way to its ranks."""
    if lane is None or lane.members != members:
        return False
    if target:
        return started(view, lane, target)
    refit = view.refits.get(lane.replica)
    return bool(refit and not served(view, lane, refit.value.id))


def _neighbours(
    view: View, lane: Lane | None, target: PubId | None, replica: str, members: tuple[Slot, ...], barred: set[SlotId]
) -> tuple[SlotId, ...]:
    """Ranks of earlier lanes on the members' nodes: what they verify need not come over the network again.

    Only lanes that sort before this one: waiting runs one way, so that two lanes never wait for each other. Once bytes
    move, a new neighbour is of no use until the next publication.
    """
    by_node = view.memo("members_by_node", ("lanes", "members"), lambda: _members_by_node(view))
    nodes = {slot.node for slot in members}
    near = {slot for node in nodes for other, slot in by_node.get(node, ()) if other < replica and slot not in barred}
    if lane and target and started(view, lane, target):
        near.intersection_update(lane.neighbours)
    return tuple(sorted(near, key=natural))


def _members_by_node(view: View) -> dict[str, list[tuple[str, SlotId]]]:
    """Live members of all lanes."""
    found: dict[str, list[tuple[str, SlotId]]] = {}
    slots, ids = view.slots(), view.ids()
    for replica, lane in view.open_lanes().items():
        for slot in lane.members:
            if slots.get(slot.key) == slot:
                found.setdefault(slot.node, []).append((replica, ids[slot.key]))
    return found
