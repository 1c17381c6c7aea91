"""Whether a receive can still end, and who is told that it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.daemon.calls import LEFT, Calls
from refitd.daemon.lane import LaneDriver
from refitd.daemon.rank import NO_PUBLICATION, LocalRank
from refitd.epoch.codec import encode
from refitd.epoch.records import Ack, Commit, Member, PubId, RankInfo
from refitd.epoch.view import View

OLD, NEW = PubId(1, 28), PubId(1, 30)


def calls(ranks: dict[str, Any], lead: PubId, ahead: PubId = NO_PUBLICATION) -> Calls:
    """Of a lane whose lead's node says that the lead serves a publication, or has left its receive; ``ahead``: what the
    other rank's node says that one serves."""
    view = View()
    view.put("acks/r0/a", encode(Ack(9, "digest", "prepared", *NEW, {}, served=(0, 0), lead=lead)), 5, 5)
    view.put("acks/r0/b", encode(Ack(9, "digest", "built", 0, 0, {}, served=(0, 0), ahead=ahead)), 6, 6)
    members = [SimpleNamespace(key=f"engine/r0/{rank}", node=node) for rank, node in enumerate("ab")]
    lane = SimpleNamespace(lead=members[0] if members else None, members=members)
    context = SimpleNamespace(agreement=SimpleNamespace(view=view), ranks=ranks)
    return Calls(cast("LaneDriver", SimpleNamespace(context=context, lane=lane, replica="r0")))


def waiting(rank: int, revision: int = OLD.revision, **more: PubId | None) -> LocalRank:
    """A rank in a receive."""
    receiving = SimpleNamespace(generation=1, revision=revision)
    return cast("LocalRank", cast("Any", SimpleNamespace(key=f"engine/r0/{rank}", receiving=receiving, **more)))


@pytest.mark.parametrize(("heard", "left_behind"), [(OLD, True), (PubId(1, 20), False)])
def test_what_the_lead_heard_is_known_although_its_neighbour_missed_it(heard: PubId, left_behind: bool) -> None:
    """The lead's node says what the lead serves, not only the oldest that any of its ranks serves."""
    assert bool(calls({}, heard).superseded(waiting(1), NEW)) is left_behind


@pytest.mark.parametrize(
    ("since", "over"),
    [(None, True), (NEW, True), (OLD, False), (NO_PUBLICATION, False)],
    ids=["no ticket yet", "newer ones only", "this one", "an older daemon's"],
)
def test_a_lead_with_a_ticket_of_another_life_is_sent_away(since: PubId | None, over: bool) -> None:
    """Its mates are not in that receive, and it can order them nowhere; one that was given it may go on."""
    lead = waiting(0, since=since, left=NO_PUBLICATION, served=NO_PUBLICATION)
    found = calls({lead.key: lead}, NO_PUBLICATION)
    assert bool(found.superseded(lead, NEW)) is over
    assert lead.left == (OLD if over else NO_PUBLICATION)
    mate = waiting(1)
    assert bool(found.superseded(mate, NEW)) is over, "whoever is in that receive with it must leave it, too"


def test_a_lead_that_takes_a_ticket_again_that_it_was_sent_away_with_is_sent_away_again() -> None:
    """Its mates are told that it has left that receive, and would not stay with it."""
    lead = waiting(0, since=OLD, left=OLD, served=NO_PUBLICATION)
    found = calls({lead.key: lead}, NO_PUBLICATION)
    assert found.superseded(waiting(1), NEW) == LEFT
    assert found.superseded(lead, NEW) == "superseded: its lead has left (1, 28), (1, 30) is next: take its ticket"


def test_a_lead_that_asks_for_what_its_lane_goes_for_may_stay() -> None:
    """Whoever gave it the ticket: its mates have that publication, or are in that receive."""
    lead = waiting(0, NEW.revision, since=None, left=NO_PUBLICATION, served=NO_PUBLICATION)
    assert calls({lead.key: lead}, NO_PUBLICATION).superseded(lead, NEW) == ""


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
    found = calls(ranks, NO_PUBLICATION, NO_PUBLICATION if here else serves)
    assert bool(found.superseded(lead, NEW)) is over
    assert lead.left == (OLD if over else NO_PUBLICATION)


