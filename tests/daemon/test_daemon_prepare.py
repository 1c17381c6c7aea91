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


def preparer(ranks: dict[str, Any], lead: PubId, ahead: PubId = NO_PUBLICATION) -> Preparer:
    """Of a lane whose lead's node says that the lead serves a publication, or has left its receive; ``ahead``: what the
    other rank's node says that one serves."""
    view = View()
    view.put("acks/r0/a", encode(Ack(9, "digest", "prepared", *NEW, {}, served=(0, 0), lead=lead)), 5, 5)
    view.put("acks/r0/b", encode(Ack(9, "digest", "built", 0, 0, {}, served=(0, 0), ahead=ahead)), 6, 6)
    members = [SimpleNamespace(key=f"engine/r0/{rank}", node=node) for rank, node in enumerate("ab")]
    lane = SimpleNamespace(lead=members[0], members=members)
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


@pytest.mark.parametrize("here", [True, False], ids=["a rank of this node", "another node's rank"])
@pytest.mark.parametrize(("serves", "over"), [(OLD, True), (NEW, True), (PubId(1, 20), False), (NO_PUBLICATION, False)])
def test_a_lead_that_came_back_does_not_wait_for_a_rank_that_has_it_already(
    here: bool, serves: PubId, over: bool
) -> None:
    """That one is in no receive, and lends for the next publication only when the lead has called it."""
    lead = waiting(0, since=OLD, left=NO_PUBLICATION, served=NO_PUBLICATION)
    ranks = {lead.key: lead}
    if here:
        mate = cast("LocalRank", cast("Any", SimpleNamespace(key="engine/r0/1", receiving=None, served=serves)))
        ranks[mate.key] = mate
    found = preparer(ranks, NO_PUBLICATION, NO_PUBLICATION if here else serves)
    assert bool(found._superseded(lead, NEW)) is over
    assert lead.left == (OLD if over else NO_PUBLICATION)


def test_a_lead_that_holds_the_publication_is_to_call_a_mate_that_came_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the ticket once, after a second: until then those who are in a receive may lend by themselves."""
    now = [100.0]
    monkeypatch.setattr("refitd.daemon.prepare.time.monotonic", lambda: now[0])
    told: list[tuple[str, PubId]] = []

    def tell(rank: Any, ticket: Any) -> None:
        told.append((rank.key, ticket.publication))
        rank.told = (ticket.kind, ticket.publication, 9)

    lead = SimpleNamespace(key="engine/r0/0", shadowed=False, told=None, holds=lambda asked: asked == NEW)
    found = preparer({lead.key: cast("Any", lead)}, NEW)
    driver = cast("Any", found._driver)
    driver.token, driver.tell = 9, tell
    driver.ticket = lambda kind, publication: SimpleNamespace(kind=kind, publication=publication)
    for now[0] in (100.0, 101.0):
        found._call(driver.lane, NEW)
    assert told == []
    for now[0] in (101.1, 102.0):
        found._call(driver.lane, NEW)
    assert told == [(lead.key, NEW)]
    found.reset()
    now[0] = 110.0
    found._call(driver.lane, OLD)
    now[0] = 112.0
    found._call(driver.lane, OLD)
    assert told == [(lead.key, NEW)], "a lead that does not hold it is asked to lend, as always"
