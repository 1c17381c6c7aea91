"""What a rank holds and what it has lost, while its page, its requests and the records are ahead of each other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest

from refitd.daemon.job import Job
from refitd.daemon.lane import LaneDriver
from refitd.daemon.rank import LocalRank, Memory, Region
from refitd.daemon.requests import Requests
from refitd.epoch.records import Ack, Commit, Lane, PubId, Slot
from refitd.errors import Refused
from refitd.hook.memfd import create_memory
from refitd.hook.messages import DEVICE_SHADOW, ENGINE, HOST_SHADOW, IN_PLACE, Ticket
from refitd.hook.page import ControlPage, Taken
from refitd.hook.session import Fds
from refitd.testing import split_layout

LAYOUT = split_layout({"w": ((4, 6), "float32")}, 0, 1)
FIRST, NEXT = PubId(1, 7), PubId(1, 8)
KEY = "engine/r0/0"


class Node:
    """A daemon's requests and one rank of its, whose client does what engines do."""

    def __init__(self, page: ControlPage, mode: str) -> None:
        self.page = page
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.session = cast("Any", SimpleNamespace(
            job="job", side=ENGINE, group="r0", key=KEY, incarnation="i",
            event=lambda name, **fields: self.said.append((name, fields)),
        ))  # fmt: skip
        self.rank = LocalRank(self.session, LAYOUT, "d", mode, page)
        self.rank.mover = MagicMock(pidfd=3)
        self.lanes: dict[str, Any] = {}
        self.unmap = AsyncMock()
        job = SimpleNamespace(
            ranks={KEY: self.rank}, lanes=self.lanes, poke=MagicMock(), poke_lane=MagicMock(),
            movers=SimpleNamespace(unmap=self.unmap),
        )  # fmt: skip
        self.requests = Requests(cast("Any", SimpleNamespace(job=lambda _name: job, config=MagicMock())))

    def ask(self, method: str, publication: PubId | None = None, word: int = 1) -> None:
        asyncio.run(self.asked(method, publication, word))

    async def asked(self, method: str, publication: PubId | None = None, word: int = 1) -> None:
        fields: dict[str, Any] = {"word": word, "memory": [{"name": "w", "fd": 0, "offset": 0, "nbytes": 96}]}
        if publication:
            fields["ticket"] = Ticket("receive", "job", "r0", *publication, 1, 5).to_json()
        fds = Fds([create_memory("test", 96)] if method == "receive" else [])
        try:
            await self.requests.request(self.session, {"method": method, **fields}, fds)
        finally:
            fds.close()

    def lend(self, publication: PubId) -> int:
        """What a client does before its daemon hears of it; the word that it will send."""
        self.page.dirty = 1
        self.page.bump_loan()
        return self.page.bump_loan()

    def switch(self, publication: PubId) -> None:
        self.page.generation, self.page.revision, self.page.dirty = *publication, 0
        self.ask("committed", publication)

    def receive(self, publication: PubId) -> None:
        """As a whole, until it serves it."""
        self.ask("receive", publication, self.lend(publication))
        self.rank.fill(publication)
        self.rank.complete = publication
        self.switch(publication)


def make(mode: str) -> Iterator[Node]:
    page = ControlPage.create()
    found = Node(page, mode)
    yield found
    found.rank.close()
    page.close()


@pytest.fixture
def node() -> Iterator[Node]:
    yield from make(IN_PLACE)


@pytest.fixture
def shadowed() -> Iterator[Node]:
    """A rank whose shadow is on a device, holds FIRST, and was not applied yet."""
    for made in make(DEVICE_SHADOW):
        made.rank.set_memory(Memory((), [], 1, {"uuid": "GPU-0"}))
        made.rank.fill(FIRST)
        made.rank.complete = FIRST
        made.page.set_shadow_publication(*FIRST)
        yield made


# -- in_place


