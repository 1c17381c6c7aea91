"""A replica's processes hang, a scheduler starts others in their place on other nodes, and those that hung wake up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from refitd.hook.messages import HOST_SHADOW, IN_PLACE

from .scenario import Scenario, layouts, run
from .world import World

NODES = ("n0000", "n0003")  # of the trainer and of another replica; r0 is on n0001 and n0002


@pytest.mark.parametrize("mode", [IN_PLACE, HOST_SHADOW])
@pytest.mark.parametrize("hosts", [NODES, NODES[::-1], NODES[:1]], ids=["same order", "other order", "smaller"])
def test_the_later_processes_serve_and_those_that_wake_are_told_where_they_are(
    mode: str, hosts: tuple[str, ...]
) -> None:
    """Whichever node joined first, and whether they are as many or fewer: one of the two hosts joined before."""

    async def body(scenario: Scenario) -> Any:
        world = scenario.world
        scenario.build_wide(1, [(2, mode), (1, IN_PLACE)])
        scenario.start()
        await scenario.assert_i7_converges("at the start")
        replica = world.replicas["r0"]
        hung = [engine for _rank, engine in sorted(replica.leave_behind().ranks.items())]
        for engine in hung:
            engine.process.pause()
        model = scenario.model
        replica.become([world.machines[host] for host in hosts], layouts(len(hosts), 0, model))
        for rank in range(len(hosts)):
            replica.start(rank)
        assert await scenario.until(replica.whole, 10.0)
        await scenario.assert_i7_converges("in their place")
        served = [engine.publication for engine in hung]
        for engine in hung:
            engine.process.resume()
        await asyncio.sleep(10.0)
        await scenario.assert_i7_converges("with those that woke")
        assert [engine.publication for engine in hung] == served
        return [engine.failure.rpartition(", got ")[2] for engine in hung]

    told = run(World(1), body)
    places = [f"a later process speaks for it on {host}" for host in hosts]
    assert told[: len(hosts)] == places
