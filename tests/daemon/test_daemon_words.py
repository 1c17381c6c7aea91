"""What a node need not say, or not at once: words that nobody waits for, offers one by one, rounds without work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from refitd.daemon import loans as loans_module
from refitd.daemon.attempt import Attempt
from refitd.daemon.loans import Loans
from refitd.daemon.voice import LINGER_SECONDS, Voice
from refitd.epoch.records import Ack

KNOWN = Ack(5, "plan", "verified", 1, 7, {}, (1, 7), lead=(1, 7))
DIRTY = Ack(5, "plan", "built", 0, 0, {}, (0, 0), lead=(0, 0))


def _voice(known: Ack) -> tuple[Voice, Any, list[str]]:
    written: list[str] = []

    async def write(key: str, *_rest: Any, **_options: Any) -> bool:
        written.append(key)
        return True

    view = SimpleNamespace(ack=lambda *_: known, members={"a": SimpleNamespace(created=1)}, revision_of=lambda _key: 0)
    agreement = SimpleNamespace(view=view, alive=True, write=write, compare_path=str)
    driver = MagicMock(replica="r0", token=5, context=MagicMock(node="a", agreement=agreement))
    return Voice(driver), driver, written


def test_that_ranks_become_dirty_is_said_a_little_later_or_with_the_next_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written while it lingers, the lane looks again by itself, and then it is written."""

    async def scenario() -> None:
        voice, driver, written = _voice(KNOWN)
        monkeypatch.setattr(voice, "_ack", lambda: DIRTY)
        assert not await voice.speak()
        assert not await voice.speak()
        assert written == []
        while not driver.poke.called:
            await asyncio.sleep(LINGER_SECONDS / 5)
        while not await voice.speak():
            await asyncio.sleep(LINGER_SECONDS / 5)
        assert written == ["acks/r0/a"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "ack",
    [
        Ack(5, "plan", "prepared", 1, 8, {}, (0, 0)),  # everybody waits for it
        Ack(5, "plan", "failed", 0, 0, {}, (0, 0), reason="an edge broke"),
        Ack(6, "plan", "built", 0, 0, {}, (0, 0)),  # another token
        Ack(5, "plan", "built", 0, 0, {}, (1, 8), lead=(1, 7)),  # a publication is served
        Ack(5, "plan", "built", 0, 0, {}, (0, 0), lead=(1, 8)),  # the lead has left a receive
    ],
)
def test_every_other_word_is_said_at_once(monkeypatch: pytest.MonkeyPatch, ack: Ack) -> None:
    """Also after one that lingered."""

    async def scenario() -> None:
        voice, _driver, written = _voice(KNOWN)
        monkeypatch.setattr(voice, "_ack", lambda: DIRTY)
        assert not await voice.speak()
        monkeypatch.setattr(voice, "_ack", lambda: ack)
        assert await voice.speak()
        assert written == ["acks/r0/a"]

    asyncio.run(scenario())


def _trainer(number: int) -> Any:
    session = SimpleNamespace(group="run", incarnation=f"i{number}")
    return SimpleNamespace(key=f"trainer/run/{number}", trains=True, session=session, offer=None, asked={})


def test_offers_of_one_step_are_shown_together_and_a_lone_one_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job looks at once when all ranks here have offered, and a moment after an offer that stays alone."""

    async def scenario() -> None:
        ranks = [_trainer(number) for number in range(2)]
        job = MagicMock(ranks={rank.key: rank for rank in ranks})
        loans = Loans(job)
        monkeypatch.setattr(loans_module, "GATHER_SECONDS", 3600.0)
        loans.open(cast("Any", ranks[0]), 1, 3, 11)
        assert not job.poke.called
        loans.open(cast("Any", ranks[1]), 1, 3, 11)
        assert job.poke.call_count == 1
        monkeypatch.setattr(loans_module, "GATHER_SECONDS", 0.001)
        loans.open(cast("Any", ranks[0]), 2, 4, 12)
        assert job.poke.call_count == 1
        while job.poke.call_count == 1:
            await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_movers_that_have_nothing_to_do_are_not_told_to_run() -> None:
    """A trainer whose memory others read sends nothing; members always answer, and sources that send begin first."""
    programs = {
        "engine/r0/0": SimpleNamespace(sends=lambda: ()),
        "trainer/run/0": SimpleNamespace(sends=lambda: ("bucket",)),
        "trainer/run/1": SimpleNamespace(sends=lambda: ()),
    }
    attempt = cast("Any", SimpleNamespace(_programs=programs, members={"engine/r0/0"}))
    assert Attempt._movers(attempt) == ["trainer/run/0", "engine/r0/0"]
