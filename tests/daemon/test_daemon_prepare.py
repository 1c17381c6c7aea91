"""Who is asked to lend, and who is told that the receive it waits in has come to nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.daemon.lane import LaneDriver
from refitd.daemon.prepare import Preparer
from refitd.daemon.rank import NO_PUBLICATION, LocalRank
from refitd.epoch.codec import encode
from refitd.epoch.records import Ack, PubId
from refitd.epoch.view import View

OLD, NEW = PubId(1, 28), PubId(1, 30)


def preparer(ranks: dict[str, Any], lead: PubId) -> Preparer:
    """Of a lane whose lead's node says that the lead serves a publication, or has left its receive."""
    view = View()
    view.put("acks/r0/a", encode(Ack(9, "digest", "prepared", *NEW, {}, served=(0, 0), lead=lead)), 5, 5)
    lane = SimpleNamespace(lead=SimpleNamespace(key="engine/r0/0", node="a"))
    context = SimpleNamespace(agreement=SimpleNamespace(view=view), ranks=ranks)
    return Preparer(cast("LaneDriver", SimpleNamespace(context=context, lane=lane, replica="r0")))


def waiting(rank: int, revision: int = OLD.revision, **more: PubId | None) -> LocalRank:
    """A rank in a receive."""
    receiving = SimpleNamespace(generation=1, revision=revision)
    return cast("LocalRank", cast("Any", SimpleNamespace(key=f"engine/r0/{rank}", receiving=receiving, **more)))


@pytest.mark.parametrize(("heard", "left_behind"), [(OLD, True), (PubId(1, 20), False)])
def test_what_the_lead_heard_is_known_although_its_neighbour_missed_it(heard: PubId, left_behind: bool) -> None:
    """The lead's node says what the lead serves, not only the oldest that any of its ranks serves."""
    assert bool(preparer({}, heard)._superseded(waiting(1), NEW)) is left_behind


@pytest.mark.parametrize(
    ("since", "over"),
    [(None, True), (NEW, True), (OLD, False), (NO_PUBLICATION, False)],
    ids=["no ticket yet", "newer ones only", "this one", "an older daemon's"],
)
def test_a_lead_with_a_ticket_of_another_life_is_sent_away(since: PubId | None, over: bool) -> None:
    """Its mates are not in that receive, and it can order them nowhere; one that was given it may go on."""
    lead = waiting(0, since=since, left=NO_PUBLICATION, served=NO_PUBLICATION)
    found = preparer({lead.key: lead}, NO_PUBLICATION)
    assert bool(found._superseded(lead, NEW)) is over
    assert lead.left == (OLD if over else NO_PUBLICATION)
    mate = waiting(1)
    assert bool(found._superseded(mate, NEW)) is over, "whoever is in that receive with it must leave it, too"


def test_a_lead_that_asks_for_what_its_lane_goes_for_may_stay() -> None:
    """Whoever gave it the ticket: its mates have that publication, or are in that receive."""
    lead = waiting(0, NEW.revision, since=None, left=NO_PUBLICATION, served=NO_PUBLICATION)
    assert preparer({lead.key: lead}, NO_PUBLICATION)._superseded(lead, NEW) == ""
