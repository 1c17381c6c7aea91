"""Whether a commit has reached a rank that is dirty again: by what its client told, not by a page that is ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest

from refitd.daemon.lane import LaneDriver
from refitd.daemon.rank import LocalRank
from refitd.daemon.requests import Requests
from refitd.epoch.records import Ack, Commit, Lane, PubId
from refitd.errors import Refused
from refitd.hook.memfd import create_memory
from refitd.hook.messages import ENGINE, Ticket
from refitd.hook.page import ControlPage
from refitd.hook.session import Fds
from refitd.testing import split_layout

LAYOUT = split_layout({"w": ((4, 6), "float32")}, 0, 1)
FIRST, NEXT = PubId(1, 7), PubId(1, 8)


class Node:
    """A daemon's requests and one in_place rank of its, whose client does what engines do."""

    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.session = cast("Any", SimpleNamespace(job="job", side=ENGINE, group="r0", key="engine/r0/0"))
        self.rank = LocalRank(self.session, LAYOUT, "d", "in_place", page)
        self.rank.mover = MagicMock(pidfd=3)
        self.rank.lent_for = FIRST
        job = SimpleNamespace(
            ranks={self.rank.key: self.rank}, lanes={}, poke=MagicMock(), poke_lane=MagicMock(),
            movers=SimpleNamespace(unmap=AsyncMock()),
        )  # fmt: skip
        job_of = SimpleNamespace(job=lambda _name: job, config=MagicMock())
        self.requests = Requests(cast("Any", job_of))

    def ask(self, method: str, publication: PubId | None = None, word: int = 1) -> None:
        fields: dict[str, Any] = {"word": word, "memory": [{"name": "w", "fd": 0, "offset": 0, "nbytes": 96}]}
        if publication:
            fields["ticket"] = Ticket("receive", "job", "r0", *publication, 1, 5).to_json()
        fds = Fds([create_memory("test", 96)] if method == "receive" else [])
        try:
            asyncio.run(self.requests.request(self.session, {"method": method, **fields}, fds))
        finally:
            fds.close()

    def switch(self, publication: PubId) -> None:
        self.page.generation, self.page.revision, self.page.dirty = *publication, 0
        self.ask("committed", publication)


@pytest.fixture
def node() -> Iterator[Node]:
    page = ControlPage.create()
    found = Node(page)
    yield found
    found.rank.close()
    page.close()


def test_a_rank_that_is_about_to_lend_for_the_next_publication_has_the_last(node: Node) -> None:
    """Its page is dirty before its daemon hears that it lends."""
    node.switch(FIRST)
    assert not node.rank.lost(FIRST)
    node.page.dirty = 1
    assert not node.rank.lost(FIRST)
    node.ask("receive", NEXT)
    assert not node.rank.lost(FIRST)


def test_a_rank_that_gave_the_next_receive_up_has_lost_the_last(node: Node) -> None:
    """Nobody would bring it back otherwise: the next publication may never come."""
    node.switch(FIRST)
    node.page.dirty = 1
    node.ask("receive", NEXT)
    node.ask("release")
    assert node.rank.lost(FIRST)


def test_what_is_said_of_a_receive_names_it(node: Node) -> None:
    """By the word that came with it, whatever the loan's word is by now."""
    said, node.session.event = [], lambda name, **fields: said.append((name, fields))
    node.ask("receive", FIRST, word=6)
    node.ask("relent", word=7)
    node.rank.say("failed", reason="superseded")
    assert (node.rank.own_word, said) == (7, [("failed", {"loan": 6, "reason": "superseded"})])


def test_a_rank_that_gave_its_receive_up_before_it_heard_of_the_commit(node: Node) -> None:
    """It never said that it has switched."""
    node.page.dirty = 1
    node.ask("receive", FIRST)
    node.ask("release")
    assert node.rank.lost(FIRST)


def test_a_rank_that_released_what_it_serves_is_about_to_lend(node: Node) -> None:
    """Before weights move they are released, and are whole all the same."""
    node.switch(FIRST)
    node.ask("release")
    node.page.dirty = 1
    assert not node.rank.lost(FIRST)


def test_a_loan_that_is_refused_takes_nothing_back(node: Node) -> None:
    """The client's memory is as it was; so is what we know of it."""
    node.switch(FIRST)
    node.page.dirty = 1
    with pytest.raises(Refused):
        node.ask("receive", PubId(0, 0))
    assert not node.rank.lost(FIRST)


@pytest.mark.parametrize(
    ("of", "phase", "outcome"),
    [
        (FIRST, "verified", "failed"),  # our ack must not say any more that all is verified
        (FIRST, "built", "void"),
        (NEXT, "built", "kept"),  # another commit has come since
    ],
)
def test_only_the_commit_that_was_lost_is_void(of: PubId, phase: str, outcome: str) -> None:
    """The records may have gone on while the lane waited for a write."""
    written = AsyncMock(return_value=True)
    commit = SimpleNamespace(value=Commit(*of, 1, 5, {}, 1), revision=40)
    view = SimpleNamespace(
        commits={"r0": commit}, ack=lambda *_: Ack(5, "d", phase, *FIRST, {}, FIRST), revision_of=lambda _key: 40
    )
    agreement = SimpleNamespace(view=view, write=written, compare_path=str)
    rank = cast("Any", SimpleNamespace(key="engine/r0/0"))

    async def scenario() -> Any:
        driver = LaneDriver(MagicMock(node="a", agreement=agreement), "r0")
        driver.lane, driver.token, driver._preparer.prepared = Lane("r0", (), (), (), (), ""), 5, FIRST
        await driver._committer.void(rank, FIRST)
        await driver.close()
        return driver._voice.failure

    failure = asyncio.run(scenario())
    assert (failure is not None) is (outcome == "failed")
    assert [call.args for call in written.await_args_list] == ([("commits/r0", None, 40)] if outcome == "void" else [])