def test_a_rank_that_is_about_to_lend_for_the_next_publication_has_the_last(node: Node) -> None:
    """Its page is dirty before its daemon hears that it lends."""
    node.receive(FIRST)
    assert not node.rank.lost(FIRST)
    node.lend(NEXT)
    assert not node.rank.lost(FIRST)
    node.ask("receive", NEXT)
    assert not node.rank.lost(FIRST)


def test_a_rank_that_is_about_to_lend_is_read_by_nobody(node: Node) -> None:
    """Its word is that of the loan by which the next publication will be written: a reader under it would see a mix."""
    node.receive(FIRST)
    assert node.rank.loan_word(FIRST) == node.page.loan_word
    node.lend(NEXT)
    assert (node.rank.loan_word(FIRST), node.rank.readable(FIRST)) == (None, False)


def test_a_rank_that_gave_the_next_receive_up_has_lost_the_last(node: Node) -> None:
    """Nobody would bring it back otherwise: the next publication may never come."""
    node.receive(FIRST)
    node.ask("receive", NEXT, node.lend(NEXT))
    node.ask("release")
    assert node.rank.lost(FIRST)


def test_what_is_said_of_a_receive_names_it(node: Node) -> None:
    """By the word that came with it, whatever the loan's word is by now."""
    node.ask("receive", FIRST, word=6)
    node.ask("relent", word=7)
    node.rank.say("failed", reason="superseded")
    assert (node.rank.own_word, node.said) == (7, [("failed", {"loan": 6, "reason": "superseded"})])


def test_a_rank_that_gave_its_receive_up_before_it_heard_of_the_commit(node: Node) -> None:
    """It never said that it has switched."""
    node.ask("receive", FIRST, node.lend(FIRST))
    node.ask("release")
    assert node.rank.lost(FIRST)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_that_released_what_it_serves_has_it(ahead: bool, node: Node) -> None:
    """Before weights move they are released, and are whole all the same; a slow daemon may hear of it when the rank is
    about to lend again."""
    node.receive(FIRST)
    if ahead:
        node.page.dirty = 1
    node.ask("release")
    node.page.dirty = 1
    assert not node.rank.lost(FIRST)


def test_a_loan_that_is_refused_takes_nothing_back(node: Node) -> None:
    """The client's memory is as it was; so is what we know of it."""
    node.receive(FIRST)
    node.page.dirty = 1
    with pytest.raises(Refused):
        node.ask("receive", PubId(0, 0))
    assert not node.rank.lost(FIRST)


def test_memory_that_is_being_released_is_lent_to_nobody(node: Node) -> None:
    """While movers let go of it, another lane may look for a source."""
    node.receive(FIRST)
    assert node.rank.readable(FIRST)
    seen = []
    node.unmap.side_effect = lambda rank: seen.append((rank.memory, rank.loan_word(FIRST)))
    node.ask("release")
    assert seen == [(None, None)]


# -- shadows


def test_a_shadow_that_was_released_before_it_was_applied_is_lost(shadowed: Node) -> None:
    """The commit would stand, and nobody would fill the next shadow."""
    lane = shadowed.lanes["r0"] = MagicMock()
    assert not shadowed.rank.lost(FIRST)
    shadowed.ask("release")
    assert shadowed.rank.lost(FIRST)
    assert (shadowed.rank.holds(FIRST), shadowed.page.shadow_publication) == (False, (0, 0))
    lane.taken_back.assert_called_once_with(shadowed.rank)


def test_a_shadow_that_was_released_after_it_was_applied_is_not(shadowed: Node) -> None:
    """The weights are where they are served."""
    lane = shadowed.lanes["r0"] = MagicMock()
    shadowed.page.generation, shadowed.page.revision = FIRST
    shadowed.ask("release")
    assert not shadowed.rank.lost(FIRST)
    lane.taken_back.assert_not_called()


