"""Turn after turn: what daemons, movers, the store and this process hold must not grow (I8)."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any

from refitd.hook.messages import HOST_SHADOW, IN_PLACE

from .nemesis import Nemesis, reset_edge
from .scenario import Scenario, run
from .world import World, descriptors

Sizes = dict[str, int]
SLACK = 8  # things that come and go


def sizes(world: World) -> Sizes:
    """How many of everything there is."""
    found = {
        "store keys": len(world.etcd.items),
        "descriptors": descriptors() - world.own_descriptors,
        "movers": len(world.movers),
        "sockets": len(world.sockets),
    }
    for machine in world.machines.values():
        if machine.daemon is None or machine.daemon.process.dead:
            continue
        name = machine.name
        found[f"{name} tasks"] = len(machine.daemon.process.tasks)
        for handle in machine.daemon.pool.handles:
            found[f"{name} mover tasks"] = found.get(f"{name} mover tasks", 0) + len(handle.process.tasks)
            found[f"{name} mover lanes"] = found.get(f"{name} mover lanes", 0) + len(handle.mover.lanes)
        for job in machine.daemon.jobs.values():
            for part in (job, job.agreement, job.movers, job.membership, job.leading, job.loans, job.edges):
                found.update(_containers(f"{name} {type(part).__name__}", part))
            for replica, lane in job.lanes.items():
                found.update(_containers(f"{name} lane {replica}", lane))
    return found


def _containers(name: str, part: Any) -> Sizes:
    return {f"{name}.{field}": len(value) for field, value in vars(part).items() if isinstance(value, Sized)}


def grown(before: Sizes, after: Sizes) -> dict[str, tuple[int, int]]:
    """What there is more of than there was, beyond what comes and goes."""
    return {
        key: (before.get(key, 0), size)
        for key, size in after.items()
        if size > before.get(key, 0) + max(SLACK, before.get(key, 0) // 4)
    }


async def turns(scenario: Scenario, count: int) -> tuple[Sizes, Sizes, int]:
    """Break connections until lanes have turned so often; sizes after a third of it, and at the end."""
    world = scenario.world
    world.train_seconds = 2.0
    scenario.build(3, 2, [(2, IN_PLACE), (1, HOST_SHADOW)])
    scenario.start()
    await scenario.assert_i7_converges("at the start")
    nemesis, first = Nemesis(scenario), world.oracle.turns_of.total()
    before: Sizes = {}
    while world.oracle.turns_of.total() < first + count:
        for replica in world.replicas:
            reset_edge(nemesis, replica)
        await asyncio.sleep(world.rng.uniform(0.3, 1.5))
        world.check()
        if not before and world.oracle.turns_of.total() > first + count // 3:
            before = await _at_rest(scenario)
    return before, await _at_rest(scenario), world.oracle.turns_of.total() - first


async def _at_rest(scenario: Scenario) -> Sizes:
    await asyncio.sleep(15.0)
    await scenario.assert_i7_converges("at rest")
    return sizes(scenario.world)


def endure(seed: int, count: int) -> tuple[Sizes, Sizes, int]:
    """Raises Violation where anything but sizes goes wrong."""
    found: tuple[Sizes, Sizes, int] = run(World(seed), lambda scenario: turns(scenario, count))
    return found
