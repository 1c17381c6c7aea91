"""What counts as torn, as lost and as gone back."""

from __future__ import annotations

import pytest

from refitd.demo import weights
from refitd.demo.chaos.book import Book, Mark
from refitd.demo.drawn import Drawn
from refitd.demo.shards import digest, expected_storages

SPEC = weights.Spec(vocab=120, positions=32, hidden=8, intermediate=16, layers=1, heads=2)
START = weights.make(SPEC)


def held(mark: Mark, rank: int) -> str:
    """The digest of what rank ``rank`` holds after a refit of ``mark``."""
    drawn = Drawn({name: weight.clone() for name, weight in START.items()}, mark.run)
    drawn.advance(mark.step)
    return digest(expected_storages(drawn.weights, SPEC, rank))


@pytest.fixture
def book() -> Book:
    found = Book(SPEC, START)
    for mark in (Mark(1, 1), Mark(1, 2), Mark(2, 1)):
        found.expect(mark)
    return found


def serve(book: Book, mark: Mark, replica: str = "r0") -> None:
    book.hold(replica)
    for rank in (0, 1):
        book.served(replica, rank, mark.step, held(mark, rank))


def test_whole_publications_in_order_are_fine(book: Book) -> None:
    """Steps of a run, and then an earlier step of a newer run, which has other weights."""
    for mark in (Mark(1, 1), Mark(1, 2), Mark(2, 1)):
        serve(book, mark)
        assert book.serving("r0") == mark
    assert (book.torn, book.back) == ([], [])


def test_i1_a_mix_and_a_wrong_label_are_torn(book: Book) -> None:
    """Ranks at two steps, bytes of no publication, and a whole publication under another one's step."""
    book.served("r0", 0, 1, held(Mark(1, 1), 0))
    book.served("r0", 1, 2, held(Mark(1, 2), 1))
    book.served("r1", 0, 1, "rubbish")
    book.served("r1", 1, 1, held(Mark(1, 2), 1))
    assert book.torn == [
        "r0 served [Mark(run=1, step=1), Mark(run=1, step=2)] at once",
        "r1/0 has as step 1 weights that are those of no publication",
        "r1/1 has as step 1 weights that are those of Mark(run=1, step=2)",
    ]


def test_i3_going_back_is_noticed_within_a_run_and_across(book: Book) -> None:
    """The older checkpoint of a newer run is no step back; anything of the run before it is."""
    serve(book, Mark(1, 2))
    serve(book, Mark(1, 1))
    assert book.back[0] == "r0/0 went back from Mark(run=1, step=2) to Mark(run=1, step=1)"
    serve(book, Mark(2, 1), "r1")
    serve(book, Mark(1, 2), "r1")
    assert book.back[-1] == "r1/1 went back from Mark(run=2, step=1) to Mark(run=1, step=2)"


def test_lost_is_what_was_told_and_nobody_reaches_or_passes(book: Book) -> None:
    """A committed publication needs a live replica at it or beyond; a skipped one does not count."""
    book.reported(Mark(1, 1), "RELEASED", None)
    book.reported(Mark(1, 2), "SKIPPED", {"committed": ["r1"]})
    book.reported(Mark(2, 1), "SKIPPED", {"committed": []})
    assert book.lost(["r0", "r1"]) == [Mark(1, 1), Mark(1, 2)]
    serve(book, Mark(1, 1))
    assert book.lost(["r0", "r1"]) == [Mark(1, 2)]
    serve(book, Mark(2, 1), "r1")
    assert book.lost(["r0", "r1"]) == []
    assert book.lost(["r0"]) == [Mark(1, 2)]
