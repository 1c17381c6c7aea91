"""What a replica's lane should look like now: members, sources, neighbours, exclusions."""

from __future__ import annotations

from collections.abc import Iterator

from refitd.epoch.holders import Covers, choose_sources
from refitd.epoch.records import Ack, Exclusion, Lane, PubId, Slot
from refitd.epoch.stage import committed, verified
from refitd.epoch.view import View


def desired_lane(view: View, replica: str, covers: Covers) -> Lane | str:
    """The lane that a replica should have, or why it can have none.

    Compare it with the present record (less its reason): where they differ, or where an ack under the present token has
    failed and another try may help, the lane turns.
    """
    present = view.lanes.get(replica)
    lane = present.value if present else None
    target = target_of(view, replica, lane)
    excluded = exclusions(view, lane, target, covers)
    barred = {exclusion.slot for exclusion in excluded}
    members = _members(view, replica, barred)
    if isinstance(members, str):
        return members
    if lane and target and members == lane.members and verified(view, lane, target):
        return lane  # the sources have done their part; losing one now costs nothing
    sources, reason = choose_sources(view, lane, replica, target, barred, covers)
    if not sources:
        return reason
    neighbours = _neighbours(view, replica, members, barred) if _from_trainers(sources) else ()
    return Lane(replica, members, sources, neighbours, excluded, reason)


def differs(lane: Lane, wanted: Lane) -> str:
    """What makes a lane turn towards ``wanted``; empty where nothing does."""
    for field in ("members", "sources", "neighbours"):
        old, new = set(getattr(lane, field)), set(getattr(wanted, field))
        if old != new:
            gone, come = (", ".join(sorted(slot.key for slot in side)) for side in (old - new, new - old))
            return f"{field} changed: {' '.join([f'-({gone})'] * bool(gone) + [f'+({come})'] * bool(come))}"
    return ""


def failures(view: View, lane: Lane) -> list[tuple[str, Ack]]:
    """Failed acks under the lane's present token, by node."""
    acks = zip(lane.nodes, view.lane_acks(lane.replica, lane.nodes), strict=True)
    return [(node, ack) for node, ack in acks if ack and ack.phase == "failed"]


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


def _from_trainers(sources: tuple[Slot, ...]) -> bool:
    return all(slot.key.startswith("trainer/") for slot in sources)


def _members(view: View, replica: str, barred: set[Slot]) -> tuple[Slot, ...] | str:
    ranks = view.replicas().get(replica, {})
    world = max((info.world for info in ranks.values()), default=0)
    missing = [str(rank) for rank in range(world) if rank not in ranks]
    if not world or missing:
        return f"rank {', '.join(missing) or '0'} is not registered"
    slots = view.slots()
    keys = [ranks[rank].key for rank in range(world)]
    silent = [key for key in keys if key not in slots or slots[key] in barred]
    return f"{', '.join(silent)}: no working mover" if silent else tuple(slots[key] for key in keys)


def _neighbours(view: View, replica: str, members: tuple[Slot, ...], barred: set[Slot]) -> tuple[Slot, ...]:
    """Ranks of earlier lanes on the members' nodes: what they verify need not come over the network again.

    Only lanes that sort before this one: waiting runs one way, so that two lanes never wait for each other.
    """
    nodes = {slot.node for slot in members}
    slots = view.slots()
    near = [
        slot
        for other in sorted(view.lanes)
        if other < replica
        for slot in view.lanes[other].value.members
        if slot.node in nodes and slot not in barred and slots.get(slot.key) == slot
    ]
    return tuple(sorted(near, key=lambda slot: slot.key))


def exclusions(view: View, lane: Lane | None, target: PubId | None, covers: Covers) -> tuple[Exclusion, ...]:
    """Exclusions that still stand, and new ones from failed acks.

    A slot that lives anew is another slot, and welcome.
    """
    if lane is None:
        return ()
    live = set(view.slots().values())
    kept = [e for e in lane.excluded if e.slot in live and not (e.passing and target is None)]
    known = {e.slot for e in kept}
    for suspect in _suspects(view, lane, covers):
        if suspect.slot in live and suspect.slot not in known:
            kept.append(suspect)
            known.add(suspect.slot)
    return tuple(sorted(kept, key=lambda e: e.slot.key))


def _suspects(view: View, lane: Lane, covers: Covers) -> Iterator[Exclusion]:
    failed = failures(view, lane)
    blamed = {(ack.edge, node) for node, ack in failed if len(ack.edge) == 2}
    slots = {slot.key: slot for slot in (*lane.members, *lane.sources, *lane.neighbours)}
    for node, ack in failed:
        if len(ack.edge) != 2 or not all(key in slots for key in ack.edge):
            continue
        source, destination = (slots[key] for key in ack.edge)
        if source in lane.neighbours:
            yield Exclusion(source, True, f"{node}: {ack.reason}")
        elif source.node == node and (ack.edge, destination.node) not in blamed and destination.node != node:
            yield Exclusion(destination, False, f"{node}: {ack.reason}")
        elif _dispensable(lane, source, covers):
            yield Exclusion(source, False, f"{node}: {ack.reason}")


def _dispensable(lane: Lane, source: Slot, covers: Covers) -> bool:
    """The last holder of a region is never excluded."""
    rest = [slot.digest for slot in lane.sources if slot != source]
    return bool(rest) and covers(lane.replica, rest)
