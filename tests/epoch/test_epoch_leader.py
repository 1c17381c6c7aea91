"""What the leader writes, with the revision that it expects and its reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from epoch_records import E0, E1, NONE, T0, T1, Book, all_ack, covers, info, standard

from refitd.epoch.cleanup import KEEP_REPORTS
from refitd.epoch.codec import decode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.leader import decide
from refitd.epoch.patience import Limits, Patience
from refitd.epoch.publish import unpublished
from refitd.epoch.records import Generation, Lane, Offers, PubId, Publication, Refit, ReportRecord
from refitd.epoch.reports import UNHELD, assess, ready, report, why_not

KINDS: dict[str, type[Any]] = {
    "generation": Generation, "publication": Publication, "lanes": Lane, "refits": Refit, "reports": ReportRecord,
}  # fmt: skip


def writes(book: Book, kind: str, grace: bool = False) -> list[tuple[Write, Any]]:
    """Writes of one kind with the record in them."""
    found = [
        write for write in decide(book.view, Facts(grace_over=grace), covers) if write.key.partition("/")[0] == kind
    ]
    return [(write, write.data and decode(KINDS[kind], write.data, kind)) for write in found]


def apply(book: Book) -> list[str]:
    """Carry out what is decided, round by round; the keys that were written."""
    keys: list[str] = []
    while found := decide(book.view, Facts(), covers):
        for write in found:
            assert write.expected == book.view.revision_of(write.key)
            book.revision += 1
            if write.data is None:
                book.view.delete(write.key, book.revision)
            else:
                created = book.view.created_of(write.key) or book.revision
                book.view.put(write.key, write.data, created, book.revision)
            keys.append(write.key)
        assert len(keys) < 30
    return keys


def test_a_generation_opens_once_all_ranks_of_a_run_are_registered() -> None:
    """Two of two, then nothing more to write."""
    book = Book("")
    book.node("t0", info(T0, "a", 2))
    assert writes(book, "generation") == []
    book.node("t1", info(T1, "b", 2))
    [(write, record)] = writes(book, "generation")
    assert record == Generation(1, "run1", ())
    assert (write.expected, write.reason) == (0, "all ranks of run run1 are registered")
    assert apply(book) == ["generation", "planner"]
    assert book.view.runs is None


def test_a_new_run_opens_the_next_generation_and_fences_the_old_one() -> None:
    """The old run is past and never opens again, however complete it is."""
    book, _target = standard()
    book.node("t2", info("trainer/run2/0", "ab"))
    [(write, record)] = writes(book, "generation")
    assert record == Generation(2, "run2", ("run1",))
    assert write.expected == book.view.revision_of("generation")
    assert "generation" in apply(book)
    book.node("t0", info(T0, "a", 2, life="2"))
    assert writes(book, "generation") == []
    assert unpublished(book.view) == []


def test_a_run_that_was_met_first_does_not_open_over_a_newer_one() -> None:
    """Run 1's last rank registers when run 2 leads: run 1 is past, though it never led, and run 2 stays."""
    book = Book("")
    book.node("t0", info(T0, "a", 2))
    assert apply(book) == ["runs", "planner"]
    book.node("t2", info("trainer/run2/0", "ab"))
    assert apply(book) == ["generation", "runs"]
    book.node("t1", info(T1, "b", 2))
    assert apply(book) == []
    assert book.view.generation
    assert book.view.generation.value == Generation(1, "run2", ("run1",))
    assert book.view.runs
    assert book.view.runs.value.order == ()


def test_a_run_that_was_met_last_leads_when_it_is_complete() -> None:
    """Both wait for ranks: the older one leads while the newer is not complete, and then no more."""
    book = Book("")
    book.node("t0", info(T0, "a", 2))
    apply(book)
    book.node("u0", info("trainer/run2/0", "a", 2))
    assert apply(book) == ["runs"]
    assert book.view.runs
    assert book.view.runs.value.order == ("run1", "run2")
    book.node("t1", info(T1, "b", 2))
    assert apply(book) == ["generation", "runs"]
    assert book.view.generation
    assert book.view.generation.value == Generation(1, "run1", ())
    book.node("u1", info("trainer/run2/1", "b", 2))
    assert apply(book) == ["generation", "runs"]
    assert book.view.generation.value == Generation(2, "run2", ("run1",))


def test_a_step_is_published_when_every_rank_has_offered_it() -> None:
    """Sorted offers, guarded by the record that is replaced."""
    book, target = standard()
    offers = book.offer("t0", T0, step=2, seq=2)
    assert writes(book, "publication") == []
    offers += book.offer("t1", T1, step=2, seq=2)
    [(write, record)] = writes(book, "publication")
    assert record == Publication(1, 2, tuple(offer.id for offer in offers), 2)
    assert write.guards == (("generation", 1), ("control", 0))
    assert (write.expected, write.reason) == (target.revision, "every rank of the run offered it")


