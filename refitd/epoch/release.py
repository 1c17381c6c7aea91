"""When a trainer rank gets its memory back. Pure: the offer's age is passed in."""

from __future__ import annotations

from typing import NamedTuple

from refitd.epoch.records import Lane, Offer, PubId
from refitd.epoch.stage import hopeless, stable, verified
from refitd.epoch.view import View

RELEASED, SKIPPED = "RELEASED", "SKIPPED"


class Verdict(NamedTuple):
    """``outcome`` is RELEASED, SKIPPED, or empty while the loan stands; ``planned`` once a lane counts on it."""

    outcome: str
    planned: bool
    reason: str


def loan(view: View, offer: Offer, age: float, patience: float) -> Verdict:
    """What becomes of an offer that is ``age`` seconds old; it ends after ``patience`` where no lane planned it."""
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
    planned = any(stable(view, lane) for lane in lanes)
    if not planned and age > patience:
        return Verdict(SKIPPED, False, f"no lane planned it within {patience:g} s")
    waiting = ", ".join(lane.replica for lane in lanes if not verified(view, lane, publication))
    return Verdict("", planned, f"waiting for {waiting or 'a lane'}")


def published(view: View, offer: Offer) -> PubId | None:
    """The publication that an offer became part of, if it is the latest record."""
    if view.publication and offer in view.publication.value.offers:
        return PubId(view.publication.value.generation, view.publication.revision)
    return None


def joined(view: View, offer: Offer) -> PubId | None:
    """The publication that the offer's step was published as, with or without this rank."""
    record = view.publication
    if record and view.newest and record.value.step == offer.step:
        return view.newest
    return published(view, offer)


def _unpublished(view: View, offer: Offer, age: float, patience: float) -> Verdict:
    others = view.publication.value.offers if view.publication else ()
    if joined(view, offer) and all(other.key != offer.key for other in others):
        return Verdict(SKIPPED, False, "the step was published without this rank")
    if age > patience:
        return Verdict(SKIPPED, False, f"nobody planned it within {patience:g} s")
    return Verdict("", False, "waiting for the other ranks of the run")


def _lanes(view: View, offer: Offer, publication: PubId) -> list[Lane]:
    """Open lanes that read from the offering rank and can reach this publication."""
    refits = view.refits
    return [
        lane
        for name, lane in view.open_lanes().items()
        if not hopeless(view, lane)
        and any(slot.key == offer.key and slot.incarnation == offer.incarnation for slot in lane.sources)
        and (name not in refits or refits[name].value.id <= publication)
    ]
