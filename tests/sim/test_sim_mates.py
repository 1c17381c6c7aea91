"""Ranks of one replica that come anew by themselves, each rank on a node of its own, while nothing new is published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from refitd.hook.messages import HOST_SHADOW, IN_PLACE, Ticket
from refitd.plan import Bucket

from .engine import Replica, SimEngine
from .lane import SimLane
from .loop import loop
from .scenario import ROWS, Scenario, layouts, run
from .world import World

MATE = "engine/r0/1"


class Story(NamedTuple):
    """What it took until all served and nobody was in a receive."""

    seconds: float
    counts: dict[str, int]  # of what was said, by name
    reasons: list[str]  # why receives failed


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Ranks that are called and do not begin their receive."""
    keys: set[str] = set()
    receive = SimEngine._receive

    async def late(self: SimEngine, ticket: Ticket) -> None:
        while self.key in keys:
            await asyncio.sleep(0.05)
        await receive(self, ticket)

    monkeypatch.setattr(SimEngine, "_receive", late)
    return keys


async def started(scenario: Scenario, ranks: int, mode: str = IN_PLACE) -> Replica:
    """A replica that serves, another that has all, and trainers that publish nothing any more."""
    world = scenario.world
    scenario.build_wide(1, [(ranks, mode), (1, IN_PLACE)])
    replica = world.replicas["r0"]
    replica.waits = replica.leaves = True
    scenario.start()
    await scenario.assert_i7_converges("at the start")
    world.still = True
    await asyncio.sleep(3.0)
    return replica


async def publish(scenario: Scenario) -> None:
    """One more."""
    world, newest = scenario.world, scenario.world.oracle.newest()
    world.still = False
    assert await scenario.until(lambda: world.oracle.newest() != newest, 30.0)
    world.still = True


async def again(replica: Replica, rank: int) -> None:
    replica.ranks[rank].process.kill()
    await asyncio.sleep(0.2)
    replica.start(rank)


async def settles(scenario: Scenario, replica: Replica, since: float) -> Story:
    world = scenario.world

    def settled() -> bool:
        return not world.oracle.lagging() and not any(engine.busy for engine in replica.ranks.values())

    assert await scenario.until(settled, 60.0), world.oracle.why()
    seconds = loop().time() - since
    await asyncio.sleep(3.0)  # and stays so
    said = [(name, fields) for at, name, fields in world.tail if at >= since]
    names = ("receive_failed", "commit_void", "lane_failed", "committed")
    reasons = [str(fields["reason"]) for name, fields in said if name == "receive_failed"]
    return Story(seconds, {name: sum(each == name for each, _ in said) for name in names}, reasons)


def play(seed: int, story: Callable[[Scenario], Coroutine[Any, Any, Story]]) -> Story:
    found: Story = run(World(seed), story)
    return found


@pytest.mark.parametrize("late", [0.0, 0.4, 1.5])
def test_a_lead_that_receives_what_it_holds_for_a_mate_that_came_anew(late: float, held: set[str]) -> None:
    """Its node had nothing to lend for it and was prepared; what it lends now is another matter. No commit is void."""

    async def story(scenario: Scenario) -> Story:
        replica = await started(scenario, 2)
        held.update({MATE} if late else ())
        since = loop().time()
        await again(replica, 1)
        if late:
            assert await scenario.until(lambda: replica.ranks[1].busy is not None, 30.0)
            await asyncio.sleep(late)
            held.clear()
        return await settles(scenario, replica, since)

    found = play(1, story)
    assert found.counts["commit_void"] == 0
    assert found.counts["committed"] == 1
    assert found.seconds < 6.0


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_leave_a_receive_to_which_one_was_not_called_at_once(ranks: int, held: set[str]) -> None:
    """The lead's node says so, and the others follow: seconds do not grow with the ranks."""

    async def story(scenario: Scenario) -> Story:
        replica, last = await started(scenario, ranks), f"engine/r0/{ranks - 1}"
        held.add(last)
        await publish(scenario)
        assert await scenario.until(lambda: all(engine.busy for engine in replica.ranks.values()), 30.0)
        await asyncio.sleep(2.0)
        since = loop().time()
        held.clear()
        await again(replica, ranks - 1)
        return await settles(scenario, replica, since)

    found = play(2, story)
    assert found.seconds < 5.0
    assert found.counts["receive_failed"] == ranks - 1
    why = f"engine/r0/{ranks - 1} came anew and was not called to this receive: take the next ticket"
    assert set(found.reasons) == {why}


