"""When a trainer rank gets its memory back, with the words that it is told."""

from __future__ import annotations

from epoch_records import E0, E1, NONE, T0, T1, Book, all_ack, info, standard

from refitd.epoch.records import Generation, Offer, PubId
from refitd.epoch.release import joined, loan, published


def verdict(book: Book, key: str = T0, age: float = 0.0, planned: bool = False) -> tuple[str, bool, str]:
    """What becomes of the first offer of a rank."""
    offer = Offer(key, f"{key}#1", "run1", 1, 1)
    return tuple(loan(book.view, offer, age, 2.0, planned))  # type: ignore[return-value]


def test_a_new_generation_ends_the_loans_of_past_runs() -> None:
    """SKIPPED at once."""
    book, _target = standard()
    book.put("generation", Generation(2, "run2", ("run1",)))
    assert verdict(book) == ("SKIPPED", False, "a newer run has opened a generation")


def test_an_offer_waits_for_its_group_and_then_for_nobody() -> None:
    """Unpublished within the patience: SKIPPED."""
    book = Book()
    book.node("t0", info(T0, "a", 2))
    book.offer("t0", T0)
    assert verdict(book) == ("", False, "waiting for the other ranks of the run")
    assert verdict(book, age=2.1) == ("SKIPPED", False, "nobody planned it within 2 s")


def test_a_late_rank_is_skipped_when_its_step_was_published_without_it() -> None:
    """It shares the report, not the loan."""
    book = Book()
    book.node("t0", info(T0, "ab", 2))
    book.node("t1", info(T1, "ab", 2))
    target = book.publish(*book.offer("t0", T0))
    assert verdict(book, T1) == ("SKIPPED", False, "the step was published without this rank")
    late = Offer(T1, f"{T1}#1", "run1", 1, 1)
    assert (joined(book.view, late), published(book.view, late)) == (target, None)


def test_a_step_that_a_rank_offers_again_is_not_what_was_published() -> None:
    """Other weights under the same label: the report of the first ones would be told of them."""
    book, target = standard()
    first, again = Offer(T0, f"{T0}#1", "run1", 1, 1), Offer(T0, f"{T0}#1", "run1", 2, 1)
    assert book.view.publication is not None
    assert book.view.publication.value.taken[T0] == first.id != again.id
    assert (joined(book.view, first), joined(book.view, again)) == (target, None)


def test_a_planned_offer_is_held_until_every_lane_has_verified() -> None:
    """Planned when a lane is built; then patience has no end; released when members have everything."""
    book, target = standard()
    assert verdict(book) == ("", False, "waiting for r0")
    assert verdict(book, age=2.1) == ("SKIPPED", False, "no lane planned it within 2 s")
    all_ack(book, "built", NONE)
    assert verdict(book, age=99.0) == ("", True, "waiting for r0")
    all_ack(book, "prepared", target)
    assert verdict(book) == ("", True, "waiting for r0")
    all_ack(book, "verified", target, ["e0", "e1"])
    assert verdict(book) == ("RELEASED", True, "1 lanes verified every byte")


def test_an_offer_that_was_planned_once_outlives_the_closing_of_its_only_lane() -> None:
    """A mover that hangs costs longer than the patience; the replica comes back for what only the trainer has."""
    book, _target = standard()
    book.lane("r0", (), ())
    assert verdict(book, age=2.1) == ("SKIPPED", False, "no lane planned it within 2 s")
    assert verdict(book, age=99.0, planned=True) == ("", True, "waiting for a lane")


def test_an_offer_that_nobody_can_come_for_is_not_held_any_longer() -> None:
    """Every replica has left, committed it, or is beyond hope."""
    book, _target = standard()
    book.lane("r0", (), ())
    for node in ("e0", "e1"):
        book.delete(f"members/{node}")
    assert verdict(book, age=2.1, planned=True) == ("SKIPPED", False, "no lane planned it within 2 s")
    book, _target = standard()
    book.ack("r0", "e0", "failed", permanent=True)
    assert verdict(book, age=2.1, planned=True) == ("SKIPPED", False, "no lane planned it within 2 s")


def test_lanes_that_do_not_read_from_the_rank_or_have_gone_further_do_not_hold_it() -> None:
    """A lane of another life of the rank, or one whose refit is newer, is not waited for."""
    book, target = standard()
    book.refit("r0", PubId(1, target.revision + 1))
    assert verdict(book) == ("", False, "waiting for a lane")
    assert verdict(book, age=2.1) == ("SKIPPED", False, "no lane planned it within 2 s")
    book.refit("r0", target)
    book.node("t0", info(T0, "a", 2, life="2"))
    book.lane("r0", (E0, E1), (T0, T1))
    assert verdict(book) == ("", False, "waiting for a lane")


def test_a_lane_beyond_hope_plans_nothing() -> None:
    """The sides contradict each other: the trainer does not wait for it."""
    book, _target = standard()
    all_ack(book, "built", NONE)
    book.ack("r0", "e0", "failed", permanent=True)
    assert verdict(book) == ("", False, "waiting for a lane")


def test_a_newer_publication_releases_an_older_loan() -> None:
    """Where the record is of an older generation, its loans end."""
    book, _target = standard()
    book.put("generation", Generation(2, "run1", ()))
    assert verdict(book) == ("RELEASED", True, "a newer publication replaced it")
