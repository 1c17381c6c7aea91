"""A thin slice of the simulation: three nodes, one death; and a run that repeats itself exactly."""

from __future__ import annotations

import asyncio

from refitd.hook.messages import HOST_SHADOW, IN_PLACE

from .scenario import Scenario, run
from .world import World


async def one_death(scenario: Scenario) -> float:
    scenario.build(3, 2, [(2, IN_PLACE), (1, HOST_SHADOW)])
    scenario.start()
    supervisor = asyncio.ensure_future(scenario.supervise())
    await scenario.assert_i7_converges("at the start")
    await asyncio.sleep(3.0)
    scenario.world.replicas["r0"].ranks[0].process.kill()
    await asyncio.sleep(1.0)
    assert await scenario.until(scenario.all_up, 30.0)
    took = await scenario.assert_i7_converges("after the death")
    supervisor.cancel()
    return took


def test_three_nodes_one_death() -> None:
    """The replica whose rank died comes back and has the newest publication; nothing that it served was a mix."""
    world = World(1)
    assert run(world, one_death) < 10.0
    assert world.counts["answers"] > 100
    assert world.oracle.commits > 3


def test_a_seed_repeats_itself() -> None:
    """Two runs of a seed are the same event by event; another seed is not."""
    digests = []
    for seed in (5, 5, 6):
        world = World(seed)
        run(world, one_death)
        digests.append(world.digest)
    assert digests[0] == digests[1] != digests[2]
