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
