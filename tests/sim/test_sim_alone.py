"""The only replica, idle, with what it has committed: deaths beside its clients end its service briefly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from refitd.epoch.holders import open_offers
from refitd.epoch.reports import ready
from refitd.hook.messages import HOST_SHADOW, IN_PLACE

from .scenario import Scenario, run
from .world import World


async def alone(scenario: Scenario, mode: str, strike: Callable[[World], None]) -> tuple[bool, list[tuple[int, int]]]:
    """Trainers train on without publishing, one member of the lane is struck; whether its lane turned,
    and what else than the newest its ranks serve afterwards."""
    world = scenario.world
    world.train_seconds = 0.5
    scenario.build(3, 1, [(2, mode)])
    world.replicas["r0"].machines = [world.machine("n1"), world.machine("n2")]
    scenario.start()
    supervisor = asyncio.ensure_future(scenario.supervise())
    await scenario.assert_i7_converges("at the start")
    world.still, view = True, world.oracle.view
    await asyncio.sleep(10.0)  # whoever was about to publish has
    await scenario.assert_i7_converges("and stands still")
    newest, engines = view.newest, list(world.replicas["r0"].ranks.values())
    assert await scenario.until(lambda: not open_offers(view), 60.0)
    assert await scenario.until(lambda: all(engine.publication == newest for engine in engines), 30.0)
    token = view.lanes["r0"].revision
    strike(world)
    turned = await scenario.until(lambda: view.lanes["r0"].revision != token, 15.0)
    assert await scenario.until(lambda: ready(view, "r0", 0)[0], 15.0), ready(view, "r0", 0)
    supervisor.cancel()
    assert view.newest == newest, "nothing was published meanwhile"
    assert list(world.replicas["r0"].ranks.values()) == engines, "no client process died"
    return turned, [engine.publication for engine in engines if engine.publication != newest]


def mover(world: World) -> None:
    next(handle for handle in world.movers.values() if handle.mover.key == "engine/r0/1").kill()


def daemon(world: World) -> None:
    machine = world.machine("n2")
    assert machine.daemon is not None
    machine.daemon.process.kill()
    asyncio.get_running_loop().call_later(2.0, machine.start_daemon)


@pytest.mark.parametrize("mode", [IN_PLACE, HOST_SHADOW])
@pytest.mark.parametrize("strike", [mover, daemon])
def test_a_replica_that_alone_has_the_newest_serves_it_again(mode: str, strike: Callable[[World], None]) -> None:
    """Until the next publication, which a trainer that waits for rollouts may never make."""
    assert run(World(4), lambda scenario: alone(scenario, mode, strike)) == (True, [])
