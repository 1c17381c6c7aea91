"""The rig can fail: faults planted in movers, engines, daemons and their store are found, each under its name."""

from __future__ import annotations

import asyncio

import pytest

from refitd.daemon.lane import LaneDriver
from refitd.daemon.rank import LocalRank
from refitd.epoch.records import PubId
from refitd.hook.messages import HOST_SHADOW, IN_PLACE

from .nemesis import Nemesis
from .oracle import Violation
from .plants import Sleepy
from .scenario import Scenario, run
from .world import SimDaemon, World


async def hurried(scenario: Scenario) -> None:
    """Trainers that do not wait for their readers: every transfer overlaps a change of the weights."""
    world = scenario.world
    world.bucket_time, world.train_seconds, world.patience = (0.02, 0.1), 0.3, 0.2
    scenario.build(4, 2, [(2, IN_PLACE), (1, HOST_SHADOW)])
    scenario.start()
    for _ in range(100):
        await asyncio.sleep(0.3)
        world.check()


async def deaf(scenario: Scenario) -> None:
    """The trainer's daemon stops in slow transfers: the trainer takes its memory back, and the movers do not hear."""
    world = scenario.world
    world.bucket_time, world.train_seconds, world.patience = (1.0, 2.0), 0.3, 30.0
    scenario.build(4, 2, [(2, IN_PLACE), (1, HOST_SHADOW)])
    scenario.start()
    nemesis = Nemesis(scenario)
    for _ in range(8):
        await nemesis.moment("transfer")
        daemon = world.machines["n0"].daemon
        assert daemon is not None
        nemesis.pause(daemon.process, 6.0)
        await asyncio.sleep(10.0)
        world.check()


async def turning(scenario: Scenario) -> None:
    """Movers die in the midst of slow transfers, and lanes turn."""
    world = scenario.world
    world.bucket_time, world.train_seconds, world.patience = (0.05, 0.2), 0.3, 30.0
    scenario.build(4, 2, [(2, IN_PLACE)])
    scenario.start()
    nemesis = Nemesis(scenario)
    for _ in range(30):
        await nemesis.inject("transfer", "kill_mover")
        await asyncio.sleep(1.0)
        world.check()


def test_bytes_that_were_read_while_they_changed() -> None:
    """A mover that does not read the loan word again: the mix is seen where it is served or committed (I1, I2, I6)."""
    run(World(3), deaf)
    with pytest.raises(Violation, match=r"I[12]: "):
        run(World(3, {"skip-trailer": "*"}), deaf)


def test_an_engine_that_applies_early() -> None:
    """It serves before its publication was verified (I1)."""
    with pytest.raises(Violation, match=r"I1: engine/r0/. serves"):
        run(World(3, {"early-apply": "*"}), hurried)


def test_a_mover_that_goes_on_after_a_turn() -> None:
    """It says that it has stopped and writes on, after its node acked the turn (I5)."""
    run(World(4), turning)
    with pytest.raises(Violation, match=r"I5: "):
        run(World(4, {"ignore-revoke": "*"}), turning)


def test_plans_that_differ() -> None:
    """A node with another bucket size computes another plan (I10)."""
    world = World(5)
    world.bucket_bytes["n2"] = 64
    with pytest.raises(Violation, match=r"I10: "):
        run(world, hurried)


def sleepy_leader(fenced: bool) -> tuple[World, list[bool]]:
    """The leader stops between a decision and its write, loses its lease, wakes, and the write goes out."""
    world = World(6)
    stores: dict[str, Sleepy] = {}

    def before(daemon: SimDaemon) -> Sleepy:
        return stores.setdefault(daemon.process.name, Sleepy(daemon.store, fenced))

    world.store_of = before

    async def body(scenario: Scenario) -> list[bool]:
        world.train_seconds = 0.5
        scenario.build(4, 1, [(1, IN_PLACE)])
        scenario.start()
        await scenario.assert_i7_converges("at the start")
        leader = scenario.world.oracle.view.leader
        assert leader is not None
        daemon = world.machines[leader.value.node].daemon
        assert daemon is not None
        stores[daemon.process.name].asleep = True
        await asyncio.sleep(30.0)
        world.check()
        await scenario.assert_i7_converges("after it woke")
        return stores[daemon.process.name].outcomes

    return world, run(world, body)


def test_a_leader_that_wakes_is_refused() -> None:
    """Its decision compares its leadership, which is another's by now."""
    _world, outcomes = sleepy_leader(fenced=True)
    assert outcomes == [False]


def test_a_leader_without_a_fence_is_found() -> None:
    """The same decision without the comparison is written, and seen."""
    with pytest.raises(Violation, match=r"leadership: n\d writes "):
        sleepy_leader(fenced=False)


def test_a_lane_that_turns_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that tries again because a rank of its does what it was called to."""

    def suspicious(lane: LaneDriver, rank: LocalRank, _publication: PubId) -> None:
        lane.fail((), f"{rank.key} lends what it held")

    run(World(7), hurried)
    monkeypatch.setattr(LaneDriver, "lends_anew", suspicious)
    with pytest.raises(Violation, match=r"needless: n\d fails \d+ of r0, as engine/r0/\d lends what it held"):
        run(World(7), hurried)
