"""What the leader writes next. Pure: records in, guarded writes with reasons out.

Each write names the revision that the record must still have (0: absent). Running `decide` again on the same records
gives the same writes; a successor that has only the records goes on where the last leader stopped.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import NamedTuple

from refitd.epoch.codec import encode
from refitd.epoch.holders import Covers, holders, trainers
from refitd.epoch.lanes import desired_lane, differs, exclusions, failures, target_of
from refitd.epoch.records import Generation, Lane, Offer, PubId, Publication, Refit, ReportRecord
from refitd.epoch.stage import committed, hopeless, served, started
from refitd.epoch.view import View

KEEP_REPORTS = 8


class Write(NamedTuple):
    """One record to put (or delete, where ``data`` is None) if its revision is still ``expected``."""

    key: str
    data: bytes | None
    expected: int
    reason: str


def decide(view: View, grace_over: bool, covers: Covers) -> list[Write]:
    """All writes that the records call for now.

    ``grace_over``: unpublished offers have waited long enough for ranks of the group that are silent.
    """
    return [
        *_generation(view),
        *_publication(view, grace_over, covers),
        *(write for replica in _replicas(view) for write in _lane(view, replica, covers)),
        *(write for lane in view.open_lanes().values() for write in _refit(view, lane, covers)),
        *_report(view),
        *_cleanup(view),
    ]


def unpublished(view: View) -> list[Offer]:
    """Open offers of the current generation's live ranks that are in no publication yet, by key."""
    if not view.generation:
        return []
    live = {(key, slot.incarnation) for key, slot in trainers(view).items()}
    taken = set(view.publication.value.offers) if view.publication else set()
    newest_step = view.publication.value.step if view.newest and view.publication else None
    found = [
        offer
        for stored in view.offers.values()
        for offer in stored.value.offers
        if (offer.key, offer.incarnation) in live and offer not in taken and not _late(offer, newest_step, taken)
    ]
    return sorted(found, key=lambda offer: offer.key)


def _late(offer: Offer, newest_step: int | None, taken: set[Offer]) -> bool:
    """An offer of a step that is published already by the other ranks: it makes no second publication of it."""
    return offer.step == newest_step and all(other.key != offer.key for other in taken)


def _replicas(view: View) -> list[str]:
    return sorted({*view.replicas(), *view.lanes})


def _generation(view: View) -> Iterator[Write]:
    present = view.generation.value if view.generation else Generation(0, "", ())
    fresh = [run for run in _complete_runs(view) if run != present.run and run not in present.past]
    if fresh:
        past = (*present.past, present.run) if present.run else present.past
        opened = Generation(present.number + 1, fresh[-1], past)
        expected = view.revision_of("generation")
        yield Write("generation", encode(opened), expected, f"all ranks of run {opened.run} are registered")


def _complete_runs(view: View) -> list[str]:
    """Runs whose ranks are all registered, the one that was completed last at the end."""
    ranks: dict[str, dict[int, int]] = {}
    worlds: dict[str, int] = {}
    for member, info in view.ranks():
        if info.side == "trainer":
            ranks.setdefault(info.group, {})[info.rank] = member.revision
            worlds[info.group] = info.world
    whole = [run for run, seen in ranks.items() if len(seen) == worlds[run]]
    return sorted(whole, key=lambda run: (max(ranks[run].values()), run))


def _publication(view: View, grace_over: bool, covers: Covers) -> Iterator[Write]:
    offers = unpublished(view)
    if not offers or not view.generation:
        return
    steps = collections.Counter(offer.step for offer in offers)
    step = max(steps, key=lambda step: (steps[step], step))
    chosen = tuple(offer for offer in offers if offer.step == step)
    live = trainers(view)
    silent = sorted(set(live) - {offer.key for offer in chosen})
    if silent and not (grace_over and _enough(view, [live[offer.key].digest for offer in chosen], covers)):
        return
    reason = f"without {', '.join(silent)}" if silent else "every rank of the run offered it"
    record = Publication(view.generation.value.number, step, chosen)
    yield Write("publication", encode(record), view.revision_of("publication"), reason)


def _enough(view: View, digests: list[str], covers: Covers) -> bool:
    return all(covers(replica, digests) for replica in view.replicas())


