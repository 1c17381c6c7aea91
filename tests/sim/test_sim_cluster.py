"""A thin slice of the simulation: three nodes, one death; and a run that repeats itself exactly."""

from __future__ import annotations

import asyncio
from collections import Counter

from refitd.hook.messages import HOST_SHADOW, IN_PLACE

from .engine import SimEngine
from .scenario import Scenario, run
from .world import World


def answers_of(world: World) -> Counter[str]:
    """Counts the answers of each engine rank from now on."""
    answers, serves = Counter[str](), world.oracle.serves

    def heard(engine: SimEngine) -> None:
        serves(engine)
        answers[engine.key] += 1

    world.oracle.serves = heard  # type: ignore[method-assign]
    return answers


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
    answers = answers_of(scenario.world)
    await asyncio.sleep(2.0)
    assert sorted(answers) == ["engine/r0/0", "engine/r0/1", "engine/r1/0"], "somebody does not answer any more"
    supervisor.cancel()
    return took


def test_three_nodes_one_death() -> None:
    """The replica whose rank died comes back within 2 s, has the newest publication and answers; nothing that it
    served was a mix, and each publication was committed by both replicas."""
    world = World(1)
    assert run(world, one_death) < 2.0
    publications = {publication.revision for publication in world.oracle.weights}
    assert len(publications) >= 3
    assert world.oracle.commits >= 2 * (len(publications) - 1)


def test_a_seed_repeats_itself() -> None:
    """Two runs of a seed are the same event by event; another seed is not."""
    digests = []
    for seed in (5, 5, 6):
        world = World(seed)
        run(world, one_death)
        digests.append(world.digest)
    assert digests[0] == digests[1] != digests[2]


async def missed_commit(scenario: Scenario) -> float:
    """The daemon of rank 1 stops as the commit is written: rank 0 has heard it, and newer publications come."""
    world = scenario.world
    world.train_seconds = 0.5
    scenario.build(4, 1, [(2, IN_PLACE)])
    replica = world.replicas["r0"]
    replica.machines = [world.machine("n1"), world.machine("n2")]
    scenario.start()
    supervisor = asyncio.ensure_future(scenario.supervise())
    await scenario.assert_i7_converges("at the start")
    commits = world.oracle.commits
    daemon = world.machine("n2").daemon
    assert daemon is not None
    world.etcd.on_change.append(lambda *_: daemon.process.pause() if world.oracle.commits == commits + 1 else None)
    await asyncio.sleep(16.0)
    lead, other = (replica.ranks[rank] for rank in range(2))
    assert (lead.page.dirty, other.page.dirty) == (0, 1)
    world.etcd.on_change.pop()
    daemon.process.resume()
    took = await scenario.assert_i7_converges("after the daemon woke")
    supervisor.cancel()
    return took


def test_a_rank_that_missed_its_commit_takes_the_next_ticket() -> None:
    """Its lead cannot order a receive while it is in the last one: it is told that it has failed."""
    assert run(World(1), missed_commit) < 30.0
