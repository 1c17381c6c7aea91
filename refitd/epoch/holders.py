"""Who may serve a publication, and whom a lane should ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from refitd.epoch.records import Lane, PubId, Slot
from refitd.epoch.view import View

# Whether layouts (by digest), one a rank, hold between them every element that the replica needs.
Covers = Callable[[str, Iterable[str]], bool]


def trainers(view: View) -> dict[str, Slot]:
    """Live ranks of the current generation's run, by key."""
    if not view.generation:
        return {}
    prefix = f"trainer/{view.generation.value.run}/"
    return {key: slot for key, slot in view.slots().items() if key.startswith(prefix)}


def holders(view: View, publication: PubId) -> dict[str, Slot]:
    """Live slots that can serve a publication: trainers whose loan is open, engine ranks of committed replicas."""
    return {**_lending(view, publication), **_committed(view, publication)}


def _lending(view: View, publication: PubId) -> dict[str, Slot]:
    if view.newest != publication or not view.publication:
        return {}
    open_now = {offer for stored in view.offers.values() for offer in stored.value.offers}
    lent = {offer.key: offer.incarnation for offer in view.publication.value.offers if offer in open_now}
    return {key: slot for key, slot in trainers(view).items() if lent.get(key) == slot.incarnation}


def _committed(view: View, publication: PubId) -> dict[str, Slot]:
    slots = view.slots()
    lends = {info.key for _member, info in view.ranks() if info.lends}
    found: dict[str, Slot] = {}
    for replica, stored in view.commits.items():
        target = view.refits.get(replica)
        moved_on = target is not None and target.value.id != publication
        if stored.value.id != publication or moved_on:
            continue
        for key, incarnation in stored.value.incarnations.items():
            if key in slots and key in lends and slots[key].incarnation == incarnation:
                found[key] = slots[key]
    return found


def choose_sources(
    view: View, lane: Lane | None, replica: str, publication: PubId | None, excluded: set[Slot], covers: Covers
) -> tuple[tuple[Slot, ...], str]:
    """Slots that a lane reads from, sorted by key, and why these; empty where nobody holds the whole model.

    The present sources stay as long as they hold what is needed: a refit under way is not turned for a better idea.
    Neighbours that committed come before trainers, so that a joiner leaves the trainers alone.
    """
    own = f"engine/{replica}/"
    pool = trainers(view) if publication is None else holders(view, publication)
    pool = {key: slot for key, slot in pool.items() if slot not in excluded and not key.startswith(own)}
    if publication and lane and lane.sources and all(pool.get(slot.key) == slot for slot in lane.sources):
        return lane.sources, "the sources are as before"
    engines = [slot for key, slot in pool.items() if key.startswith("engine/")]
    lenders = [slot for key, slot in pool.items() if key.startswith("trainer/")]
    for candidates, reason in (
        (engines, "replicas that committed it"),
        (lenders, "trainer ranks of the generation"),
        (engines + lenders, "replicas and trainers together"),
    ):
        if candidates and covers(replica, (slot.digest for slot in candidates)):
            return tuple(sorted(candidates, key=lambda slot: slot.key)), reason
    return (), "no live holder of every region"
