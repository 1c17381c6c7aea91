"""How a point that seldom comes is brought about."""

from __future__ import annotations

import asyncio
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any

import pytest

from refitd.demo.chaos import points
from refitd.demo.chaos.points import Point, Points

POINT = Point("mover", "effect:word of a mover failed")


class FakeSession:
    """Passes the point at the ``needed``-th disturbance; with 0 never."""

    def __init__(self, needed: int) -> None:
        self.needed, self.disturbed, self.hit = needed, 0, asyncio.Event()
        self.seen: Any = None
        self.world = SimpleNamespace(scene=SimpleNamespace(cluster=SimpleNamespace(daemons={}), clients=[]))

    def disturb(self, _world: Any) -> Any:
        async def end() -> None:
            self.disturbed += 1
            if self.disturbed == self.needed:
                self.hit.set()

        return end

    async def at(self, _wanted: Any, act: Any, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                await self.hit.wait()
        except TimeoutError:
            return act({"name": "", "pid": 0})
        return act({"name": POINT.name, "pid": 1})

    async def suffer(self, faults: Any, outcome: Any) -> None:
        outcome.why += [repr(e) for e in await asyncio.gather(*faults, return_exceptions=True) if e]


@pytest.mark.parametrize(
    ("needed", "why"), [(3, []), (0, [repr(TimeoutError(f"nobody passed {' '.join(POINT)} within 0.5 s"))])]
)
def test_a_disturbance_comes_again_until_the_point_is_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needed: int, why: list[str]
) -> None:
    """And no longer than anybody waits for it."""
    sent: list[Signals] = []

    def send(_world: Any, signal: Signals, _targets: Any) -> Any:
        sent.append(signal)
        return points._nothing(_world)

    async def run() -> tuple[FakeSession, Any]:
        session = FakeSession(needed)
        monkeypatch.setitem(points.DISTURBANCES, "something", session.disturb)
        found = Points(session, tmp_path / "armed")  # type: ignore[arg-type]
        found.found[POINT] = "something"
        return session, await found.strike(1, POINT, Signals.SIGKILL)

    for name, seconds in (("DOWN_SECONDS", 0.01), ("CALM_SECONDS", 0.05), ("REACH_SECONDS", 0.5 if not needed else 30)):
        monkeypatch.setattr(points, name, seconds)
    monkeypatch.setattr(points, "send", send)
    session, outcome = asyncio.run(run())
    assert outcome.why == why
    assert sent == ([] if why else [Signals.SIGKILL])
    assert session.disturbed == needed if needed else session.disturbed > 1
