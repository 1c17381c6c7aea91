"""Who may serve a publication, and whom a lane should ask."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from refitd.epoch.records import Lane, OfferId, PubId, Slot, SlotId, life_of
from refitd.epoch.view import View

# Whether layouts (by digest), one a rank, hold between them every element that the replica needs.
Covers = Callable[[str, Iterable[str]], bool]
Covering = Callable[[tuple[str, ...]], bool]  # the same for one replica
ENOUGH = 2  # a lane reads from so many engine ranks for each of its own, where there are more
_HOLDER_KINDS = ("members", "offers", "generation", "publication", "commits", "refits")


class Group(NamedTuple):
    """Slots of one replica or run, by rank, with their layouts' digests."""

    name: str
    ids: tuple[SlotId, ...]
    digests: tuple[str, ...]

    def without(self, excluded: set[SlotId]) -> Group:
        if not excluded or excluded.isdisjoint(self.ids):  # which would look at each of them
            return self
        kept = [pair for pair in zip(self.ids, self.digests, strict=True) if pair[0] not in excluded]
        return Group(self.name, tuple(slot for slot, _digest in kept), tuple(digest for _slot, digest in kept))


class Side(NamedTuple):
    """Slots of one side that may be read from, by group and rank."""

    groups: tuple[Group, ...]
    ids: tuple[SlotId, ...]
    digests: tuple[str, ...]

    @staticmethod
    def of(groups: Iterable[Group]) -> Side:
        found = tuple(groups)
        chain = itertools.chain.from_iterable
        return Side(found, tuple(chain(g.ids for g in found)), tuple(chain(g.digests for g in found)))

    def without(self, own: str, excluded: set[SlotId]) -> Side:
        """All but the ranks of one group and some others."""
        if (not excluded or excluded.isdisjoint(self.ids)) and all(group.name != own for group in self.groups):
            return self
        return Side.of(group.without(excluded) for group in self.groups if group.name != own)

    def few(
        self, own: str, excluded: set[SlotId], enough: int, covers: Covering, before: Collection[str] = ()
    ) -> Side | None:
        """Groups with so many slots, or more, that hold everything; all, where no fewer do. First those that are read
        from ``before``, then in a circle, for each lane from another one, so that not all ask the same."""
        after = zlib.crc32(own.encode()) % max(len(self.groups), 1)
        chosen, size, tried = list[Group](), 0, set[str]()
        others = [group for group in (*self.groups[after:], *self.groups[:after]) if group.name != own]
        others.sort(key=lambda group: group.name not in before)
        for number, group in enumerate(others, 1):
            chosen.append(group.without(excluded))
            size += len(chosen[-1].ids)
            if size >= enough or number == len(others):
                side = Side.of(sorted(chosen))
                if not tried.issuperset(side.digests) and covers(side.digests):
                    return side
                tried.update(side.digests)
        return None


class Pool(NamedTuple):
    """All that may be read from; ``tiers`` has (engines, trainers), those first that are to be preferred."""

    ids: frozenset[SlotId]
    tiers: tuple[tuple[Side, Side], ...]


def trainers(view: View) -> Mapping[str, Slot]:
    """Live ranks of the current generation's run, by key."""
    return view.memo("trainers", ("members", "generation"), lambda: _trainers(view))


def _trainers(view: View) -> dict[str, Slot]:
    if not view.generation:
        return {}
    prefix = f"trainer/{view.generation.value.run}/"
    return {key: slot for key, slot in view.slots().items() if key.startswith(prefix)}


def world(view: View) -> int:
    """How many ranks the current generation's run has, as those say that are registered."""
    return view.memo("world", ("members", "generation"), lambda: _world(view))


def _world(view: View) -> int:
    run = view.generation.value.run if view.generation else ""
    return max((info.world for _m, info in view.ranks() if (info.side, info.group) == ("trainer", run)), default=0)


def open_offers(view: View) -> frozenset[OfferId]:
    """All loans that stand, by name."""
    return view.memo(
        "open_offers", ("offers",), lambda: frozenset(o.id for s in view.offers.values() for o in s.value.offers)
    )


def holders(view: View, publication: PubId) -> Mapping[str, Slot]:
    """Live slots that can serve a publication: trainers whose loan is open, engine ranks of committed replicas."""

    def compute() -> dict[str, Slot]:
        return {**_lending(view, publication), **_committed(view, publication)}

    return view.memo(("holders", publication), _HOLDER_KINDS, compute)


def _lending(view: View, publication: PubId) -> dict[str, Slot]:
    if view.newest != publication or not view.publication:
        return {}
    lent, open_now = view.publication.value.taken, open_offers(view)
    return {
        key: slot
        for key, slot in trainers(view).items()
        if (offer := lent.get(key)) and offer in open_now and offer.life == life_of(slot.incarnation)
    }


def _committed(view: View, publication: PubId) -> dict[str, Slot]:
    slots = view.slots()
    lends = view.memo("lends", ("members",), lambda: {info.key for _member, info in view.ranks() if info.lends})
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


def draining(view: View) -> frozenset[str]:
    """Nodes whose present daemon wants to leave."""
    return view.memo("draining", ("drains", "members"), lambda: frozenset(
        node for node, stored in view.drains.items()
        if node in view.members and view.members[node].value.incarnation == stored.value.incarnation
    ))  # fmt: skip


def natural(slot: Slot | SlotId) -> tuple[str, int]:
    """Sorts slots by group and rank number."""
    return _group_and_rank(slot.key)


