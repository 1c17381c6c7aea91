"""A job of 1,024 nodes and 64 lanes: what a turn costs the store, what its watches carry, how long a leader thinks."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from refitd.epoch.facts import Facts
from refitd.epoch.holders import Covers
from refitd.epoch.view import View
from refitd.hook.messages import HOST_SHADOW, IN_PLACE

from .scenario import Scenario, run
from .world import World

CONVERGE_SECONDS = 60.0
QUIET_SECONDS = 3.0
LEISURE = 5.0  # a thousand engines that answer all the time are most of what there is to simulate
ASKED = ("get", "list", "txn", "watch")  # keepalives go on whatever happens


@dataclass
class Cost:
    """What the store did for one event of the job."""

    name: str
    writes: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return self.writes.total()


class Meter:
    """Store operations and watch events between two moments."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _now(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        world = self.world
        return (
            Counter(world.etcd.writes),
            Counter({kind: world.counts[kind] for kind in ASKED}),
            Counter(world.etcd.told),
        )

    async def measure(self, name: str, act: Any, settle: Any) -> Cost:
        before, started = self._now(), self.world.loop.now
        act()
        await settle()
        writes, asked, told = (after - first for first, after in zip(before, self._now(), strict=True))
        return Cost(name, writes, asked, told, self.world.loop.now - started)


def hosts(nodes: int, lanes: int) -> tuple[int, list[int]]:
    """Trainer nodes, and the ranks of each lane, one a node."""
    trainers = max(nodes // 64, 2)
    each, more = divmod(nodes - trainers, lanes)
    return trainers, [each + (i < more) for i in range(lanes)]


async def measure(scenario: Scenario, nodes: int, lanes: int) -> dict[str, Any]:
    """Start everything; then kill one mover, one engine rank, and the trainers' run, and count what that costs."""
    world = scenario.world
    world.watch_delay, world.late_spans = 0.05, 0.0
    world.train_seconds, world.patience, world.leisure = 20.0, 60.0, LEISURE
    trainers, sizes = hosts(nodes, lanes)
    scenario.build_wide(trainers, [(size, HOST_SHADOW if i % 4 == 3 else IN_PLACE) for i, size in enumerate(sizes)])
    thinking: list[tuple[float, float]] = []
    with watched_decisions(thinking):
        scenario.start()
        world.still = True
        await scenario.assert_i7_converges("at the start", CONVERGE_SECONDS)
        await until_quiet(world)
        meter = Meter(world)

        async def settled() -> None:
            await asyncio.sleep(1.0)
            await scenario.assert_i7_converges("after a turn", CONVERGE_SECONDS)
            await asyncio.sleep(1.0)

        lane = await meter.measure("one lane's turn", lambda: kill_a_mover(world, "r0"), settled)
        supervisor = asyncio.ensure_future(scenario.supervise())
        job = await meter.measure("the whole job's turn (a new run)", scenario.restart_training, settled)
        supervisor.cancel()
    return {
        "nodes": nodes, "lanes": lanes, "nodes_in_lane": sizes[0] + trainers,
        "writes_per_node_of_the_lane": round(lane.total / (sizes[0] + trainers), 2),
        "writes_per_node_of_the_job": round(job.total / nodes, 2),
        "lane_turn": cost(lane), "job_turn": cost(job),
        "decision_ms_max": milliseconds(max(least for _first, least in thinking)), "decisions": len(thinking),
        "decision_ms_max_once": milliseconds(max(first for first, _least in thinking)),
        "decision_ms_median": milliseconds(statistics.median(least for _first, least in thinking)),
    }  # fmt: skip


async def until_quiet(world: World) -> None:
    """Until nothing was written for a while: leaders tidy up old acks in small bites for seconds after a start."""
    seen = -1
    while seen != world.etcd.revision:
        seen = world.etcd.revision
        await asyncio.sleep(QUIET_SECONDS)


def cost(measured: Cost) -> dict[str, Any]:
    """As it is printed."""
    return {
        "writes": measured.total, "by_kind": dict(sorted(measured.writes.items())),
        "requests": dict(sorted(measured.asked.items())),
        "watch_events": measured.told.total(), "watch_events_of_a_node_max": max(measured.told.values(), default=0),
        "seconds": round(measured.seconds, 2),
    }  # fmt: skip


def kill_a_mover(world: World, replica: str) -> None:
    key = world.replicas[replica].ranks[0].key
    next(handle for handle in world.movers.values() if handle.key == key).kill()


def watched_decisions(thinking: list[tuple[float, float]]) -> Any:
    """Seconds of this processor that each call of the leader's decision takes: as it came, and the least of it and of
    two more on the same picture. A processor that is shared is at times twice as slow, and its clock goes on."""
    from refitd.daemon import leading

    decide = leading.decide

    def took(*args: Any) -> tuple[Any, float]:
        started = time.process_time()
        return decide(*args), time.process_time() - started

    def timed(view: View, facts: Facts, covers: Covers) -> Any:
        copies = view.copy(), view.copy()
        writes, first = took(view, facts, covers)
        thinking.append((first, min(first, *(took(other, facts, covers)[1] for other in copies))))
        return writes

    return mock.patch.object(leading, "decide", timed)


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 1)


def play(seed: int, nodes: int = 1024, lanes: int = 64) -> dict[str, Any]:
    """One seed at this size. Raises Violation."""
    world, started = World(f"scale {seed}"), time.perf_counter()
    found: dict[str, Any] = run(world, lambda scenario: measure(scenario, nodes, lanes))
    return {"seed": seed, **found, "digest": world.digest, "wall_seconds": round(time.perf_counter() - started, 1)}


def report(seeds: list[int], nodes: int = 1024, lanes: int = 64) -> int:
    for seed in seeds:
        print(json.dumps(play(seed, nodes, lanes)), flush=True)
    return 0