@pytest.mark.parametrize("victim", ["n0001", "n0002", "n0003"])
def test_a_daemon_that_comes_anew_sends_nobody_away_who_was_called_with_all(victim: str, held: set[str]) -> None:
    """The mate came anew, was called, and is slow to lend; meanwhile the lane turns, and a daemon of it restarts."""

    async def story(scenario: Scenario) -> Story:
        world = scenario.world
        replica = await started(scenario, 3)
        held.add("engine/r0/2")
        replica.ranks[2].process.kill()
        await publish(scenario)
        replica.start(2)
        assert await scenario.until(lambda: bool(replica.ranks[0].busy and replica.ranks[2].busy), 30.0)
        await asyncio.sleep(1.0)
        source = world.oracle.view.lanes["r0"].value.sources[0].key
        next(handle for handle in world.movers.values() if handle.key == source).kill()
        await asyncio.sleep(1.5)
        since, machine = loop().time(), world.machine(victim)
        assert machine.daemon is not None
        machine.daemon.process.kill()
        await asyncio.sleep(0.3)
        machine.start_daemon()
        await asyncio.sleep(5.0)
        held.clear()
        return await settles(scenario, replica, since)

    assert play(1, story).seconds < 15.0


def test_a_ticket_to_apply_is_taken_back_when_all_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead that leaves it, as it serves that publication, is asked once or twice, not for ever."""

    async def story(scenario: Scenario) -> Story:
        replica = await started(scenario, 2, HOST_SHADOW)
        replica.skips = True
        orders, order = list[Ticket](), replica.order

        def counted(ticket: Ticket) -> None:
            orders.append(ticket)
            order(ticket)

        monkeypatch.setattr(replica, "order", counted)
        since = loop().time()
        await again(replica, 1)
        found = await settles(scenario, replica, since)
        seen = len(orders)
        assert seen >= 1
        await asyncio.sleep(10.0)
        assert len(orders) == seen, "nobody is behind, and the lead is asked again"
        return found

    assert play(1, story).counts["commit_void"] == 0


@pytest.mark.parametrize("mode", [HOST_SHADOW, IN_PLACE])
def test_a_rank_that_came_anew_while_the_store_was_away_has_verified_nothing(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its bytes had come before; its mate's come now, and no lane turns. Its new memory has none of them."""
    held = asyncio.Event()
    lender = SimLane._read

    async def read(self: SimLane, now: Any, bucket: Bucket, word: int | None) -> Any:
        while bucket.dst == MATE and not held.is_set():
            await asyncio.sleep(0.05)
        return await lender(self, now, bucket, word)

    async def story(scenario: Scenario) -> Story:
        world = scenario.world
        scenario.build(3, 1, [(1, IN_PLACE)])
        machine = world.machine("n9")
        replica = world.replicas["r0"] = Replica(world, "r0", [machine] * 2, layouts(2, ROWS), mode)
        replica.waits = True
        scenario.start()
        await scenario.assert_i7_converges("at the start")
        monkeypatch.setattr(SimLane, "_read", read)
        world.still = True
        await asyncio.sleep(3.0)
        await publish(scenario)
        await asyncio.sleep(1.5)
        world.etcd.leaderless, since = True, loop().time()
        await again(replica, 0)
        await asyncio.sleep(2.0)
        held.set()
        await asyncio.sleep(2.0)
        world.etcd.elect()
        return await settles(scenario, replica, since)

    assert play(1, story).counts["committed"] >= 1
