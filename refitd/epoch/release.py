"""When a trainer rank gets its memory back. Pure: the offer's age is passed in."""

from __future__ import annotations

from typing import NamedTuple

from refitd.epoch.publish import paused
from refitd.epoch.records import Lane, Offer, PubId
from refitd.epoch.stage import committed, hopeless, stable, verified
from refitd.epoch.view import View

RELEASED, SKIPPED = "RELEASED", "SKIPPED"


class Verdict(NamedTuple):
    """``outcome`` is RELEASED, SKIPPED, or empty while the loan stands; ``planned`` once a lane counts on it."""

    outcome: str
    planned: bool
    reason: str


def loan(view: View, offer: Offer, age: float, patience: float, planned: bool = False) -> Verdict:
    """What becomes of an offer that is ``age`` seconds old; it ends after ``patience`` where no lane planned it.

    ``planned`` is the last verdict's: an offer that was planned once is held for as long as a replica may come for it.
    """
    if view.generation and offer.run in view.generation.value.past:
        return Verdict(SKIPPED, False, "a newer run has opened a generation")
    publication = published(view, offer)
    if publication is None:
        return _unpublished(view, offer, age, patience)
    if publication != view.newest:
        return Verdict(RELEASED, True, "a newer publication replaced it")
    lanes = _lanes(view, offer, publication)
    if lanes and all(verified(view, lane, publication) for lane in lanes):
        return Verdict(RELEASED, True, f"{len(lanes)} lanes verified every byte")
    planned = any(stable(view, lane) for lane in lanes) or (planned and _awaited(view, publication))
    if not lanes and (why := paused(view)):
        return Verdict(SKIPPED, False, why)
    if not planned and age > patience:
        return Verdict(SKIPPED, False, f"no lane planned it within {patience:g} s")
    waiting = ", ".join(lane.replica for lane in lanes if not verified(view, lane, publication))
    return Verdict("", planned, f"waiting for {waiting or 'a lane'}")


def _awaited(view: View, publication: PubId) -> bool:
    """Whether some replica can still come for the publication, with or without a lane at present.

    Its lane is closed from a mover's death until the next one is there; the trainer's memory may be all that it has.
    """
    lanes = view.open_lanes()
    ended = {name for name, lane in lanes.items() if hopeless(view, lane) or committed(view, lane, publication)}
    return not view.replicas().keys() <= ended


def published(view: View, offer: Offer) -> PubId | None:
    """The publication that an offer became part of, if it is the latest record."""
    if view.publication and view.publication.value.taken.get(offer.key) == offer.id:
        return PubId(view.publication.value.generation, view.publication.revision)
    return None


def joined(view: View, offer: Offer) -> PubId | None:
    """The publication that the offer became part of, or that its step was published as without this rank.

    A rank that offers a step again, after it was published with an earlier offer of its own, has other weights.
    """
    record = view.publication
    if record and view.newest and record.value.step == offer.step and offer.key not in record.value.taken:
        return view.newest
    return published(view, offer)


def _unpublished(view: View, offer: Offer, age: float, patience: float) -> Verdict:
    if joined(view, offer):
        return Verdict(SKIPPED, False, "the step was published without this rank")
    if why := paused(view):
        return Verdict(SKIPPED, False, why)
    if age > patience:
        return Verdict(SKIPPED, False, f"nobody planned it within {patience:g} s")
    return Verdict("", False, "waiting for the other ranks of the run")


def _lanes(view: View, offer: Offer, publication: PubId) -> list[Lane]:
    """Open lanes that read from the offering rank and can reach this publication; while the job is paused, only those
    that are at it."""
    refits, runs = view.refits, not paused(view)
    return [
        lane
        for name, lane in view.open_lanes().items()
        if not hopeless(view, lane)
        and _reads(view, lane, offer)
        and (
            runs if name not in refits or refits[name].value.id < publication else refits[name].value.id == publication
        )
    ]


def _reads(view: View, lane: Lane, offer: Offer) -> bool:
    """Whether the lane reads from the rank in this life of its client (whose mover may have died meanwhile)."""
    slot = lane.ids.get(offer.key)
    if slot is None or slot not in lane.source_ids:
        return False
    live = view.slots().get(offer.key)
    return live is None or live.incarnation == offer.incarnation
