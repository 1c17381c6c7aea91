"""What an attempt may read: a source's loan counts only for the publication that the attempt is about."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.daemon.attempt import Attempt, _all_held
from refitd.daemon.lane import LaneDriver
from refitd.daemon.rank import LocalOffer, LocalRank
from refitd.epoch.codec import encode
from refitd.epoch.records import Ack, Lane, Offer, PubId, Publication, Slot
from refitd.epoch.view import View
from refitd.errors import TransportError
from refitd.hook.page import ControlPage

KEY = "trainer/run1/0"
OFFERED = Offer(KEY, "life", "run1", 1, 41)
PUBLISHED = PubId(1, 7)


def source(offer: Offer | None, word: int) -> LocalRank:
    """A trainer rank whose open offer is ``offer``."""
    session = cast("Any", SimpleNamespace(key=KEY))
    rank = LocalRank(session, cast("Any", None), "digest", "trainer", ControlPage.create())
    rank.offer = LocalOffer(offer, word, 0.0) if offer else None
    return rank


@pytest.fixture
def attempt() -> Attempt:
    """An attempt at the publication of step 41."""
    view = View()
    view.put("publication", encode(Publication(1, 41, (OFFERED.id,))), 7, 7)
    context = SimpleNamespace(node="a", agreement=SimpleNamespace(view=view), ranks={})
    driver = SimpleNamespace(context=context, replica="r0")
    built = SimpleNamespace(handles={}, plan=None, program=None)
    lane = Lane("r0", (), (), (), (), "")
    return Attempt(cast("Any", driver), lane, cast("Any", built), cast("Any", None), PUBLISHED)


def test_i6_a_trainer_that_offered_anew_is_not_read_as_the_old_publication(attempt: Attempt) -> None:
    """While the store is away records stand still and trainers go on: step 44's word must not guard step 41."""
    assert attempt._source_word(source(OFFERED, 5), "engine/r0/0") == 5
    for rank in (source(Offer(KEY, "life", "run1", 4, 44), 8), source(None, 9)):
        with pytest.raises(TransportError, match="does not hold the publication any more"):
            attempt._source_word(rank, "engine/r0/0")


def test_a_reader_that_left_is_told_nothing(attempt: Attempt) -> None:
    """A neighbour becomes whole when the rank that waits for it has just gone: the lane turns, and nobody trips."""
    bucket = SimpleNamespace(stage=1, src="engine/r0/0")
    sent: list[dict[str, Any]] = []
    attempt._programs["engine/r1/0"] = cast("Any", SimpleNamespace(receives=lambda: [bucket]))
    attempt._built = cast("Any", SimpleNamespace(handles={"engine/r1/0": SimpleNamespace(send=sent.append)}, token=1))
    attempt._driver.context.ranks["engine/r0/0"] = cast("Any", SimpleNamespace(loan_word=lambda _publication: 3))
    attempt.members = {"engine/r1/0"}
    attempt.source_ready("engine/r0/0", whole=True)
    assert sent == []


def slot(rank: int, node: str, life: str = "new", digest: str = "d") -> Slot:
    return Slot(f"engine/r0/{rank}", node, 1, life, 1, digest)


def test_what_a_rank_holds_is_believed_of_its_present_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have changed places: each node may still say what their predecessors had verified on it."""
    view = View()
    for node, said in (("a", {"engine/r0/0": "old0"}), ("b", {"engine/r0/0": "new0", "engine/r0/1": "old1"})):
        view.put(f"acks/r0/{node}", encode(Ack(3, "d", "prepared", 1, 7, said, (0, 0))), 9, 9)
    fetched: list[tuple[str, str]] = []

    async def blob(node: str, digest: str) -> bytes:
        fetched.append((node, digest))
        return digest.encode()

    monkeypatch.setattr("refitd.daemon.attempt.Held.from_bytes", lambda data: data)
    driver = SimpleNamespace(replica="r0", context=SimpleNamespace(agreement=SimpleNamespace(view=view), blob=blob))
    lane = Lane("r0", (slot(0, "b"), slot(1, "a")), (), (), (), "")
    assert asyncio.run(_all_held(cast("Any", driver), lane)) == {"engine/r0/0": b"new0"}
    assert fetched == [("b", "new0")]


class Known(str):
    """Boxes that a rank has."""

    __slots__ = ()

    def union(self, more: str) -> str:
        return more


@pytest.mark.parametrize(
    ("life", "digest", "number", "kept"),
    [
        ("new", "d", 7, {"engine/r0/0": "more"}), ("other", "d", 7, {}), ("new", "changed", 7, {}),
        ("new", "d", 6, {"engine/r0/0": "known"}), ("new", "d", 0, {"engine/r0/0": "known"}),
    ],
)  # fmt: skip
def test_what_was_verified_goes_with_the_process_its_layout_and_its_attempt(
    life: str, digest: str, number: int, kept: dict[str, str]
) -> None:
    """A mover's last word may come after the next process of its rank, or when the lane is at another publication: its
    buckets have the same numbers, and other bytes."""
    rank = SimpleNamespace(session=SimpleNamespace(incarnation=life), digest=digest)
    known, key = Known("known"), "engine/r0/0"
    driver = cast("Any", object.__new__(LaneDriver))
    driver.context, driver.held = SimpleNamespace(node="a", ranks={key: rank}), {key: known}
    driver.lane = Lane("r0", (slot(0, "a"),), (), (), (), "")
    plan = SimpleNamespace(held=lambda _key, _verified: "more")
    driver.attempt = SimpleNamespace(members={key}, plan=plan, publication=PubId(1, 7))
    driver._absorb(key, number, [1, 2])
    assert driver.held == kept


@pytest.mark.parametrize(("number", "counted"), [(7, ["count", "absorb 7"]), (6, ["absorb 6"])])
def test_a_failure_of_the_attempt_before_counts_for_nothing_but_fails(number: int, counted: list[str]) -> None:
    """The trainers withdrew it, and the lane is at the next publication under the same token."""
    done: list[str] = []
    driver = cast("Any", SimpleNamespace(
        attempt=SimpleNamespace(publication=PubId(1, 7), count=lambda *_: done.append("count")),
        _absorb=lambda _key, number, _verified: done.append(f"absorb {number}"),
        fail=lambda _edge, reason: done.append(reason),
    ))  # fmt: skip
    LaneDriver._mover_failed(driver, "engine/r0/0", {"attempt": number, "verified": [1], "reason": "EOF"})
    assert done == [*counted, "EOF"]
