"""Faults: each a few lines, put where a lane is in a chosen state, and undone after a while or when peace comes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from .loop import Process, loop
from .net import ETCD
from .operations import Operator, drain, flap, join, leave, pause_job, replace, rescale
from .trainer import TrainerGroup

if TYPE_CHECKING:
    from .scenario import Scenario
    from .world import Machine

STATES = ("gone", "build", "failed", "idle", "prepare", "transfer", "commit", "committed")
PATIENCE = 6.0  # seconds that a fault waits for a lane in the state that it is meant for
LONG = (12.0, 25.0)  # longer than a lease


class Nemesis:
    """Injects faults into one run and counts the states that it hit."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.world = scenario, scenario.world
        self.rng: random.Random = self.world.rng
        self.hits: Counter[tuple[str, str]] = Counter()
        self.operator = Operator(self)
        self._undo: list[Callable[[], None]] = []
        self._watchers: list[tuple[str, asyncio.Future[str]]] = []
        self.world.etcd.on_change.append(self._changed)

    # Choosing the moment and the victim.

    def _changed(self, _revision: int, _events: object) -> None:
        if not self._watchers:
            return
        lanes = self.world.oracle.lanes()
        for state, future in self._watchers:
            found = [replica for replica, name in lanes.items() if name == state]
            if found and not future.done():
                future.set_result(self.rng.choice(found))

    async def moment(self, state: str) -> str | None:
        """Return a lane as soon as it is in a state; None where none comes to be."""
        future: asyncio.Future[str] = loop().create_future()
        self._watchers.append((state, future))
        self._changed(0, ())
        done, _pending = await asyncio.wait([future], timeout=PATIENCE / 3)
        if not done:
            self.provoke(state)
            done, _pending = await asyncio.wait([future], timeout=PATIENCE)
        self._watchers = [w for w in self._watchers if w[1] is not future]
        if not done:
            return None
        if self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.uniform(0, 0.01))
        return future.result()

    def provoke(self, state: str) -> None:
        """States that a quiet cluster does not come to need a reason."""
        lanes = sorted(self.world.oracle.lanes())
        reason = {"gone": kill_engine, "failed": reset_edge, "build": kill_mover, "idle": join}.get(state)
        if reason is not None and lanes:
            reason(self, self.rng.choice(lanes))

    async def inject(self, state: str, name: str) -> bool:
        """One fault at a lane in a state, or at any lane where none is in it."""
        lane = await self.moment(state)
        lanes = self.world.oracle.lanes()
        if lane is None:
            if not lanes:
                return False
            lane = self.rng.choice(sorted(lanes))
        now = lanes.get(lane, "gone")
        self.world.say("fault", name=name, lane=lane, state=now)
        if not FAULTS[name](self, lane):
            return False
        self.hits[now, name] += 1
        return True

    def peace(self) -> None:
        """All faults end now."""
        undo, self._undo = self._undo, []
        for step in undo:
            step()

    def later(self, seconds: float, undo: Callable[[], None]) -> None:
        """Undo a fault after a while, or when peace comes."""
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                self.world.say("fault_ends")
                undo()

        self._undo.append(once)
        loop().call_later(seconds, once)

    def nodes(self, lane: str) -> list[Machine]:
        """Machines that have to do with a lane."""
        stored = self.world.oracle.view.lanes.get(lane)
        names = set(stored.value.nodes) if stored else set()
        if lane in self.world.replicas:
            names |= {machine.name for machine in self.world.replicas[lane].machines}
        return [self.world.machines[name] for name in sorted(names)]

    def node(self, lane: str, probe: Callable[[Machine], bool]) -> Machine | None:
        found = [machine for machine in self.nodes(lane) if probe(machine)]
        return self.rng.choice(found) if found else None

    def leader(self) -> Machine | None:
        record = self.world.oracle.view.leader
        machine = self.world.machines.get(record.value.node) if record else None
        return machine if machine is not None and machine.live_daemon else None

    def pause(self, process: Process, seconds: float) -> None:
        process.pause()
        self.later(seconds, process.resume)

    def cut(self, pairs: list[tuple[str, str]], seconds: float) -> bool:
        for pair in pairs:
            self.world.net.cut(*pair)
        self.later(seconds, lambda: [self.world.net.heal(*pair) for pair in pairs] and None)
        return True


Fault = Callable[[Nemesis, str], bool]


def kill_mover(self: Nemesis, lane: str) -> bool:
    found = [handle for handle in self.world.movers.values() if handle.mover.machine in self.nodes(lane)]
    if found:
        self.rng.choice(found).kill()
    return bool(found)