def _lane(view: View, replica: str, covers: Covers) -> Iterator[Write]:
    present = view.lanes.get(replica)
    wanted = desired_lane(view, replica, covers)
    key, expected = f"lanes/{replica}", present.revision if present else 0
    if isinstance(wanted, str):
        if present and present.value.members and not _members_work(view, present.value, covers):
            shut = exclusions(view, present.value, target_of(view, replica, present.value), covers)
            yield Write(key, encode(Lane(replica, (), (), (), shut, wanted)), expected, wanted)
        return
    reason = _turn(view, present.value, wanted) if present else f"the replica is whole; {wanted.reason}"
    if reason:
        record = Lane(replica, wanted.members, wanted.sources, wanted.neighbours, wanted.excluded, reason)
        yield Write(key, encode(record), expected, reason)


def _turn(view: View, lane: Lane, wanted: Lane) -> str:
    changed = differs(lane, wanted)
    retry = next((f"{node}: {ack.reason}" for node, ack in failures(view, lane) if not ack.permanent), "")
    return changed or (f"again, after {retry}" if retry else "")


def _members_work(view: View, lane: Lane, covers: Covers) -> bool:
    """Whether the lane's members are the slots that live now, and none of them is suspect."""
    slots = view.slots()
    barred = {e.slot for e in exclusions(view, lane, target_of(view, lane.replica, lane), covers)}
    return all(slots.get(slot.key) == slot and slot not in barred for slot in lane.members)


def _refit(view: View, lane: Lane, covers: Covers) -> Iterator[Write]:
    newest, publication = view.newest, view.publication
    if newest is None or publication is None:
        return
    present = view.refits.get(lane.replica)
    reason = _move_on(view, lane, present.value if present else None, newest, covers)
    if reason:
        record = Refit(newest.generation, newest.revision, publication.value.step, reason)
        yield Write(f"refits/{lane.replica}", encode(record), present.revision if present else 0, reason)


def _move_on(view: View, lane: Lane, refit: Refit | None, newest: PubId, covers: Covers) -> str:
    """Why the lane should go for the newest publication; empty where it should not."""
    if refit is None:
        return "first refit of the replica"
    if refit.id == newest:
        return ""
    if refit.id.generation != newest.generation:
        return f"generation {newest.generation} has begun"
    if committed(view, lane, refit.id):
        return "the last one is applied" if served(view, lane, refit.id) else ""
    if not started(view, lane, refit.id):
        return "a newer one came before the first byte"
    alive = [slot for key, slot in holders(view, refit.id).items() if not key.startswith(f"engine/{lane.replica}/")]
    return (
        "" if alive and covers(lane.replica, (slot.digest for slot in alive)) else "no holder of the older one is left"
    )


def _report(view: View) -> Iterator[Write]:
    newest = view.newest
    if newest is None or f"{newest.revision}" in view.reports:
        return
    report = assess(view, newest)
    lanes = view.open_lanes()
    waiting = [replica for replica in report.missing if replica in lanes and not hopeless(view, lanes[replica])]
    if lanes and not waiting:
        yield Write(f"reports/{newest.revision}", encode(report), 0, "every whole replica has ended")


def assess(view: View, publication: PubId, closed: str = "every whole replica has ended") -> ReportRecord:
    """Who has committed a publication by now, and why the others have not."""
    done = tuple(name for name, lane in view.open_lanes().items() if committed(view, lane, publication))
    missing = {replica: why_not(view, replica) for replica in view.replicas() if replica not in done}
    step = view.publication.value.step if view.publication else 0
    return ReportRecord(publication.generation, publication.revision, step, done, missing, closed)


def why_not(view: View, replica: str) -> str:
    """Why a replica has not committed the newest publication."""
    stored = view.lanes.get(replica)
    if stored is None or not stored.value.members:
        wanted = desired_lane(view, replica, lambda _replica, _digests: True)
        return wanted if isinstance(wanted, str) else "its lane is not made yet"
    failed = failures(view, stored.value)
    return f"{failed[0][0]}: {failed[0][1].reason}" if failed else "it has not verified every byte yet"


def _cleanup(view: View) -> Iterator[Write]:
    old = sorted(view.reports, key=int)[:-KEEP_REPORTS]
    yield from (Write(f"reports/{name}", None, view.reports[name].revision, "an old report") for name in old)
    for name, stored in view.acks.items():
        replica, _, node = name.partition("/")
        lane = view.lanes.get(replica)
        if lane is None or node not in lane.value.nodes:
            yield Write(f"acks/{name}", None, stored.revision, "the node is not in the lane any more")