def test_after_the_grace_a_step_is_published_without_silent_ranks_if_the_rest_holds_everything() -> None:
    """A half is not enough; a whole replica of the trainer is."""
    book, _target = standard()
    book.offer("t0", T0, step=2, seq=2)
    assert writes(book, "publication", grace=True) == []
    book.node("t2", info("trainer/run1/2", "b", 3))
    book.offer("t2", "trainer/run1/2", step=2)
    assert writes(book, "publication") == []
    [(write, record)] = writes(book, "publication", grace=True)
    assert [offer.key for offer in record.offers] == [T0, "trainer/run1/2"]
    assert write.reason == f"without {T1}"


def test_a_rank_that_is_not_registered_is_waited_for_like_a_silent_one() -> None:
    """Daemons come back one by one: who is back first does not publish alone what only all of them hold."""
    book, _target = standard()
    book.delete("members/t1")
    book.offer("t0", T0, step=2, seq=2)
    assert writes(book, "publication") == []
    assert writes(book, "publication", grace=True) == []
    book.node("t0", info(T0, "ab", 2))
    assert writes(book, "publication") == []
    [(write, record)] = writes(book, "publication", grace=True)
    assert [offer.key for offer in record.offers] == [T0]
    assert write.reason == "without 1 that are not registered"


def test_an_offer_of_a_published_step_makes_no_second_publication() -> None:
    """A rank that comes late is not in it; an offer of a dead life is nobody's."""
    book = Book()
    book.node("t0", info(T0, "ab", 2))
    book.node("t1", info(T1, "ab", 2))
    book.publish(*book.offer("t0", T0, step=3), step=3)
    book.offer("t1", T1, step=3)
    assert unpublished(book.view) == []
    later = book.offer("t1", T1, step=4, seq=2)
    assert unpublished(book.view) == list(later)
    book.node("t1", info(T1, "ab", 2, life="2"))
    assert unpublished(book.view) == []


def test_a_lane_is_made_turned_and_closed() -> None:
    """Made when the replica is whole, turned when a source goes, closed when a member does; each once."""
    book, target = standard()
    book.delete("lanes/r0")
    [(write, lane)] = writes(book, "lanes")
    assert (write.expected, [slot.key for slot in lane.sources]) == (0, [T0, T1])
    assert write.reason == "the replica is whole; trainer ranks of the generation"
    book.lane("r0", (E0, E1), (T0, T1))
    assert writes(book, "lanes") == []
    book.node("t0", info(T0, "a", 2, mover=2))
    [(write, lane)] = writes(book, "lanes")
    assert write.reason == f"sources changed: -({T0}) +({T0})"
    book.node("e1")
    [(write, lane)] = writes(book, "lanes")
    assert (lane.members, lane.sources, lane.reason) == ((), (), "rank 1 is not registered")
    assert target == PubId(1, book.view.revision_of("publication"))
    assert "lanes/r0" in apply(book)
    assert writes(book, "lanes") == []


def test_a_lane_whose_members_live_waits_for_sources() -> None:
    """No holder is no reason to close it."""
    book, _target = standard()
    book.offer("t0")
    assert writes(book, "lanes") == []


def test_a_failed_lane_turns_again_unless_that_is_useless() -> None:
    """The reason says after what; a permanent failure stands."""
    book, _target = standard()
    book.ack("r0", "e0", "failed", edge=(T0, E0))
    [(write, _lane)] = writes(book, "lanes")
    assert write.reason == "again, after e0: broke"
    book.ack("r0", "e0", "failed", permanent=True)
    assert writes(book, "lanes") == []


def reason_to_move_on(book: Book) -> str:
    """Why r0 goes for the newest publication, empty where it does not."""
    found = writes(book, "refits")
    return found[0][0].reason if found else ""


def test_the_first_refit_and_a_new_generation_need_no_reason_more() -> None:
    """Both aim at the newest publication with its step."""
    book, target = standard()
    assert reason_to_move_on(book) == ""
    book.delete("refits/r0")
    [(write, record)] = writes(book, "refits")
    assert (record, write.expected) == (Refit(*target, 1, "first refit of the replica", 1), 0)
    book.refit("r0", PubId(0, 1))
    assert reason_to_move_on(book) == "generation 1 has begun"


def second(book: Book) -> PubId:
    """Both trainer ranks publish step 2 while their first offers are gone."""
    offers = (*book.offer("t0", T0, step=2, seq=2), *book.offer("t1", T1, step=2, seq=2))
    return book.publish(*offers, step=2)


