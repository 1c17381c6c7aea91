"""What happens in a run: a cluster of a seed's own shape, faults for a while, then peace, and the end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from refitd.hook.messages import HOST_SHADOW, IN_PLACE
from refitd.layout import Layout
from refitd.testing import split_layout

from .engine import Replica, SimEngine
from .loop import Process, loop
from .nemesis import Nemesis
from .oracle import Violation
from .trainer import TrainerGroup
from .world import Machine, World

Model = dict[str, tuple[tuple[int, ...], str]]
WIDE: Model = {"a": ((64, 2), "int64"), "b": ((64,), "int64")}
MODEL: Model = {"a": ((8, 6), "int64"), "b": ((12,), "int64"), "c": ((6, 8), "int64")}
ROWS, COLUMNS, STAGES, TWICE = range(4)
CONVERGE_SECONDS = 60.0
SETTLE_SECONDS, CALM_SECONDS, CALM_TURNS = 15.0, 10.0, 3


def layouts(world_size: int, cut: int, model: Model = MODEL) -> list[Layout]:
    """One rank's layout each, cut in one of four ways; by `COLUMNS` the bias is cut along its only axis."""
    return [_CUTS[cut](rank, world_size, model) for rank in range(world_size)]


def some_cut(rng: random.Random) -> int:
    """How a side is cut: rarer ways are what frameworks mix them with."""
    return rng.choices([ROWS, COLUMNS, STAGES, TWICE], [4, 3, 3, 3])[0]


def _rows(rank: int, world_size: int, model: Model) -> Layout:
    return split_layout(model, rank, world_size, 0)


def _stages(rank: int, world_size: int, model: Model) -> Layout:
    """Pipeline stages: a rank knows nothing of the tensors of other stages. The ranks of one stage cut its rows."""
    names, stages = sorted(model), min(world_size, len(model))
    mates = [other for other in range(world_size) if other % stages == rank % stages]
    own = {name: model[name] for name in names if names.index(name) % stages == rank % stages}
    return split_layout(own, mates.index(rank), len(mates), 0)