def pause_mover(self: Nemesis, lane: str) -> bool:
    found = [handle for handle in self.world.movers.values() if handle.mover.machine in self.nodes(lane)]
    if found:
        self.pause(self.rng.choice(found).process, self.rng.uniform(0.5, 6.0))
    return bool(found)


def kill_engine(self: Nemesis, lane: str) -> bool:
    replica = self.world.replicas.get(lane)
    ranks = [engine for engine in replica.ranks.values() if not engine.process.dead] if replica else []
    if ranks:
        self.rng.choice(ranks).process.kill()
    return bool(ranks)


def pause_engine(self: Nemesis, lane: str) -> bool:
    replica = self.world.replicas.get(lane)
    ranks = [engine for engine in replica.ranks.values() if not engine.process.dead] if replica else []
    if ranks:
        self.pause(self.rng.choice(ranks).process, self.rng.uniform(0.5, 15.0))
    return bool(ranks)


def _trainers(self: Nemesis) -> list[Process]:
    group = self.world.groups[-1]
    return [trainer.process for trainer in group.ranks.values() if not trainer.process.dead]


def kill_trainer(self: Nemesis, lane: str) -> bool:
    found = _trainers(self)
    if found:
        self.rng.choice(found).kill()
    return bool(found)


def pause_trainer(self: Nemesis, lane: str) -> bool:
    found = _trainers(self)
    if found:
        self.pause(self.rng.choice(found), self.rng.uniform(0.5, 10.0))
    return bool(found)


def new_run(self: Nemesis, lane: str) -> bool:
    """The trainers begin anew from an older checkpoint."""
    self.scenario.restart_training()
    return True


def old_run(self: Nemesis, lane: str) -> bool:
    """A rank of a run that is past comes back and offers: nobody may listen. Of one that nobody has ever met, nobody
    can know that it is the older one."""
    generation = self.world.oracle.view.generation
    known = generation.value.past if generation else ()
    past = [group for group in self.world.groups[:-1] if group.over and group.run in known]
    if not past:
        return new_run(self, lane)
    group: TrainerGroup = self.rng.choice(past)
    group.over = False
    for rank in range(group.world_size):
        group.start(rank)
    self.later(self.rng.uniform(3.0, 8.0), group.end)
    return True


def kill_daemon(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.live_daemon)
    if machine is None or machine.daemon is None:
        return False
    machine.daemon.process.kill()
    self.later(self.rng.choice([0.3, 2.0, 5.0, 14.0]) * self.rng.uniform(0.5, 1.5), machine.start_daemon)
    return True


def pause_daemon(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.live_daemon)
    if machine is not None and machine.daemon is not None:
        self.pause(machine.daemon.process, self.rng.uniform(0.3, 6.0))
    return machine is not None


def pause_daemon_past_lease(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.live_daemon)
    if machine is not None and machine.daemon is not None:
        self.pause(machine.daemon.process, self.rng.uniform(*LONG))
    return machine is not None


def pause_node(self: Nemesis, lane: str) -> bool:
    """Everything on it stands still, longer than its lease."""
    machine = self.node(lane, lambda m: m.up)
    if machine is None:
        return False
    stopped = list(machine.processes)
    for process in stopped:
        process.pause()
    self.later(self.rng.uniform(*LONG), lambda: [process.resume() for process in stopped] and None)
    return True


def kill_node(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.up)
    if machine is None:
        return False
    machine.crash()
    self.later(self.rng.uniform(3.0, 20.0), machine.boot_up)
    return True


def kill_leader(self: Nemesis, lane: str) -> bool:
    machine = self.leader()
    if machine is None or machine.daemon is None:
        return False
    machine.daemon.process.kill()
    self.later(self.rng.uniform(0.3, 14.0), machine.start_daemon)
    return True


def pause_leader(self: Nemesis, lane: str) -> bool:
    """It wakes, and believes that it leads."""
    machine = self.leader()
    if machine is not None and machine.daemon is not None:
        self.pause(machine.daemon.process, self.rng.uniform(*LONG))
    return machine is not None


def partition_node(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.up)
    if machine is None:
        return False
    others = [name for name in (*self.world.machines, ETCD) if name != machine.name]
    pairs = [pair for other in others for pair in ((machine.name, other), (other, machine.name))]
    return self.cut(pairs, self.rng.choice([2.0, 8.0, 20.0]))