def test_a_newer_publication_replaces_one_that_has_not_begun() -> None:
    """Before the first byte."""
    book, target = standard()
    all_ack(book, "prepared", target, ["t0", "t1", "e0"])
    book.ack("r0", "e1", "built")
    second(book)
    assert reason_to_move_on(book) == "a newer one came before the first byte"


def test_one_that_has_begun_is_finished_while_a_holder_lives() -> None:
    """Here another replica committed it; when that one goes, nobody is left."""
    book, target = standard()
    book.node("e2", info("engine/r1/0", "ab"))
    book.lane("r1", ["engine/r1/0"], (T0, T1))
    book.refit("r1", target)
    book.commit("r1", target)
    all_ack(book, "prepared", target)
    newest = second(book)
    moves = {write.key: write.reason for write, _record in writes(book, "refits")}
    assert moves == {}  # r1 has not said that it serves, r0 is under way
    book.ack("r1", "e2", "verified", target, served=target)
    moves = {write.key: write.reason for write, _record in writes(book, "refits")}
    assert moves == {"refits/r1": "the last one is applied"}
    book.refit("r1", newest)
    assert reason_to_move_on(book) == "no holder of the older one is left"


def test_a_committed_one_is_left_when_every_member_serves_it() -> None:
    """A ticket that was taken and not applied holds the lane back."""
    book, target = standard()
    book.commit("r0", target)
    second(book)
    book.ack("r0", "e0", "verified", target, served=target)
    assert reason_to_move_on(book) == ""
    book.ack("r0", "e1", "verified", target, served=target)
    assert reason_to_move_on(book) == "the last one is applied"


def test_whole_weights_are_not_given_up_for_what_nobody_has() -> None:
    """The trainers took the newest one back before anybody had it: its engines would stop serving, for nothing."""
    book, target = standard()
    book.commit("r0", target)
    all_ack(book, "verified", target)
    for node in ("e0", "e1"):
        book.ack("r0", node, "verified", target, served=target)
    second(book)
    book.put("offers/t0", Offers(()))
    book.put("offers/t1", Offers(()))
    assert reason_to_move_on(book) == ""
    second(book)
    assert reason_to_move_on(book) == "the last one is applied"


def report_of(book: Book) -> ReportRecord | None:
    found = writes(book, "reports")
    return found[0][1] if found else None


def test_a_report_is_written_when_every_whole_replica_has_ended() -> None:
    """Committed by r0; r1, which is not whole, is named with its reason; it is written once."""
    book, target = standard()
    book.node("e2", info("engine/r1/0", "a", 2))
    assert report_of(book) is None
    book.commit("r0", target)
    missing = {"r1": "rank 1 is not registered"}
    assert report_of(book) == ReportRecord(1, target.revision, 1, ("r0",), missing, "every whole replica has ended")
    assert f"reports/{target.revision}" in apply(book)
    assert report_of(book) is None


def test_a_lane_beyond_hope_holds_no_report_up() -> None:
    """Nobody committed and nobody will: the trainer is told why."""
    book, target = standard()
    book.ack("r0", "e0", "failed", permanent=True)
    missing = {"r0": "e0: broke"}
    assert report_of(book) == ReportRecord(1, target.revision, 1, (), missing, "every whole replica has ended")


@pytest.mark.parametrize(
    ("lane", "why"),
    [
        ("open", "it has not verified every byte yet"),
        ("failed", "e0: broke"),
        ("none", "its lane is not made yet"),
        ("gone", "rank 1 is not registered"),
    ],
)
def test_why_a_replica_has_not_committed(lane: str, why: str) -> None:
    """The most telling reason that the records have."""
    book, target = standard()
    if lane == "failed":
        book.ack("r0", "e0", "failed", edge=(T0, E0))
    if lane in ("none", "gone"):
        book.delete("lanes/r0")
    if lane == "gone":
        book.node("e1")
    assert why_not(book.view, "r0") == why
    assert assess(book.view, target, closed="enough").missing == {"r0": why}
    assert assess(book.view, target, closed="enough").closed == "enough"


def test_a_publication_that_nobody_holds_any_more_holds_no_report_up() -> None:
    """The source took its memory back (a node that was stopped for too long, say): no one will ever have it."""
    book, target = standard()
    all_ack(book, "built", target)
    book.node("e2", info("engine/r1/0"))
    patience = Patience(Limits(silence=20.0, pause=60.0))
    assert missing(book, patience, 100.0) is None
    book.put("offers/t0", Offers(()))
    assert missing(book, patience, 101.0) is None
    assert patience.due == 121.0
    assert missing(book, patience, 120.9) is None
    assert missing(book, patience, 121.0) == {"r0": UNHELD, "r1": UNHELD}


