"""A joiner whose catch-up takes longer than several publications: it is waited for, and becomes ready."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from refitd.epoch.records import Lane
from refitd.epoch.refits import lag
from refitd.hook.messages import IN_PLACE

from .engine import Replica
from .loop import loop
from .scenario import Scenario, layouts, run
from .trainer import SimTrainer
from .world import World

BUCKET_SECONDS = 1.25  # of the joiner's, of which there are four


async def at_once(*_arguments: object) -> None:
    """No trainer asks for a report: it goes on to its next step."""


class Story(NamedTuple):
    """Seconds and counts of one joiner."""

    catch_up: float  # from its first byte to its first commit
    published: int  # meanwhile
    others: int  # commits of a replica that it does not read from, meanwhile
    ready: float  # from its first commit until it is at most one publication behind
    sources: set[str]


async def slow_joiner(scenario: Scenario) -> Story:
    world = scenario.world
    world.train_seconds, world.patience = 0.6, 0.5
    scenario.build(4, 1, [(1, IN_PLACE), (1, IN_PLACE)])
    scenario.start()
    supervisor = asyncio.ensure_future(scenario.supervise())
    await scenario.assert_i7_converges("at the start")
    world.slow_lanes["r2"] = BUCKET_SECONDS
    world.replicas["r2"] = Replica(world, "r2", [world.machine("n3")], layouts(1, 0), IN_PLACE)
    view = world.oracle.view
    assert await scenario.until(lambda: world.oracle.lanes().get("r2") == "transfer", 20.0)
    assert view.publication is not None
    began, number, commits = loop().time(), view.publication.value.number, world.oracle.commits
    lanes: dict[int, Lane] = {}  # by token

    def committed() -> bool:
        lanes[view.lanes["r2"].revision] = view.lanes["r2"].value
        return "r2" in view.commits

    assert await scenario.until(committed, 40.0), world.oracle.why()
    token = view.commits["r2"].value.token
    published, others = view.publication.value.number - number, world.oracle.commits - commits - 1
    sources = {slot.key for slot in lanes[token].sources}
    story = Story(loop().time() - began, published, others, loop().time(), sources)
    world.slow_lanes.clear()
    assert await scenario.until(lambda: lag(view, "r2") <= 1, 20.0), world.oracle.why()
    supervisor.cancel()
    return story._replace(ready=loop().time() - story.ready)


def test_a_joiner_that_needs_five_seconds_becomes_ready_while_publications_come_every_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica that it reads from stays where it is, the other one goes on; nothing is read from the trainer."""
    monkeypatch.setattr(SimTrainer, "_committed", at_once)
    story = run(World(3), slow_joiner)
    assert story.catch_up >= 4 * BUCKET_SECONDS
    assert story.published >= 4
    assert story.others >= 1
    assert story.ready <= 3.0
    assert all(key.startswith("engine/") for key in story.sources), story.sources
