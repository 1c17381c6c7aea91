"""Pause, drain, parked nodes, planner versions, max_dirty, lag, clocks: what the leader decides, with its reason."""

from __future__ import annotations

from epoch_records import E0, E1, NONE, T0, T1, Book, all_ack, covers, info, standard

from refitd.epoch.facts import Facts
from refitd.epoch.leader import decide
from refitd.epoch.patience import Limits, Patience
from refitd.epoch.records import Ack, Control, Drain, Offer, Parked, RankInfo
from refitd.epoch.release import loan
from refitd.epoch.reports import ready

FACTS = Facts()


def reasons(book: Book, kind: str, facts: Facts = FACTS) -> dict[str, str]:
    return {w.key: w.reason for w in decide(book.view, facts, covers) if w.key.partition("/")[0] == kind}


def engine(replica: str) -> RankInfo:
    key = f"engine/{replica}/0"
    return RankInfo(key, "engine", replica, 0, 1, f"{key}#1", "ab", "in_place", 1)


def fleet(count: int) -> Book:
    """Replicas of one rank each, all committed and serving publication 1; publication 2 is new."""
    book = Book()
    book.node("t0", info(T0, "ab"))
    target = book.publish(*book.offer("t0", T0))
    for i in range(count):
        book.node(f"e{i}", engine(f"r{i}"))
    for i in range(count):
        book.lane(f"r{i}", [f"engine/r{i}/0"], [T0])
        book.refit(f"r{i}", target)
        book.commit(f"r{i}", target)
        book.ack(f"r{i}", f"e{i}", "verified", target, served=target)
    book.publish(*book.offer("t0", T0, step=2, seq=2), step=2)
    return book


def test_a_paused_job_begins_nothing_and_skips_offers() -> None:
    """No publication, no refit; the trainer is told why; lanes still turn."""
    book = fleet(2)
    book.put("control", Control(True, None, "maintenance"))
    assert (reasons(book, "refits"), reasons(book, "publication")) == ({}, {})
    offer = Offer(T0, f"{T0}#1", "run1", 3, 3)
    assert loan(book.view, offer, 0.0, 2.0) == ("SKIPPED", False, "the job is paused: maintenance")
    book.put("control", Control(False))
    assert reasons(book, "refits") == {"refits/r0": "the last one is applied"}


def test_all_but_one_may_be_dirty() -> None:
    """Of three, two at once; a slow one makes room; the limit can be set."""
    book = fleet(3)
    assert sorted(reasons(book, "refits")) == ["refits/r0", "refits/r1"]
    assert sorted(reasons(book, "refits", Facts(max_dirty=1))) == ["refits/r0"]
    assert sorted(reasons(book, "refits", Facts(max_dirty=3))) == ["refits/r0", "refits/r1", "refits/r2"]
    newest = book.view.newest
    assert newest is not None
    book.refit("r0", newest)
    book.refit("r1", newest)
    assert reasons(book, "refits") == {}
    assert sorted(reasons(book, "refits", Facts(slow=frozenset(["r0"])))) == ["refits/r2"]


def test_readiness_is_counted_in_publications() -> None:
    """One behind is ready at max_lag 1; a joiner without a commit is not."""
    book = fleet(1)
    assert ready(book.view, "r0", 1)[0]
    assert ready(book.view, "r0", 0) == (False, "it is 1 publications behind the newest, at most 0 allowed")
    book.node("e9", engine("r9"))
    assert ready(book.view, "r9", 1) == (False, "its lane is not made yet")


def test_a_draining_node_leaves_and_stays_only_where_it_is_the_last_holder() -> None:
    """The lane of its engine closes; a trainer that nobody can replace stays a source."""
    book, target = standard()
    book.put("drains/e1", Drain("e1", "i", "test"))
    book.put("drains/t0", Drain("t0", "i", "test"))
    assert reasons(book, "lanes") == {"lanes/r0": "e1: draining"}
    all_ack(book, "prepared", target)
    assert reasons(book, "lanes") == {}, "bytes are moving"
    book.delete("drains/e1")
    assert reasons(book, "lanes") == {}, "t0 holds the only half a"


def test_a_parked_node_is_in_no_lane_until_it_has_been_quiet() -> None:
    """Parked by the count of its joins, freed by calm."""
    book, _target = standard()
    flapping = Facts(flapping=(("e1", 7),))
    assert reasons(book, "parked", flapping) == {"parked/e1": "it has joined 7 times in a short while"}
    book.put("parked/e1", Parked("e1", "i", "it flaps", 7))
    assert reasons(book, "lanes") == {"lanes/r0": "e1 is parked: it flaps"}
    assert reasons(book, "parked") == {}
    assert reasons(book, "parked", Facts(calm=frozenset(["e1"]))) == {"parked/e1": "it has been quiet"}


