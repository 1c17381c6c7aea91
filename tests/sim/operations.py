"""What people and supervisors do: drains, pauses, daemons started again and again, replicas that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from refitd.errors import RefitdError

from .loop import loop

if TYPE_CHECKING:
    from .nemesis import Nemesis
    from .world import Machine, SimDaemon

ASK_SECONDS = 5.0
FLAPS = 7  # more than `job.flaps`, within its window
FLAP_SECONDS = 3.0  # what a daemon is given to join


class Operator:
    """Wants the job paused or not, and asks one daemon after another until the record says so."""

    def __init__(self, nemesis: Nemesis) -> None:
        self.world, self.rng = nemesis.world, nemesis.rng
        self.pauses = 0  # of those who want it paused
        self._task: asyncio.Task[None] | None = None

    def want(self, change: int) -> None:
        self.pauses += change
        if self._task is None:
            self._task = loop().create_task(self._insist(), context=loop().nobody)

    async def _insist(self) -> None:
        while True:
            control = self.world.oracle.view.control
            if (control is not None and control.value.paused) != bool(self.pauses):
                await self._ask()
            await asyncio.sleep(0.2)

    async def _ask(self) -> None:
        daemons = [machine.daemon for machine in self.world.machines.values() if machine.live_daemon]
        mine = [daemon for daemon in daemons if daemon and self.world.job in daemon.jobs]
        if mine:
            daemon = self.rng.choice(mine)
            asked = daemon.process.spawn(self._order(daemon))
            await asyncio.wait([asked], timeout=ASK_SECONDS)
            asked.cancel()

    async def _order(self, daemon: SimDaemon) -> None:
        orders = daemon.orders
        with contextlib.suppress(RefitdError):
            await (orders.pause(self.world.job, "chaos") if self.pauses else orders.resume(self.world.job))


def pause_job(self: Nemesis, lane: str) -> bool:
    """Nothing new begins for a while; what runs ends."""
    self.operator.want(+1)
    self.later(self.rng.uniform(1.0, 12.0), lambda: self.operator.want(-1))
    return True


def drain(self: Nemesis, lane: str) -> bool:
    """A node is to be left out of every lane; its daemon may be anything but dead meanwhile."""
    machine = self.node(lane, lambda m: m.live_daemon)
    if machine is None or machine.daemon is None:
        return False
    daemon = machine.daemon
    daemon.process.call(0, daemon.orders.drain, False)
    self.later(self.rng.uniform(1.0, 15.0), lambda: daemon.process.call(0, daemon.orders.drain, True) and None)
    return True


def flap(self: Nemesis, lane: str) -> bool:
    """A daemon is started again as often as it takes for the leader to park it."""
    machine = self.node(lane, lambda m: m.live_daemon)
    if machine is None:
        return False
    flapping = loop().create_task(_flap(self, machine), context=loop().nobody)

    def end() -> None:
        flapping.cancel()
        machine.start_daemon()

    self.later(FLAPS * (FLAP_SECONDS + 1.0), end)
    return True


async def _flap(self: Nemesis, machine: Machine) -> None:
    view = self.world.oracle.view
    for _ in range(FLAPS):
        if machine.live_daemon and machine.daemon is not None:
            machine.daemon.process.kill()
        before, deadline = view.created_of(f"members/{machine.name}"), loop().time() + FLAP_SECONDS
        await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        machine.start_daemon()
        while view.created_of(f"members/{machine.name}") in (0, before) and loop().time() < deadline:
            await asyncio.sleep(0.1)


def join(self: Nemesis, lane: str) -> bool:
    """A replica comes that was not there before."""
    return self.scenario.join()


def rescale(self: Nemesis, lane: str) -> bool:
    """A replica is deployed anew, in another size."""
    replica = self.world.replicas.get(lane)
    return replica is not None and self.scenario.rescale(replica)


def replace(self: Nemesis, lane: str) -> bool:
    """A replica hangs, and its scheduler starts it anew elsewhere. What hung wakes up later, and stays."""
    replica = self.world.replicas.get(lane)
    hung = self.scenario.replace(replica) if replica else []
    for process in hung:
        self.pause(process, self.rng.uniform(0.5, 15.0))
    return bool(hung)


def leave(self: Nemesis, lane: str) -> bool:
    """A replica goes for good, while others stay."""
    live = [replica for replica in self.world.replicas.values() if not replica.retired]
    if len(live) < 2 or lane not in self.world.replicas or self.world.replicas[lane].retired:
        return False
    replica = self.world.replicas[lane]
    replica.retired = True
    replica.end()
    return True