@functools.lru_cache(1 << 16)
def _group_and_rank(key: str) -> tuple[str, int]:
    group, _, rank = key.rpartition("/")
    return group, int(rank)


def choose_sources(
    view: View,
    lane: Lane | None,
    replica: str,
    publication: PubId | None,
    excluded: set[SlotId],
    covers: Covers,
    size: int = 1,
) -> tuple[tuple[SlotId, ...], str]:
    """Slots that a lane of ``size`` members reads from, by group and rank, and why these; empty where nobody holds the
    whole model. A run of which nobody is missing is read from all the same: its lane will say what it lacks.

    The present sources stay as long as they hold what is needed and want to stay: a refit under way is not turned for
    a better idea. Neighbours that committed come before trainers, so that a joiner leaves the trainers alone; of many
    of them only some, for all nodes of a source have part in the lane and in its turns. Nodes that drain or are parked
    serve only what nobody else has.
    """
    pool = _pool(view, publication)
    own = f"engine/{replica}"
    leaving = draining(view) | set(view.parked)
    as_before = publication and lane and lane.sources and _all_hold(view, publication, lane)
    if lane and as_before and excluded.isdisjoint(lane.source_ids) and leaving.isdisjoint(lane.source_nodes):
        return lane.sources, "the sources are as before"
    neighbours = lane.sources if lane and lane.sources and lane.sources[0].key.startswith("engine/") else ()
    before = {natural(slot)[0] for slot in neighbours}
    for engines, lenders in pool.tiers:
        if few := engines.few(own, excluded, ENOUGH * size, lambda digests: covers(replica, digests), before):
            return few.ids, "replicas that committed it"
        replicas, ranks = engines.without(own, excluded), lenders.without(own, excluded)
        for ids, digests, reason in (
            (ranks.ids, ranks.digests, "trainer ranks of the generation"),
            (replicas.ids + ranks.ids, replicas.digests + ranks.digests, "replicas and trainers together"),
        ):
            if ranks.ids and covers(replica, digests):
                return ids, reason
    run = pool.tiers[-1][1].without(own, excluded)
    if run.ids and len(run.ids) == world(view):
        return run.ids, "all trainer ranks of the generation, which do not hold all that it needs"
    return (), "no live holder of every region"


def hold_without(view: View, replica: str, publication: PubId, excluded: set[SlotId], covers: Covers) -> bool:
    """Whether some that a replica may read from hold everything without some others."""
    engines, lenders = (side.without(f"engine/{replica}", excluded) for side in _pool(view, publication).tiers[-1])
    digests = engines.digests + lenders.digests
    return bool(digests) and covers(replica, digests)


def unheld(view: View, replica: str, publication: PubId, covers: Covers) -> bool:
    """Whether neither others nor the ranks of its own lane hold all of the publication that the replica needs."""
    lane = view.open_lanes().get(replica)
    if lane and hold_already(view, lane, lane.members, publication):
        return False
    return not hold_without(view, replica, publication, set(), covers)


def _all_hold(view: View, publication: PubId, lane: Lane) -> bool:
    ids = lane.source_ids
    return view.memo(("all_hold", publication, ids), _HOLDER_KINDS, lambda: ids <= _pool(view, publication).ids)


def _pool(view: View, publication: PubId | None) -> Pool:
    kinds = (*_HOLDER_KINDS, "drains", "parked")
    return view.memo(("pool", publication), kinds, lambda: _make_pool(view, publication))


def _make_pool(view: View, publication: PubId | None) -> Pool:
    slots = trainers(view) if publication is None else holders(view, publication)
    ordered = sorted(slots.values(), key=natural)
    away, parked = draining(view), set(view.parked)
    tiers = []
    for barred in dict.fromkeys((away | parked, frozenset(parked), frozenset[str]())):
        left = [slot for slot in ordered if slot.node not in barred]
        tiers.append((_side(view, left, "engine/"), _side(view, left, "trainer/")))
    ids = view.ids()
    return Pool(frozenset(ids[key] for key in slots), tuple(tiers))


def _side(view: View, slots: list[Slot], prefix: str) -> Side:
    ids, groups = view.ids(), dict[str, list[Slot]]()
    for slot in slots:
        if slot.key.startswith(prefix):
            groups.setdefault(natural(slot)[0], []).append(slot)
    return Side.of(
        Group(name, tuple([ids[slot.key] for slot in found]), tuple([slot.digest for slot in found]))
        for name, found in groups.items()
    )


def hold_already(view: View, lane: Lane, members: Iterable[Slot], target: PubId) -> bool:
    """Whether every member has the publication by its own account, so that it needs nobody's bytes.

    It came with it (its client served it when it registered), its client is one that committed it, or its node verified
    it in this lane and has not changed since. A hint for the leader only: what is not committed each of them must show
    again under the new token (I4).
    """
    return all(_holds(view, lane, slot, target) for slot in members)


def _holds(view: View, lane: Lane, slot: Slot, target: PubId) -> bool:
    ack, owner = view.ack(lane.replica, slot.node), view.owner(slot.key)
    came = max(owner[0].created, owner[1].claim) if owner else 0  # an ack of a token before that is of another process
    verified = bool(ack and ack.phase == "verified" and ack.id == target and ack.token > came and slot in lane.members)
    return verified or view.came_with(slot.key) == target or _has_committed(view, lane.replica, slot, target)


def _has_committed(view: View, replica: str, slot: Slot, target: PubId) -> bool:
    commit = view.commits.get(replica)
    return bool(commit and commit.value.id == target and commit.value.incarnations.get(slot.key) == slot.incarnation)