def test_what_was_verified_is_held_although_the_loans_are_seen_to_end_before_that() -> None:
    """Records come in no order: trainers take their memory back because of acks that the leader has yet to see."""
    book, target = standard()
    patience = Patience(Limits(silence=20.0))
    book.put("offers/t0", Offers(()))
    book.put("offers/t1", Offers(()))
    assert missing(book, patience, 100.0) is None
    all_ack(book, "verified", target, ("e0",))
    assert missing(book, patience, 119.9) is None
    all_ack(book, "verified", target, ("e1",))
    assert (missing(book, patience, 120.0), missing(book, patience, 200.0)) == (None, None)
    book.commit("r0", target)
    assert missing(book, patience, 200.1) == {}


def test_a_lane_in_which_bytes_move_holds_the_report_up_although_a_source_is_done() -> None:
    """A trainer that nobody reads from any more took its memory back, and the others go on lending theirs."""
    book, target = standard()
    all_ack(book, "prepared", target)
    all_ack(book, "verified", target, ("e0",))
    book.put("offers/t0", Offers(()))
    patience = Patience(Limits(silence=20.0))
    assert (missing(book, patience, 100.0), missing(book, patience, 200.0)) == (None, None)
    book.delete("acks/r0/t1")
    assert missing(book, patience, 201.0) is None
    assert missing(book, patience, 221.0) == {"r0": UNHELD}


def test_a_publication_whose_lanes_are_all_closed_is_reported_when_its_loans_have_ended() -> None:
    """A lane that is made again would read from the trainers as long as they lend."""
    book, _target = standard()
    patience = Patience(Limits(silence=20.0))
    book.node("e0", info(E0, "a", 2, mover=0))
    book.put("lanes/r0", Lane("r0", (), (), (), (), "its mover died"))
    assert (missing(book, patience, 100.0), missing(book, patience, 200.0)) == (None, None)
    book.put("offers/t0", Offers(()))
    assert missing(book, patience, 201.0) is None
    assert missing(book, patience, 221.0) == {"r0": "engine/r0/0: no working mover"}
    book.node("e0")
    book.node("e1")
    assert missing(book, patience, 221.1) is None, "nobody is there to have it"


def missing(book: Book, patience: Patience, now: float) -> dict[str, str] | None:
    """What a report that is written now says of those who have not committed; None where none is."""
    found = list(report(book.view, patience.look(book.view, now, True, covers)))
    return decode(ReportRecord, found[0].data or b"", "reports").missing if found else None


@pytest.mark.parametrize("ended", ["mover", "daemon"])
@pytest.mark.parametrize("trainers", [True, False])
def test_a_replica_that_alone_has_a_publication_serves_on_after_a_death(ended: str, trainers: bool) -> None:
    """All its client processes live, and have committed it: its lane is made anew although nobody else holds it."""
    book, target = standard()
    all_ack(book, "verified", target)
    book.commit("r0", target)
    book.put("offers/t0", Offers(()))
    book.put("offers/t1", Offers(()))
    if not trainers:
        book.node("t0")
        book.node("t1")
    apply(book)
    assert ready(book.view, "r0", 1)[0]
    if ended == "mover":
        book.node("e0", info(E0, "a", 2, mover=0))
    else:
        book.delete("members/e0")
    apply(book)
    assert not ready(book.view, "r0", 1)[0]
    assert book.view.open_lanes() == {}
    mover, served = (2, NONE) if ended == "mover" else (1, target)
    book.node("e0", dataclasses.replace(info(E0, "a", 2, mover), served=served))
    apply(book)
    assert ready(book.view, "r0", 1) == (True, "it is 0 publications behind the newest, at most 1 allowed")
    sources = {slot.key for slot in book.view.open_lanes()["r0"].sources}
    assert sources == ({T0, T1} if trainers else set())


def test_old_reports_and_acks_of_nodes_that_left_are_removed() -> None:
    """The newest reports stay; so does every ack of a node in the lane."""
    book, _target = standard()
    for number in range(KEEP_REPORTS + 2):
        book.put(f"reports/{number + 8}", ReportRecord(1, number + 8, 1, (), {}, "x"))
    book.ack("r0", "e0", "built")
    book.ack("r0", "elsewhere", "built", NONE)
    deleted = [write.key for write in decide(book.view, Facts(), covers) if write.data is None]
    assert deleted == ["reports/8", "reports/9", "acks/r0/elsewhere"]


def test_deciding_twice_is_deciding_once() -> None:
    """Pure: the same records give the same writes, and nothing is left to do when they were made."""
    book, _target = standard()
    book.delete("lanes/r0")
    assert decide(book.view, Facts(), covers) == decide(book.view, Facts(), covers) != []
    apply(book)
    assert decide(book.view, Facts(), covers) == []
