"""Carries out faults: `begin` does it at once; what it returns undoes it, and waits for what it restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from signal import Signals

from refitd.demo.chaos.book import Mark
from refitd.demo.chaos.brake import Brake
from refitd.demo.chaos.network import MEMBERS, Network
from refitd.demo.chaos.schedule import NODES, Strike
from refitd.demo.chaos.world import RELEASE_SECONDS, World
from refitd.demo.cluster import kill, movers
from refitd.demo.faults import Targets, restart
from refitd.demo.parties import until
from refitd.hook.admin import ask

End = Callable[[], Awaitable[None]]
DRAIN_SECONDS = 20.0
WAKE_SECONDS = 30.0
OLD_STEPS = 1000  # ahead of what anybody else publishes


def send(world: World, number: Signals, targets: Targets) -> End:
    """Signal processes; the end is a new life of each after SIGKILL, and SIGCONT after SIGSTOP."""
    targets.mark(down=True)
    pids = targets.pids()
    for pid in pids:
        kill(pid, number)

    async def end() -> None:
        if number is Signals.SIGKILL:
            await restart(targets, world.scene.cluster, world.revive)
        else:
            for pid in pids:
                kill(pid, Signals.SIGCONT)
            targets.mark(down=False)

    return end


def older_checkpoint(world: World) -> End:
    """Kill all trainers; they come back as a new run that begins some steps before."""
    targets = Targets("all trainers", clients=[client for client in world.scene.clients if client.trains])
    end = send(world, Signals.SIGKILL, targets)
    world.next_run()
    return end


def cut(network: Network, ways: Iterable[tuple[str, str]]) -> End:
    """Cut every one of ``ways`` that the network has a switch for."""
    made = [way for way in ways if network.can_cut(*way)]
    for way in made:
        network.cut(*way)
    return _later(*[partial(network.heal, *way) for way in made])


def both_ways(one: str, other: str) -> list[tuple[str, str]]:
    """Both directions between two of them."""
    return [(one, other), (other, one)]


def old_trainers_wake(world: World) -> End:
    """All trainers stand still while a new run begins in their place; then they wake, publish, and are refused."""
    trainers = world.scene.trainers
    old = [trainer.pid for trainer in trainers]
    for pid in old:
        kill(pid, Signals.SIGSTOP)
    Targets("all trainers", clients=list(trainers)).mark(down=True)
    world.next_run()
    step = world.step + OLD_STEPS

    async def end() -> None:
        await asyncio.gather(*(world.revive(trainer) for trainer in trainers))
        began = world.newest
        led = await world.reaches(lambda: Mark(began.run, began.step + 1), WAKE_SECONDS)
        for pid in old:
            kill(pid, Signals.SIGCONT)
        for trainer in trainers:
            trainer.past.clear()
            trainer.tell_before(do="step", step=step, release=RELEASE_SECONDS, commit=1.0)
        said = await _answers(world, step)
        for pid in old:
            kill(pid, Signals.SIGKILL)
        if led is None or said != ["SKIPPED"] * len(trainers):
            raise AssertionError(f"I3: an old run's publish ended {said}; the new run was {'' if led else 'not '}there")

    return end


async def _answers(world: World, step: int) -> list[str]:
    """What became of the old trainers' publish of ``step``, as far as they say within a while."""

    def outcomes() -> list[str]:
        past = [message for trainer in world.scene.trainers for message in trainer.past]
        return [m["outcome"] for m in past if m["event"] == "released" and m["step"] == step]

    await until(lambda: len(outcomes()) == len(world.scene.trainers), world.scene.changed, WAKE_SECONDS)
    return outcomes()


class Nemesis:
    """One strike on a world."""

    def __init__(self, world: World, strike: Strike) -> None:
        self._world, self.strike = world, strike
        self._scene = world.scene
        self.done = ""  # what was hit, as far as it was decided only then

    def begin(self) -> End:
        """Do it; returns what undoes it."""
        verb, _, rest = self.strike.kind.partition(" ")
        match verb:
            case "kill":
                return self._signal(Signals.SIGKILL, self._targets(rest))
            case "stop":
                return self._signal(Signals.SIGSTOP, self._targets(rest))
            case "older":
                return older_checkpoint(self._world)
            case "old":
                return old_trainers_wake(self._world)
            case "etcd":
                return self._etcd(rest)
            case "drain":
                return self._drain()
        return cut(self._world.network, self._directions())

    # Processes.

    def _targets(self, what: str) -> Targets:
        victim, clients, daemons = self.strike.victim, self._scene.clients, self._scene.cluster.daemons
        if what in ("trainer", "engine"):
            return Targets(victim, clients=[client for client in clients if client.name == victim])
        daemon = daemons[victim]
        if what == "mover":
            mine = movers(daemon)
            return Targets(f"a mover of {victim}", movers=[mine[self.strike.number % len(mine)]] if mine else [])
        if what == "daemon":
            return Targets(f"daemon {victim}", daemons=[daemon])
        return Targets(f"node {victim}", [daemon], [client for client in clients if client.daemon is daemon])

    def _signal(self, number: Signals, targets: Targets) -> End:
        return send(self._world, number, targets)

    # The network.

    def _directions(self) -> list[tuple[str, str]]:
        kind, victim = self.strike.kind, self.strike.victim
        if kind == "two nodes apart":
            return both_ways(*victim.split("|"))
        others = MEMBERS if kind == "node without etcd" else (*NODES, *MEMBERS)
        both = [way for other in others for way in both_ways(victim, other)]
        if kind == "node not heard":
            return both[::2]
        return both[1::2] if kind == "node hears nothing" else both

    # The store.

    def _etcd(self, what: str) -> End:
        etcd = self._world.network.etcd
        if what == "slow disk":
            brake = Brake([etcd.pid(i) for i in range(len(MEMBERS))])
            self.done = brake.name
            return _later(brake.release)
        leader = etcd.leader()
        others = [i for i in range(len(MEMBERS)) if i != leader]
        match what:
            case "leader killed":
                etcd.kill(leader)
                return _later(partial(etcd.restart, leader))
            case "leader stopped":
                etcd.freeze(leader)
                return _later(partial(etcd.thaw, leader))
            case "quorum lost" if self.strike.number % 2:
                for i in others:
                    etcd.kill(i)
                return _later(partial(_restart_all, self._world.network, others))
            case "quorum lost":
                for i in others:
                    etcd.freeze(i)
                return _later(*[partial(etcd.thaw, i) for i in others])
        ways = [way for other in (*NODES, *MEMBERS) for way in both_ways(MEMBERS[leader], other)]
        return cut(self._world.network, ways)

    # Planned.

    def _drain(self) -> End:
        socket = str(self._scene.cluster.daemons[self.strike.victim].socket)
        # In a thread: the daemon may stand at a failpoint, and wait for this loop.
        begun = asyncio.ensure_future(asyncio.to_thread(ask, "drain", socket, cancel=False))

        async def end() -> None:
            deadline = time.monotonic() + DRAIN_SECONDS
            await begun
            while not (await asyncio.to_thread(ask, "drain", socket, cancel=False))["drained"]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"node {self.strike.victim} was not drained within {DRAIN_SECONDS:g} s")
                await asyncio.sleep(0.1)
            await asyncio.to_thread(ask, "drain", socket, cancel=True)

        return end


def _later(*undo: Callable[[], None]) -> End:
    async def end() -> None:
        for step in undo:
            await asyncio.to_thread(step)

    return end


def _restart_all(network: Network, members: list[int]) -> None:
    for i in members:
        network.etcd.restart(i, wait=False)
    network.etcd.wait_healthy(members)