LIVES = {"engine/r0/0": "a1", "engine/r0/1": "b1"}
AGAIN = {**LIVES, "engine/r0/1": "b2"}


def pair(lives: dict[str, str]) -> Any:
    """A lane of two, each on its node."""
    members = [
        SimpleNamespace(key=key, node=node, incarnation=lives[key]) for key, node in zip(lives, "ab", strict=False)
    ]
    return SimpleNamespace(lead=members[0] if members else None, members=members, incarnations=lives)


def turned(
    *turns: tuple[int, dict[str, str]], commit: dict[str, str] | None = None, claims: dict[str, int] | None = None,
    **acks: Ack,
) -> Calls:  # fmt: skip
    """On node a, after turns of the lane, with what nodes say."""
    view = View()
    for key, claim in (claims or {}).items():
        rank = RankInfo(key, "engine", "r0", int(key[-1]), 2, turns[-1][1][key], "digest", "in_place", 1, claim=claim)
        view.put("members/b", encode(Member("b", "b", "b:1", "i", "boot", (1,), (rank,))), 2, 2)
    if commit:
        view.put("commits/r0", encode(Commit(*OLD, 1, 3, commit, 1)), 4, 4)
    for number, (node, ack) in enumerate(acks.items(), 6):
        view.put(f"acks/r0/{node}", encode(ack), number, number)
    driver = SimpleNamespace(context=SimpleNamespace(agreement=SimpleNamespace(view=view), ranks={}), replica="r0")
    found = Calls(cast("LaneDriver", driver))
    for driver.token, lives in turns:
        driver.lane = pair(lives)
        found.turned(driver.lane, driver.token)
    return found


def called(token: int | None, rank: int = 0) -> Any:
    """A rank in a receive to which it was called under a token; in none."""
    receiving = token and SimpleNamespace(generation=1, revision=NEW.revision, token=token)
    return SimpleNamespace(key=f"engine/r0/{rank}", receiving=receiving, void=0)


def says(token: int, phase: str, publication: PubId, void: int = 0) -> Ack:
    return Ack(token, "digest", phase, *publication, {}, served=(0, 0), void=void)


BUILT = says(9, "built", NO_PUBLICATION)
WHY = "engine/r0/1 came anew and was not called to this receive: take the next ticket"


@pytest.mark.parametrize(
    ("token", "ack", "void"),
    [
        (5, BUILT, True),
        (5, None, True),
        (5, says(5, "prepared", NEW), True),
        (5, says(9, "prepared", OLD), True),
        (5, says(9, "prepared", NEW), False),
        (5, says(9, "verified", NEW), False),
        (9, BUILT, False),
    ],
    ids=["not lent", "nothing said", "before the turn", "another one", "lent", "has it", "called since"],
)
def test_a_receive_to_which_a_mate_was_not_called_is_void(token: int, ack: Ack | None, void: bool) -> None:
    """It came anew under token 9; who was called before waits for it in vain, unless it lends by itself."""
    found, lead = turned((5, LIVES), (9, AGAIN), **({"b": ack} if ack else {})), called(token)
    cast("Any", found._driver).context.ranks[lead.key] = lead
    found.judge(lead, NEW)
    assert lead.void == (5 if void else 0)
    assert found.void(lead) == (WHY if void else "")


def test_a_lead_that_came_anew_and_is_in_no_receive_voids_those_before_its_life() -> None:
    """Its mates were called by its predecessor. In a receive of a ticket that somebody handed to it, it lends."""
    lives = {**LIVES, "engine/r0/0": "a2"}
    found, lead = turned((5, LIVES), (9, lives), b=BUILT), called(None)
    lead.shadowed, lead.holds = False, lambda _asked: False
    cast("Any", found._driver).context.ranks[lead.key] = lead
    found.judge(lead, NEW)
    assert lead.void == 8
    lead.void, lead.receiving = 0, called(5).receiving
    found.judge(lead, NEW)
    assert lead.void == 0


def test_a_lead_that_lives_on_and_is_in_no_receive_voids_nothing() -> None:
    """It may be about to lend; it calls everybody anyhow. Nobody can have a ticket from before its first token."""
    found, lead = turned((5, LIVES), (9, AGAIN), b=BUILT), called(None)
    lead.shadowed, lead.holds = False, lambda _asked: False
    cast("Any", found._driver).context.ranks[lead.key] = lead
    found.judge(lead, NEW)
    assert lead.void == 4