def test_a_rank_that_applies_its_shadow_has_it(shadowed: Node) -> None:
    """It is dirty meanwhile."""
    shadowed.page.dirty = 1
    assert not shadowed.rank.lost(FIRST)


# -- commits


class Driven:
    """A lane driver at its commit stage: both ranks' words are in the records, under token 5."""

    def __init__(self, node: Node, written: AsyncMock) -> None:
        self.slot = Slot(KEY, "a", 1, "i", 1, "d")
        commit = SimpleNamespace(value=Commit(*FIRST, 1, 5, {KEY: "i"}, 1), revision=40)
        view = SimpleNamespace(
            commits={"r0": commit}, refits={"r0": SimpleNamespace(value=SimpleNamespace(step=1, number=1))},
            slots=lambda: {KEY: self.slot}, revision_of=lambda _key: 40,
            ack=lambda *_: Ack(5, "d", "verified", *FIRST, {}, FIRST),
        )  # fmt: skip
        agreement = SimpleNamespace(view=view, write=written, compare_path=str)
        self.context = MagicMock(node="a", job="job", ranks={KEY: node.rank}, agreement=agreement)

    def driver(self) -> LaneDriver:
        made = LaneDriver(self.context, "r0")
        made.lane, made.token, made._preparer.prepared = Lane("r0", (self.slot,), (), (), (), ""), 5, FIRST
        return made


@pytest.mark.parametrize("again", [False, True])
def test_a_commit_is_of_the_loan_that_was_verified(again: bool, node: Node) -> None:
    """A lead that gave its receive up and is in the next one: what it lends now holds nothing, and the word that takes
    "verified" back is still on its way."""

    async def scenario() -> None:
        driver = Driven(node, AsyncMock(return_value=True)).driver()
        await node.asked("receive", FIRST, 3)
        node.page.dirty = 1
        node.rank.fill(FIRST)
        node.rank.complete = FIRST
        if again:
            await node.asked("release")
            await node.asked("receive", FIRST, 5)
        await driver._committer.commit(FIRST)
        await driver.close()

    asyncio.run(scenario())
    told = [(name, fields["loan"]) for name, fields in node.said]
    assert told == ([] if again else [("commit", 3)])


def test_a_lead_in_place_has_committed_when_it_serves(node: Node) -> None:
    """A ticket that it took is not one that it has carried out again since."""
    written = AsyncMock(return_value=True)

    async def scenario() -> None:
        driver = Driven(node, written).driver()
        await node.asked("receive", FIRST, 5)
        node.page.dirty = 1
        node.page.take(Taken(*FIRST, 5))
        await driver._committer.commit(FIRST)
        assert written.await_count == 0
        node.page.generation, node.page.revision, node.page.dirty = *FIRST, 0
        await driver._committer.commit(FIRST)
        assert [call.args[0] for call in written.await_args_list] == ["commits/r0"]
        await driver.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("of", "phase", "outcome"),
    [
        (FIRST, "verified", "failed"),  # our ack must not say any more that all is verified
        (FIRST, "built", "void"),
        (NEXT, "built", "kept"),  # another commit has come since
    ],
)
def test_only_the_commit_that_was_lost_is_void(of: PubId, phase: str, outcome: str, node: Node) -> None:
    """The records may have gone on while the lane waited for a write."""
    written = AsyncMock(return_value=True)

    async def scenario() -> Any:
        driven = Driven(node, written)
        view = driven.context.agreement.view
        view.commits["r0"].value = Commit(*of, 1, 5, {KEY: "i"}, 1)
        view.ack = lambda *_: Ack(5, "d", phase, *FIRST, {}, FIRST)
        driver = driven.driver()
        await driver._committer.void(node.rank, FIRST)
        await driver.close()
        return driver._voice.failure

    failure = asyncio.run(scenario())
    assert (failure is not None) is (outcome == "failed")
    assert [call.args for call in written.await_args_list] == ([("commits/r0", None, 40)] if outcome == "void" else [])