def partition_halves(self: Nemesis, lane: str) -> bool:
    """Half of the machines cannot reach the other half; all of them reach the store."""
    names = sorted(self.world.machines)
    left = set(self.rng.sample(names, len(names) // 2))
    pairs = [(a, b) for a in names for b in names if (a in left) != (b in left)]
    return self.cut(pairs, self.rng.choice([2.0, 8.0, 20.0]))


def cut_store(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.up)
    if machine is None:
        return False
    return self.cut([(machine.name, ETCD), (ETCD, machine.name)], self.rng.choice([1.0, 4.0, 15.0]))


def cut_store_answers(self: Nemesis, lane: str) -> bool:
    """Requests arrive; answers and watches do not: every outcome is unknown."""
    machine = self.node(lane, lambda m: m.up)
    return machine is not None and self.cut([(ETCD, machine.name)], self.rng.choice([1.0, 4.0, 15.0]))


def cut_edge(self: Nemesis, lane: str) -> bool:
    """Two machines of a lane do not reach each other."""
    nodes = [machine.name for machine in self.nodes(lane)]
    if len(nodes) < 2:
        return False
    a, b = self.rng.sample(nodes, 2)
    return self.cut([(a, b), (b, a)], self.rng.choice([1.0, 5.0, 15.0]))


def cut_one_way(self: Nemesis, lane: str) -> bool:
    nodes = [machine.name for machine in self.nodes(lane)]
    if len(nodes) < 2:
        return False
    a, b = self.rng.sample(nodes, 2)
    return self.cut([(a, b)], self.rng.choice([1.0, 5.0, 15.0]))


def reset_edge(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.up)
    return machine is not None and self.world.net.reset(self.rng, machine.name)


def lossy(self: Nemesis, lane: str) -> bool:
    self.world.net.loss = self.rng.uniform(0.05, 0.3)
    self.later(self.rng.uniform(2.0, 10.0), lambda: setattr(self.world.net, "loss", 0.0))
    return True


def slow_node(self: Nemesis, lane: str) -> bool:
    machine = self.node(lane, lambda m: m.up)
    if machine is None:
        return False
    self.world.net.slow[machine.name] = self.rng.uniform(0.05, 0.5)
    self.later(self.rng.uniform(2.0, 10.0), lambda: self.world.net.slow.pop(machine.name, None) and None)
    return True


def slow_store(self: Nemesis, lane: str) -> bool:
    self.world.net.slow[ETCD] = self.rng.uniform(0.05, 1.2)
    self.later(self.rng.uniform(2.0, 10.0), lambda: self.world.net.slow.pop(ETCD, None) and None)
    return True


def _leaderless(self: Nemesis, seconds: float) -> bool:
    self.world.etcd.leaderless = True
    self.later(seconds, self.world.etcd.elect)
    return True


def store_leader(self: Nemesis, lane: str) -> bool:
    """etcd elects another leader."""
    return _leaderless(self, self.rng.uniform(0.5, 2.5))


def store_quorum(self: Nemesis, lane: str) -> bool:
    """etcd has lost its quorum for a while."""
    return _leaderless(self, self.rng.uniform(8.0, 30.0))


def compact(self: Nemesis, lane: str) -> bool:
    """A daemon's watch lags while the history goes: it must begin anew."""
    machine = self.node(lane, lambda m: m.up)
    if machine is None:
        return False
    seconds = self.rng.uniform(0.5, 4.0)
    loop().call_later(seconds * 0.9, lambda: self.world.etcd.compact(self.world.etcd.revision))
    return self.cut([(ETCD, machine.name)], seconds)


def release(self: Nemesis, lane: str) -> bool:
    """An engine wants its memory for itself: it lets go of it, and of what it was receiving."""
    replica = self.world.replicas.get(lane)
    ranks = [engine for engine in replica.ranks.values() if engine.ready] if replica else []
    if ranks:
        engine = self.rng.choice(ranks)
        engine.process.spawn(engine.quietly_release())
    return bool(ranks)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_mover, pause_mover, kill_engine, pause_engine, kill_trainer, pause_trainer, new_run, old_run,
        kill_daemon, pause_daemon, pause_daemon_past_lease, pause_node, kill_node, kill_leader, pause_leader,
        partition_node, partition_halves, cut_store, cut_store_answers, cut_edge, cut_one_way, reset_edge,
        lossy, slow_node, slow_store, store_leader, store_quorum, compact, join, leave, rescale, replace, release,
        drain, pause_job, flap,
    )
}  # fmt: skip
CELLS = [(state, name) for name in FAULTS for state in STATES]
