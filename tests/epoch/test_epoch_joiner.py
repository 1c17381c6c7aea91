"""A joiner that is slower than the publications: who waits for it, and for how long."""

from __future__ import annotations

from epoch_records import E0, E1, T0, T1, Book, all_ack, covers, info, standard

from refitd.epoch.codec import decode
from refitd.epoch.facts import Facts
from refitd.epoch.patience import Limits, Patience
from refitd.epoch.records import PubId, Refit
from refitd.epoch.refits import HOLD_PUBLICATIONS, awaited, refits

R1 = "engine/r1/0"
FACTS = Facts(store_settled=True)


def joining() -> tuple[Book, PubId]:
    """r0 has committed and serves publication 1; r1 came, and is to have it from r0."""
    book, target = standard()
    book.commit("r0", target)
    all_ack(book, "applied", target)
    for node in ("e0", "e1"):
        book.ack("r0", node, "applied", target, served=target)
    book.node("j", info(R1, "ab"))
    book.lane("r1", [R1], (E0, E1))
    book.refit("r1", target)
    return book, target


def decided(book: Book, facts: Facts = FACTS) -> dict[str, Refit]:
    """The new targets, by replica; they are put into the book too."""
    found = {}
    for write in refits(book.view, facts, covers):
        assert write.data is not None
        found[write.key.removeprefix("refits/")] = decode(Refit, write.data, write.key)
    for replica, refit in found.items():
        book.put(f"refits/{replica}", refit)
    return found


def publish(book: Book, step: int) -> PubId:
    offers = (*book.offer("t0", T0, step=step, seq=step), *book.offer("t1", T1, step=step, seq=step))
    return book.publish(*offers, step=step)


def at_the_second() -> tuple[Book, PubId]:
    """r1 has lost publication 1, and r0 has committed and serves publication 2."""
    book, _target = joining()
    second = publish(book, 2)
    decided(book)
    book.commit("r0", second)
    for node in ("e0", "e1"):
        book.ack("r0", node, "applied", second, served=second)
    return book, second


def test_a_joiner_that_lost_one_publication_is_waited_for_at_the_next() -> None:
    """It lost the first because its lane turned before a byte came; then r0 stays, and the joiner does not move on."""
    book, target = joining()
    second = publish(book, 2)
    assert {name: refit.abandoned for name, refit in decided(book).items()} == {"r0": 0, "r1": 1}
    assert awaited(book.view, "r0", FACTS) == ""
    book.commit("r0", second)
    all_ack(book, "applied", second)
    for node in ("e0", "e1"):
        book.ack("r0", node, "applied", second, served=second)
    assert awaited(book.view, "r0", FACTS) == "r1"
    publish(book, 3)
    assert decided(book) == {}
    book.lane("r1", [R1], (T0, T1))  # still nobody has lent anything under the new token
    assert awaited(book.view, "r0", FACTS) == "r1", "whoever has it, where the joiner reads from trainers as yet"
    assert decided(book) == {}
    book.commit("r1", second)
    assert awaited(book.view, "r0", FACTS) == ""
    assert set(decided(book)) == {"r0"}
    assert target < second


def test_nobody_waits_for_longer_than_so_many_publications() -> None:
    """Then both move on, and the count goes on."""
    book, _second = at_the_second()
    for step in range(3, 3 + HOLD_PUBLICATIONS):
        publish(book, step)
        assert decided(book) == {}
    publish(book, 3 + HOLD_PUBLICATIONS)
    assert {name: refit.abandoned for name, refit in decided(book).items()} == {"r0": 0, "r1": 2}


def test_a_replica_that_has_committed_before_loses_nothing_before_the_first_byte() -> None:
    """It has whole weights: a newer publication in time is no loss."""
    book, target = joining()
    book.commit("r1", target)
    book.ack("r1", "j", "applied", target, served=target)
    for step in (2, 3):
        publish(book, step)
        assert {name: refit.abandoned for name, refit in decided(book).items()} == {"r0": 0, "r1": 0}


def test_a_rank_that_nobody_calls_to_its_receive_is_not_waited_for_longer_than_a_pause() -> None:
    """A lead that holds the publication orders no receive of it, so a rank that came anew never lends for it.

    That its replica has committed the publication in an earlier life is no sign that it goes on.
    """
    book, second = at_the_second()
    book.commit("r1", second)
    book.node("j", info(R1, "ab", life="2"))
    book.lane("r1", [R1], (E0, E1))
    publish(book, 3)
    assert awaited(book.view, "r0", FACTS) == "r1"
    patience = Patience(Limits(pause=10.0))
    assert patience.look(book.view, 100.0, True, covers).slow == frozenset()
    facts = patience.look(book.view, 110.0, True, covers)
    assert facts.slow == {"r1"}
    assert {name: refit.abandoned for name, refit in decided(book, facts).items()} == {"r0": 0, "r1": 2}
