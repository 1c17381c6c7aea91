"""What a daemon does while its store is away: says so now and then, and holds that time against nobody."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from structlog.testing import capture_logs

from refitd.daemon import job as job_module
from refitd.daemon.job import Job
from refitd.daemon.lane import LaneDriver
from refitd.daemon.movers import Movers
from refitd.errors import StoreUnavailable


def test_it_is_said_at_once_and_then_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found out five times a second; what is not said aloud is there for those who debug."""
    now, up = [100.0], []
    monkeypatch.setattr(job_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    metrics = SimpleNamespace(store_up=up.append)
    job = cast("Any", SimpleNamespace(metrics=metrics, _said_away=-math.inf, _log=structlog.get_logger()))
    with capture_logs() as logs:
        for now[0] in (100.0, 100.2, 109.9, 110.0):
            Job._store_away(job, StoreUnavailable("no leader"))
    assert [line["log_level"] for line in logs] == ["warning", "debug", "debug", "warning"]
    assert up == [False] * 4


@pytest.mark.parametrize(("away", "failed"), [(True, []), (False, ["not built in time: engine/r0/0"])])
def test_a_lane_has_its_whole_time_to_be_built_when_the_store_is_back(away: bool, failed: list[str]) -> None:
    """A peer may not have heard of the token yet."""
    built = SimpleNamespace(ready=False, deadline=time.monotonic() - 1.0, waiting={"engine/r0/0"})
    config = SimpleNamespace(timeouts=SimpleNamespace(build=10.0))
    context = SimpleNamespace(agreement=SimpleNamespace(away=away), config=config)
    said: list[str] = []
    driver = cast("Any", SimpleNamespace(built=built, context=context, fail=lambda _edge, reason: said.append(reason)))
    LaneDriver._check_deadline(driver)
    assert said == failed
    assert (built.deadline > time.monotonic() + 5.0) is away


@pytest.fixture
def movers() -> Iterator[tuple[Movers, list[dict[str, Any]]]]:
    """Of two ranks, of which one has a mover, and what that one hears."""
    heard: list[dict[str, Any]] = []
    ranks = {"a": SimpleNamespace(mover=SimpleNamespace(send=heard.append)), "b": SimpleNamespace(mover=None)}
    found = Movers(cast("Any", None), cast("Any", SimpleNamespace(job="j", node="n", ranks=ranks)), cast("Any", None))
    yield found, heard
    found._stuck.close()


def test_movers_hear_when_it_goes_and_when_it_is_back(movers: tuple[Movers, list[dict[str, Any]]]) -> None:
    """Once each, however often the daemon looks."""
    found, heard = movers
    for away in (False, True, True, False, False):
        found.heed_store(away)
    assert heard == [{"kind": "store", "away": True}, {"kind": "store", "away": False}]


def test_a_bug_in_one_tick_does_not_end_the_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and the next tick looks at the movers again."""
    monkeypatch.setattr(job_module, "TICK_SECONDS", 0.001)
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("a bug")

    async def scenario() -> None:
        enough = asyncio.Event()
        job = SimpleNamespace(
            movers=SimpleNamespace(check=check, heed_store=lambda _away: None),
            agreement=SimpleNamespace(away=False),
            edges=SimpleNamespace(expire=lambda: None),
            poke=lambda: enough.set() if len(looks) > 2 else None,
            _log=structlog.get_logger(),
        )
        ticking = asyncio.create_task(Job._tick(cast("Any", job)))
        await enough.wait()
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [(line["event"], line["log_level"]) for line in logs] == [("job_fault", "error")]