def test_a_node_that_was_quiet_is_free_although_its_joins_are_within_the_window() -> None:
    """Seven joins in a second: free 30 s after the last one, not when the window of 60 s has passed over the first.

    A join while it is parked makes it wait anew; joins for which it was parked do not count again.
    """
    book, _target = standard()
    patience = Patience(Limits())
    patience.look(book.view, 0.0, True, covers)
    book.node("e2", engine("r2"))
    facts = patience.look(book.view, 0.5, True, covers)
    for i in range(6):
        book.delete("members/e2")
        book.node("e2", engine("r2"))
        facts = patience.look(book.view, 1.0 + i / 10, True, covers)
    assert reasons(book, "parked", facts) == {"parked/e2": "it has joined 7 times in a short while"}
    book.put("parked/e2", Parked("e2", "i", "it flaps", 7))
    assert reasons(book, "parked", patience.look(book.view, 2.0, True, covers)) == {}
    book.delete("members/e2")
    book.node("e2", engine("r2"))
    assert reasons(book, "parked", patience.look(book.view, 10.0, True, covers)) == {}
    assert reasons(book, "parked", patience.look(book.view, 39.9, True, covers)) == {}
    assert reasons(book, "parked", patience.look(book.view, 40.0, True, covers)) == {"parked/e2": "it has been quiet"}
    book.delete("parked/e2")
    book.delete("members/e2")
    book.node("e2", engine("r2"))
    assert reasons(book, "parked", patience.look(book.view, 41.0, True, covers)) == {}


def test_nobody_is_removed_for_absence_before_the_store_is_settled() -> None:
    """A trainer node is missing: its lane stays as it is until everybody could be back."""
    book, _target = standard()
    book.delete("members/e1")
    assert reasons(book, "lanes", Facts(store_settled=False)) == {}
    assert reasons(book, "lanes") == {"lanes/r0": "rank 1 is not registered"}


def test_a_dissenting_plan_parks_its_node_for_the_lane() -> None:
    """Two of four agree with the lead; the member that does not is left out, and its lane waits."""
    book, _target = standard()
    all_ack(book, "built", NONE)
    token = book.view.lanes["r0"].revision
    book.put("acks/r0/e1", Ack(token, "other", "built", 0, 0, {}, (0, 0)))
    assert reasons(book, "lanes") == {"lanes/r0": f"{E1}: no working mover"}


def test_a_member_with_trouble_on_all_sides_goes_before_its_accusers() -> None:
    """Both trainers complain of e0: it goes, they stay."""
    book, _target = standard()
    book.ack("r0", "t0", "failed", edge=(T0, E0))
    book.ack("r0", "t1", "failed", edge=(T1, E0))
    assert reasons(book, "lanes") == {"lanes/r0": f"{E0}: no working mover"}


def test_joins_wait_for_each_other_and_clocks_start_anew() -> None:
    """0.5 s after the last join, 3 s after the first at most; six joins within a minute are too many."""
    book, _target = standard()
    patience = Patience(Limits())
    assert patience.look(book.view, 0.0, True, covers).joins_settled
    book.node("e2", engine("r2"))
    assert not patience.look(book.view, 1.0, True, covers).joins_settled
    assert patience.due == 1.5
    assert patience.look(book.view, 1.5, True, covers).joins_settled
    for i in range(6):
        book.delete("members/e2")
        book.node("e2", engine("r2"))
        facts = patience.look(book.view, 2.0 + i / 10, True, covers)
    assert facts.flapping == (("e2", 7),)
    assert patience.look(book.view, 70.0, True, covers).flapping == ()


def test_old_records_go_a_few_at_a_time() -> None:
    """The acks of a hundred nodes that left a lane do not keep the leader from what is urgent."""
    book, _target = standard()
    for i in range(100):
        book.put(f"acks/r0/gone{i:03}", Ack(1, "d", "built", 0, 0, {}, (0, 0)))
    removed = 0
    while found := reasons(book, "acks"):
        assert len(found) == min(32, 100 - removed)
        assert set(found.values()) == {"the node is not in the lane any more"}
        for key in found:
            book.delete(key)
        removed += len(found)
    assert removed == 100