def _columns(rank: int, world_size: int, model: Model) -> Layout:
    from refitd.layout.box import Box, Piece

    storages, pieces = {}, []
    for name, (shape, dtype) in model.items():
        axis = len(shape) - 1
        step = -(-shape[axis] // world_size)
        low, high = min(rank * step, shape[axis]), min((rank + 1) * step, shape[axis])
        box = Box((*([0] * axis), low), (*shape[:axis], high))
        storages[name] = (box.volume, dtype)
        if box.volume:
            strides = (high - low, 1) if axis else (1,)
            pieces.append(Piece(name, box, name, 0, strides))
    described = {name: (tuple(shape), dtype) for name, (shape, dtype) in model.items()}
    return Layout.from_pieces(described, storages, pieces)


def _twice(rank: int, world_size: int, model: Model) -> Layout:
    """Rows among half of the ranks, and the same among the others: some may die, and nothing is lost."""
    parts = -(-world_size // 2)
    return split_layout(model, rank % parts, parts, 0)


_CUTS = {ROWS: _rows, COLUMNS: _columns, STAGES: _stages, TWICE: _twice}


class Scenario:
    """One seed's run."""

    def __init__(self, world: World) -> None:
        self.world, self.model = world, MODEL

    def build(self, nodes: int, trainers: int, replicas: list[tuple[int, str]]) -> None:
        """``trainers`` ranks on the first nodes; replicas of (ranks, mode) on the others, in turn."""
        world = self.world
        names = [f"n{i}" for i in range(nodes)]
        machines = [world.machine(name) for name in names]
        homes = min(trainers, max(1, nodes // 3))
        self.trainer_machines = [machines[rank % homes] for rank in range(trainers)]
        others = machines[homes:] or machines
        place = 0
        for i, (ranks, mode) in enumerate(replicas):
            spread = world.rng.random() < 0.5
            hosts = [others[(place + (rank if spread else 0)) % len(others)] for rank in range(ranks)]
            place += ranks if spread else 1
            name = f"r{i}"
            world.replicas[name] = Replica(world, name, hosts, layouts(ranks, some_cut(world.rng)), mode)

    def build_wide(self, trainers: int, replicas: list[tuple[int, str]]) -> None:
        """Each rank on a node of its own."""
        world, numbers = self.world, itertools.count()
        machines = (world.machine(f"n{next(numbers):04}") for _ in itertools.count())
        self.model = WIDE
        self.trainer_machines = [next(machines) for _ in range(trainers)]
        for i, (ranks, mode) in enumerate(replicas):
            hosts = [next(machines) for _ in range(ranks)]
            world.replicas[f"r{i}"] = Replica(world, f"r{i}", hosts, layouts(ranks, 0, WIDE), mode)

    def start(self) -> None:
        world = self.world
        for machine in world.machines.values():
            loop().call_later(world.rng.uniform(0, 0.2), machine.start_daemon)
        self.new_run(0)
        for replica in world.replicas.values():
            for rank in range(replica.world_size):
                loop().call_later(world.rng.uniform(0, 1.0), replica.start, rank)

    def new_run(self, step: int) -> TrainerGroup:
        world = self.world
        machines, cut = self.trainer_machines, ROWS
        if self.model is MODEL:  # each run is cut anew, and may have lost or gained a rank
            rng = random.Random(f"run {world.seed} {len(world.groups)}")
            cut, machines = some_cut(rng), rng.choice([machines, machines, machines[:-1] or machines, machines * 2])
        group = TrainerGroup(world, f"run{len(world.groups)}", machines, layouts(len(machines), cut, self.model), step)
        world.groups.append(group)
        for rank in range(len(machines)):
            loop().call_later(world.rng.uniform(0, 0.5), group.start, rank)
        return group

    def join(self) -> bool:
        """A new replica, on machines that are up."""
        world = self.world
        up = [machine for machine in world.machines.values() if machine.up]
        if len(world.replicas) >= 8 or not up:
            return False
        ranks, mode = some_modes(world, 1)[0]
        name = f"r{len(world.replicas)}"
        hosts = [world.rng.choice(up) for _ in range(ranks)]
        world.replicas[name] = Replica(world, name, hosts, layouts(ranks, some_cut(world.rng)), mode)
        return True

    def rescale(self, replica: Replica) -> bool:
        """Its processes end, and others will come: another number of ranks, on machines that are up, cut anew."""
        rng, up = self.world.rng, self._free(replica, replica.ranks.values())
        if replica.retired or not up:
            return False
        replica.end()
        hosts = [rng.choice(up) for _ in range(rng.choice([1, 2, 3]))]
        replica.become(hosts, layouts(len(hosts), some_cut(rng)))
        return True

    def replace(self, replica: Replica) -> list[Process]:
        """Others will come in its place while its processes, which are given, are still there."""
        rng, up = self.world.rng, self._free(replica, ())
        if replica.retired or not up:
            return []
        hosts = [rng.choice(up) for _ in range(rng.choice([1, 2, 3]))]
        left = replica.leave_behind()
        replica.become(hosts, layouts(len(hosts), some_cut(rng)))
        return [engine.process for engine in left.ranks.values() if not engine.process.dead]

    def _free(self, replica: Replica, leaving: Iterable[SimEngine]) -> list[Machine]:
        """Machines that are up, and on which no process holds a rank of the replica but those that leave."""
        taken = {
            client.machine
            for machine in self.world.machines.values()
            for client in machine.clients.values()
            if (client.side, client.group) == ("engine", replica.name) and client not in leaving
        }
        return [machine for machine in self.world.machines.values() if machine.up and machine not in taken]

    def restart_training(self) -> None:
        """The run ends; the next one begins from an older checkpoint, as soon as its machines are up."""
        group = self.world.groups[-1]
        group.end()
        self.new_run(max(group.step - self.world.rng.randrange(4), 0))

    async def supervise(self) -> None:
        """What a job's scheduler does: processes that ended are started again."""
        world, rng = self.world, self.world.rng
        while True:
            await asyncio.sleep(0.1)
            group = world.groups[-1]
            if not group.alive() and rng.random() < 0.1:
                if all(rank in group.ranks for rank in range(group.world_size)) and rng.random() < 0.4:
                    self.restart_training()
                else:
                    for rank in range(group.world_size):
                        if rank not in group.ranks or group.ranks[rank].process.dead:
                            group.start(rank)
            for replica in world.replicas.values():
                if not replica.retired:
                    self._revive(replica)

    def _revive(self, replica: Replica) -> None:
        """One rank's death is the replica's: the others end too, and all of them begin anew, or they wait for it."""
        rng = self.world.rng
        dead = [engine for engine in replica.ranks.values() if engine.process.dead]
        missing = len(replica.ranks) < replica.world_size
        if replica.waits and not missing:
            for engine in dead:
                if rng.random() < 0.1:
                    replica.start(engine.rank)
        elif dead and len(dead) < len(replica.ranks) and rng.random() < 0.3:
            replica.end()
        elif (missing or len(dead) == len(replica.ranks)) and rng.random() < 0.1:
            for rank in range(replica.world_size):
                replica.start(rank)

    def missing(self) -> list[str]:
        """Who should be there and is not."""
        world = self.world
        found = [machine.name for machine in world.machines.values() if not machine.live_daemon]
        found += [] if world.groups[-1].alive() else [world.groups[-1].run]
        return found + [r.name for r in world.replicas.values() if not (r.retired or r.whole())]

    def all_up(self) -> bool:
        return not self.missing()

    async def until(self, probe: Callable[[], bool], seconds: float) -> bool:
        deadline = loop().time() + seconds
        while not probe():
            self.world.check()
            if loop().time() >= deadline:
                return False
            await asyncio.sleep(0.05)
        self.world.check()
        return True

    async def assert_i7_converges(self, when: str, seconds: float = CONVERGE_SECONDS) -> float:
        """All live replicas reach the newest publication; how long that took."""
        world, started = self.world, loop().time()

        def converged() -> bool:
            return world.oracle.newest() is not None and not world.oracle.lagging()

        if not await self.until(converged, seconds):
            late = f"{when}: not within {seconds:g} s: {world.oracle.lagging()}; {world.oracle.why()}"
            raise Violation(f"seed {world.seed}: I7: {late}")
        return loop().time() - started

    async def assert_calm(self) -> None:
        """A rank of each replica comes anew, and nothing new is published, which would end what goes in a circle."""
        world, rng = self.world, random.Random(f"calm {self.world.seed}")
        world.still = True
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        for replica in world.replicas.values():
            if replica.ranks:
                rng.choice(sorted(replica.ranks.values(), key=lambda engine: engine.rank)).process.kill()
        await asyncio.sleep(SETTLE_SECONDS)
        before = Counter(world.oracle.turns_of)
        await asyncio.sleep(CALM_SECONDS)
        restless = {replica: turns for replica, turns in (world.oracle.turns_of - before).items() if turns > CALM_TURNS}
        if restless:
            raise Violation(f"seed {world.seed}: calm: lanes turn again and again: {restless}; {world.oracle.why()}")
        world.still = False


def run(world: World, body: Callable[[Scenario], Any]) -> Any:
    """Run a scenario in virtual time. Raises Violation."""

    async def whole() -> Any:
        try:
            return await body(Scenario(world))
        finally:
            world.end()

    gc.disable()
    try:
        with world.virtual():
            return world.loop.run_until_complete(whole())
    finally:
        world.close()
        gc.enable()


def some_modes(world: World, count: int) -> list[tuple[int, str]]:
    """(ranks, mode) of so many replicas."""
    rng = world.rng
    return [(rng.choice([1, 1, 2, 2, 3]), rng.choice([IN_PLACE, IN_PLACE, HOST_SHADOW])) for _ in range(count)]


async def chaos(scenario: Scenario, cells: list[tuple[str, str]]) -> Nemesis:
    """A cluster, faults at the given states, peace, convergence, the end."""
    world, rng = scenario.world, scenario.world.rng
    nodes = rng.choice([3, 3, 4, 4, 5, 6, 8, 12, 16])
    world.bucket_time = rng.choice([(0.0005, 0.01), (0.0005, 0.01), (0.02, 0.1), (0.1, 0.5)])
    world.train_seconds, world.patience = rng.choice([0.3, 1.0, 3.0]), rng.choice([5.0, 30.0])
    if world.bucket_time[1] < 0.05 and rng.random() < 0.2:
        world.patience = 1.0
    scenario.build(nodes, rng.choice([1, 2, 2, 4]), some_modes(world, rng.randint(1, max(1, min(nodes - 1, 4)))))
    idle = [cell for cell in cells if cell[0] == "idle"]
    world.silent = bool(idle)
    scenario.start()
    supervisor = asyncio.ensure_future(scenario.supervise())
    nemesis = Nemesis(scenario)
    if not idle and rng.random() < 0.8:
        await scenario.assert_i7_converges("at the start")
    for state, name in sorted(cells, key=lambda cell: cell[0] != "idle"):  # before anything is published
        world.silent = state == "idle"
        await nemesis.inject(state, name)
        await asyncio.sleep(rng.choice([0.0, 0.2, 1.0, 4.0]) * rng.random())
        world.check()
    world.silent = False
    await asyncio.sleep(rng.uniform(0, 5))
    nemesis.peace()
    world.say("peace")
    if not await scenario.until(scenario.all_up, 30.0):
        raise Violation(f"seed {world.seed}: the scheduler did not bring everybody up: {scenario.missing()}")
    if random.Random(f"calm {world.seed}").random() < 0.3:
        await scenario.assert_calm()
    world.seconds["recovery"] = await scenario.assert_i7_converges("after the faults")
    await asyncio.sleep(2.0)
    await scenario.until(world.oracle.reached, 5.0)
    world.oracle.assert_nothing_lost()
    world.check()
    supervisor.cancel()
    return nemesis
