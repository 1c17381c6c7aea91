"""Generations and publications: what the trainers' offers amount to."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.holders import Covers, trainers, world
from refitd.epoch.records import Generation, Offer, OfferId, Publication, Runs
from refitd.epoch.view import View

MAX_WAITING = 64  # runs that never became complete, and that no newer one has made past


def paused(view: View) -> str:
    """Why the job is paused; empty where it is not."""
    control = view.control.value if view.control else None
    return f"the job is paused: {control.reason or 'no reason given'}" if control and control.paused else ""


def unpublished(view: View) -> list[Offer]:
    """Open offers of the current generation's live ranks that are in no publication yet, by key."""
    return view.memo("unpublished", ("offers", "members", "generation", "publication"), lambda: _unpublished(view))


def _unpublished(view: View) -> list[Offer]:
    left = view.memo("untaken", ("offers", "publication"), lambda: _untaken(view))
    if not left or not view.generation:
        return []
    live = {(key, slot.incarnation) for key, slot in trainers(view).items()}
    taken = view.publication.value.taken if view.publication else {}
    newest_step = view.publication.value.step if view.newest and view.publication else None
    return [offer for offer in left if (offer.key, offer.incarnation) in live and not _late(offer, newest_step, taken)]


def _untaken(view: View) -> list[Offer]:
    """Open offers that the publication does not name, whoever made them, by key."""
    taken = view.publication.value.taken if view.publication else {}
    offers = (offer for stored in view.offers.values() for offer in stored.value.offers)
    return sorted((offer for offer in offers if taken.get(offer.key) != offer.id), key=lambda offer: offer.key)


def _late(offer: Offer, newest_step: int | None, taken: dict[str, OfferId]) -> bool:
    """An offer of a step that is published already by the other ranks: it makes no second publication of it."""
    return offer.step == newest_step and offer.key not in taken


def generation(view: View) -> Iterator[Write]:
    """The next generation, once all ranks of a newer run are registered; and, in the order they came, who waits for it.

    A run that was met before one that led is past with it: processes that a failed start has left behind may become
    complete when a newer run trains already.
    """
    present = view.generation.value if view.generation else Generation(0, "", ())
    known = view.runs.value.order if view.runs else ()
    waiting = view.memo("waiting_runs", ("members", "generation", "runs"), lambda: _waiting(view, present, known))
    complete = [run for run, whole in waiting.items() if whole]
    order = tuple(waiting)
    if complete:
        run, older = complete[-1], order[: order.index(complete[-1])]
        order = order[len(older) + 1 :]
        past = (*present.past, *((present.run,) if present.run else ()), *older)
        reason = f"all ranks of run {run} are registered"
        opened = encode(Generation(present.number + 1, run, past))
        yield Write("generation", opened, view.revision_of("generation"), reason)
    if order[-MAX_WAITING:] != known:
        yield Write("runs", encode(Runs(order[-MAX_WAITING:])), view.revision_of("runs"), "runs that have not led yet")


def _waiting(view: View, present: Generation, known: tuple[str, ...]) -> dict[str, bool]:
    """Runs that never led, in the order in which their first rank was met, and whether all of their ranks are here."""
    ranks: dict[str, dict[int, int]] = {}
    worlds: dict[str, int] = {}
    for member, info in view.ranks():
        if info.side == "trainer":
            ranks.setdefault(info.group, {})[info.rank] = member.revision
            worlds[info.group] = info.world
    fresh = sorted(ranks, key=lambda run: (min(ranks[run].values()), run))
    over = {present.run, *present.past}
    order = [run for run in dict.fromkeys((*known, *fresh)) if run not in over]
    return {run: len(ranks.get(run, ())) == worlds.get(run) for run in order}


def publication(view: View, facts: Facts, covers: Covers) -> Iterator[Write]:
    """The next publication: all ranks of the run offer one step, or after the grace those that hold it all."""
    offers = unpublished(view)
    if not offers or not view.generation:
        return
    steps = collections.Counter(offer.step for offer in offers)
    step = max(steps, key=lambda step: (steps[step], step))
    chosen = tuple(sorted((offer for offer in offers if offer.step == step), key=_natural))
    if not facts.store_settled and len(chosen) < world(view):
        return  # whoever is absent may only be cut off from the store
    live = trainers(view)
    missing = sorted(set(live) - {offer.key for offer in chosen})
    if away := world(view) - len(live):
        missing.append(f"{away} that are not registered")
    if missing and not (facts.grace_over and _enough(view, [live[offer.key].digest for offer in chosen], covers)):
        return
    reason = f"without {', '.join(missing)}" if missing else "every rank of the run offered it"
    number = view.publication.value.number + 1 if view.publication else 1
    record = Publication(view.generation.value.number, step, tuple(offer.id for offer in chosen), number)
    yield Write("publication", encode(record), view.revision_of("publication"), reason, guards(view))


def guards(view: View) -> tuple[tuple[str, int], ...]:
    """What must be as we know it when something new is begun: the generation, and the operators' word."""
    return (("generation", view.revision_of("generation")), ("control", view.revision_of("control")))


def _natural(offer: Offer) -> tuple[str, int]:
    group, _, rank = offer.key.rpartition("/")
    return group, int(rank)


def _enough(view: View, digests: list[str], covers: Covers) -> bool:
    return all(covers(replica, digests) for replica in view.replicas())