@pytest.mark.parametrize(("token", "over"), [(4, True), (5, True), (6, False)])
def test_mates_follow_what_the_lead_s_node_says(token: int, over: bool) -> None:
    """Also in a receive that they begin only then, and whatever they know of lives themselves."""
    found = turned((9, AGAIN), commit=AGAIN, a=says(9, "built", NO_PUBLICATION, void=5))
    why = "a rank came anew and was not called to this receive: take the next ticket"
    assert found.void(called(token, 1)) == (why if over else "")
    assert found.void(called(None, 1)) == ""


def test_turns_for_other_reasons_void_nothing() -> None:
    """And a ticket that was given after a mate came anew is good for it, however often the lane turns then."""
    for turns, token, void in (
        (((5, LIVES), (9, LIVES)), 5, 0),
        (((5, LIVES), (8, AGAIN), (9, AGAIN)), 8, 0),
        (((5, LIVES), (8, AGAIN), (9, AGAIN)), 7, 7),
    ):
        found, lead = turned(*turns, b=BUILT), called(token)
        found.judge(lead, NEW)
        assert lead.void == void


@pytest.mark.parametrize(
    ("lives", "token", "void"), [(AGAIN, 3, 3), (AGAIN, 4, 0), (LIVES, 3, 0)], ids=["before", "after", "the same life"]
)
def test_a_daemon_that_comes_anew_knows_the_lives_of_the_last_commit(
    lives: dict[str, str], token: int, void: int
) -> None:
    """Another life began after it, which was made under token 3. Where there is none, everybody may have come anew."""
    found, lead = turned((9, lives), commit=LIVES, b=BUILT), called(token)
    found.judge(lead, NEW)
    assert lead.void == void
    found, lead = turned((9, lives), b=BUILT), called(token)
    found.judge(lead, NEW)
    assert lead.void == token
    lead = called(9)
    found.judge(lead, NEW)
    assert lead.void == 0


@pytest.mark.parametrize(("claim", "token", "void"), [(7, 6, 6), (7, 8, 0), (2, 4, 0)])
def test_nobody_was_called_before_a_daemon_met_it(claim: int, token: int, void: int) -> None:
    """Its replica's last commit may be much older than it is, and so may receives in which others wait for it."""
    found = turned((9, AGAIN), commit=LIVES, claims={"engine/r0/1": claim}, b=BUILT)
    lead = called(token)
    found.judge(lead, NEW)
    assert lead.void == void


@pytest.mark.parametrize(("lends", "void"), [("receiving", 0), ("holds", 0), ("shadowed", 0), ("", 5)])
def test_a_mate_of_this_node_is_asked_itself(lends: str, void: int) -> None:
    found, lead = turned((5, LIVES), (9, AGAIN)), called(5)
    cast("Any", found._driver).context.ranks["engine/r0/1"] = SimpleNamespace(
        receiving=lends == "receiving" or None, holds=lambda _asked: lends == "holds", shadowed=lends == "shadowed"
    )
    found.judge(lead, NEW)
    assert lead.void == void


@pytest.mark.parametrize(
    ("served", "shadowed", "behind", "token", "called"),
    [
        (NEW, True, NO_PUBLICATION, 2, True),
        (NEW, True, NEW, 2, False),
        (OLD, True, OLD, 2, False),
        (NEW, False, OLD, 2, False),
        (NEW, True, NO_PUBLICATION, 3, False),
    ],
    ids=["a mate serves nothing", "all serve it", "the lead has not switched", "in_place", "a mate is slow to switch"],
)  # fmt: skip
def test_a_lead_that_serves_is_to_call_a_shadow_that_came_anew(
    served: PubId, shadowed: bool, behind: PubId, token: int, called: bool
) -> None:
    found = turned((9, AGAIN), commit=AGAIN, b=Ack(9, "digest", "verified", *NEW, {}, served=behind))
    driver = cast("Any", found._driver)
    driver.lane.member_nodes = ["a", "b"]
    lead = driver.context.ranks["engine/r0/0"] = SimpleNamespace(
        shadowed=shadowed, served=served, page=SimpleNamespace(token=token)
    )
    assert found.lead_of_unapplied(NEW) is (lead if called else None)