@pytest.mark.parametrize("lent_for", [FIRST, None], ids=["the one that was filled", "registered anew"])
def test_what_was_verified_is_not_said_of_a_shadow_that_came_since(
    shadowed: Node, monkeypatch: pytest.MonkeyPatch, lent_for: PubId | None
) -> None:
    """The same process, with a new and empty one: it would be served, and lent, as the publication."""
    shadowed.rank.lent_for, shadowed.rank.complete = lent_for, None
    shadowed.page.set_shadow_publication(0, 0)
    failed: list[str] = []
    monkeypatch.setattr(LaneDriver, "fail", lambda _driver, _edge, reason: failed.append(reason))

    async def scenario() -> bool:
        driver = Driven(shadowed, AsyncMock()).driver()
        attempt = driver.attempt = MagicMock(verified=True, declared=False)
        driver._preparer.prepared = FIRST
        await driver._transfer(FIRST)
        await driver.close()
        return bool(attempt.declared)

    filled = lent_for == FIRST
    assert asyncio.run(scenario()) is filled
    assert failed == ([] if filled else [f"{KEY} has other memory than what was filled"])
    assert shadowed.rank.complete == lent_for
    assert shadowed.page.shadow_publication == (FIRST if filled else (0, 0))


def test_a_lead_that_dropped_its_ticket_is_given_it_again(shadowed: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shadow was released and filled again meanwhile; the page says that it took the ticket, and it has none."""
    shadowed.page.take(Taken(*FIRST, 5))
    monkeypatch.setattr(LaneDriver, "stage_seconds", 2.0)

    async def scenario() -> None:
        driver = Driven(shadowed, AsyncMock()).driver()
        monkeypatch.setattr(driver.calls, "lead_of_unapplied", lambda _publication: None)
        for _ in range(3):
            await driver._committer.committed(FIRST)
        shadowed.page.generation, shadowed.page.revision = FIRST
        await driver._committer.committed(FIRST)
        await driver.close()

    asyncio.run(scenario())
    assert [(name, fields["ticket"]["kind"]) for name, fields in shadowed.said] == [("ticket", "apply")]


def test_a_commit_is_not_void_for_a_process_that_came_since(node: Node) -> None:
    """The lane will turn; the commit was of the one before, which had it."""
    written = AsyncMock(return_value=True)

    async def scenario() -> None:
        driver = Driven(node, written).driver()
        assert node.rank.lost(FIRST)
        node.session.incarnation = "j"
        await driver._committer.committed(FIRST)
        assert driver._voice.failure is None
        node.session.incarnation = "i"
        await driver._committer.committed(FIRST)
        assert driver._voice.failure == ((), f"{KEY} took its memory back", False)
        await driver.close()

    asyncio.run(scenario())
    assert written.await_count == 0


def test_a_new_shadow_of_the_same_process_holds_nothing() -> None:
    """What the page says was of the one before; one that is lent again as it was keeps it."""

    def registered(fd: int) -> tuple[int, int]:
        rank = LocalRank(cast("Any", SimpleNamespace(key=KEY)), LAYOUT, "d", HOST_SHADOW, page)
        rank.set_memory(Memory((Region("w", 0, 0, 96),), [fd], 1))
        made.append(rank)
        Job.add_rank(job, rank, b"")
        return page.shadow_publication

    made: list[LocalRank] = []
    page, first, second = ControlPage.create(), create_memory("one", 96), create_memory("two", 96)
    job = cast("Any", MagicMock(blobs={}, _layouts={}, ranks={}))
    page.set_shadow_publication(*FIRST)
    assert registered(first) == FIRST
    word = page.shadow_loan_word
    assert registered(os.dup(first)) == FIRST
    assert page.shadow_loan_word == word
    assert registered(second) == (0, 0)
    assert page.shadow_loan_word == word + 1
    for rank in made:
        rank.close()
    page.close()
