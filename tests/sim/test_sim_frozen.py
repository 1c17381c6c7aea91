"""A ticket to apply that was taken, and whose commit nobody has written: the replica goes on to it whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from refitd.daemon.prepare import Preparer
from refitd.daemon.rank import LocalRank
from refitd.epoch.records import PubId
from refitd.hook.messages import HOST_SHADOW, Ticket

from .engine import SimEngine
from .oracle import Violation
from .scenario import Scenario, run
from .world import World


def story(monkeypatch: pytest.MonkeyPatch, away: float) -> None:
    """The lead takes a ticket and its daemon dies; it is back ``away`` seconds later, and newer publications wait. The
    other rank is slow to apply."""
    held: list[Ticket] = []
    apply, take = SimEngine._apply, SimEngine._pending

    async def late(self: SimEngine, ticket: Ticket) -> None:
        if held and self.rank == 1 and held[0].revision == ticket.revision:
            await asyncio.sleep(away + 8.0)
        await apply(self, ticket)

    async def body(scenario: Scenario) -> Any:
        world = scenario.world
        scenario.build_wide(1, [(2, HOST_SHADOW)])
        scenario.start()
        await scenario.assert_i7_converges("at the start")
        world.train_seconds = 0.3

        def pending(self: SimEngine) -> Ticket | None:
            before, ticket = self._taken, take(self)
            if ticket is not None and before is None and not held:
                held.append(ticket)
                machine = self.machine
                assert machine.daemon is not None
                machine.daemon.process.kill()
                machine.world.loop.call_later(away, machine.start_daemon, context=machine.world.loop.nobody)
            return ticket

        monkeypatch.setattr(SimEngine, "_pending", pending)
        assert await scenario.until(lambda: bool(held), 20.0)
        await asyncio.sleep(away + 12.0)
        world.check()
        newest = world.oracle.newest()
        assert newest is not None
        assert newest.revision > held[0].revision
        await scenario.assert_i7_converges("afterwards")

    monkeypatch.setattr(SimEngine, "_apply", late)
    run(World(1), body)


@pytest.mark.parametrize("away", [0.5, 5.0, 20.0], ids=["a moment", "within the lease", "past the lease"])
def test_all_ranks_apply_what_some_may_have_applied(away: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else some would serve it, others what they had, and none of them be dirty."""
    story(monkeypatch, away)


def test_a_shadow_that_is_emptied_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled with something else before all have applied what they held."""

    def at_once(_preparer: Preparer, rank: LocalRank, _publication: PubId) -> bool:
        rank.spoil_shadow()
        return True

    monkeypatch.setattr(Preparer, "_spoil", at_once)
    with pytest.raises(Violation, match=r"frozen: of r0 ranks \{0\} apply .*, and \{1\} cannot"):
        story(monkeypatch, 5.0)
