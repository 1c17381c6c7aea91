"""Simulated movers: a pool, the daemon's handle of each, and a process that carries out the real commands.

They follow refitd/mover: lanes by token, rounds by attempt, loan words re-read after each bucket, no bucket without a
trailer. What they move are the real buckets of the real programs, over small arrays whose elements say what they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from refitd.errors import ProtocolError, TransportError
from refitd.hook.memfd import read_document

from .lane import NOTHING, SimLane
from .loop import TICK, Process, loop
from .memory import Mount, identity
from .net import End

if TYPE_CHECKING:
    from .world import Machine

Message = dict[str, Any]


class SimPool:
    """`MoverPool` of one daemon."""

    def __init__(self, machine: Machine, daemon: Process) -> None:
        self._machine, self._daemon = machine, daemon
        self._lives: dict[str, int] = {}
        self.handles: dict[SimHandle, None] = {}

    async def spawn(
        self, key: str, on_message: Callable[..., None], on_exit: Callable[..., None], host: None = None
    ) -> SimHandle:
        assert host is None, "clients of the simulation have no threads"
        world = self._machine.world
        await asyncio.sleep(world.rng.uniform(0.005, 0.05))
        if world.rng.random() < world.spawn_fails:
            raise TransportError(("daemon", key), "the fork server did not fork")
        self._lives[key] = self._lives.get(key, 0) + 1

        def exited(handle: SimHandle) -> None:
            self.handles.pop(handle, None)
            on_exit(handle)

        handle = SimHandle(self._machine, self._daemon, key, self._lives[key], on_message, exited)
        self.handles[handle] = None
        return handle

    async def close(self) -> None:
        for handle in list(self.handles):
            handle.kill()
        for handle in list(self.handles):
            await handle.gone()


class SimHandle:
    """The daemon's end of one mover."""

    in_client = stuck = False

    def __init__(
        self, machine: Machine, daemon: Process, key: str, life: int,
        on_message: Callable[..., None], on_exit: Callable[..., None],
    ) -> None:  # fmt: skip
        world = machine.world
        self.key, self.life, self.pid = key, life, world.number()
        self.pidfd = -self.pid  # looked up in `World.movers` by whoever is given it
        self._world, self._daemon = world, daemon
        self._on_message, self._on_exit = on_message, on_exit
        self._gone: asyncio.Future[None] = loop().create_future()
        self.process = Process(f"{machine.name}/mover/{key}#{self.pid}", machine.name)
        self.mover = SimMover(machine, self, key)
        world.movers[self.pidfd] = self
        machine.processes[self.process] = None
        self.process.on_death.append(self._died)
        daemon.on_death.append(self.kill)
        self._there_at = self._back_at = 0.0

    @property
    def alive(self) -> bool:
        return not self._gone.done()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Descriptors are read here and now, as if they had been duplicated."""
        if not self.alive:
            return
        if message["kind"] in ("limit", "stand_by"):
            return  # bandwidth has no price here, and nothing has to wake
        read = {"mount": self._memory, "edge": self._connection}.get(message["kind"], _document)
        things = [read(fd) for fd in fds]
        self._there_at = max(self._there_at + TICK, loop().time() + self._world.rng.uniform(0.0001, 0.002))
        loop().call_at(self._there_at, self.mover.handle, dict(message), things, context=self.process.context)

    def _memory(self, fd: int) -> Any:
        """A rank's memory, or None for its page, which the memory knows."""
        return self._world.memories.get(identity(fd))

    def _connection(self, fd: int) -> Any:
        socket = self._world.sockets.pop(fd)
        socket.passed = True
        socket.end.owned_by(self.process)
        return socket.end

    def report(self, message: Message) -> None:
        """From the mover: to the daemon, in order."""
        self._back_at = max(self._back_at + TICK, loop().time() + self._world.rng.uniform(0.0001, 0.002))
        loop().call_at(self._back_at, self._heard, message, context=self._daemon.context)

    def _heard(self, message: Message) -> None:
        if self.alive:
            self._on_message(self, message, [])

    def alive_within(self, seconds: float) -> bool:
        """Whether it answers pings; a daemon that was away itself gives it a while."""
        process, now = self.process, loop().time()
        if now - self._daemon.resumed_at < 1.0 or process.paused_at is None:
            return self.alive
        return self.alive and now - process.paused_at <= seconds

    def kill(self) -> None:
        if not self.process.dead:
            self.process.kill()

    async def gone(self) -> None:
        await asyncio.shield(self._gone)

    def _died(self) -> None:
        """The kernel tells: first whoever holds the pidfd, then the daemon."""
        self.mover.end()
        self.mover.machine.processes.pop(self.process, None)
        self._world.movers.pop(self.pidfd, None)
        # What it said before it died still counts: the exit is noticed after it.
        at = max(self._back_at + TICK, loop().time() + self._world.rng.uniform(0.0001, 0.001))
        loop().call_at(at, self._exited, context=self._daemon.context)

    def _exited(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
            self._on_exit(self)


class SimMover:
    """The mover process: commands in, reports out."""

    def __init__(self, machine: Machine, handle: SimHandle, key: str) -> None:
        self.machine, self.world, self.key = machine, machine.world, key
        self.handle_of = handle
        self.mounts: dict[str, Mount] = {}
        self.lanes: dict[str, SimLane] = {}
        self.store_away = False
        self._revoked: dict[str, int] = {}
        self._early: dict[tuple[str, int], list[tuple[str, End]]] = {}

    @property
    def process(self) -> Process:
        return self.handle_of.process

    def report(self, kind: str, **fields: Any) -> None:
        self.handle_of.report({"kind": kind, **fields})

    def handle(self, message: Message, things: list[Any]) -> None:
        getattr(self, "_" + message["kind"])(message, things)

    def end(self) -> None:
        """The process is gone; nothing reads or writes for it."""
        for lane in self.lanes.values():
            lane.stop()
        self.mounts.clear()

    # Commands.

    def _mount(self, message: Message, things: list[Any]) -> None:
        memory = things[0] if len(things) > 1 else None
        if memory is None:
            self.report("failed", memory=message["memory"], reason="nothing to map")
            return
        self.mounts[message["memory"]] = Mount(memory, message["word_index"], message["writable"])
        self.report("mounted", memory=message["memory"])

    def _unmount(self, message: Message, _things: list[Any]) -> None:
        self.mounts.pop(message["memory"], None)
        self.report("unmounted", memory=message["memory"])

    def _build(self, message: Message, things: list[Any]) -> None:
        name, token = message["lane"], message["token"]
        current = self.lanes.get(name)
        if self._is_stale(message) or (current is not None and current.token >= token):
            self._refuse(message, "stale token")
            return
        if current is not None:
            current.stop()
            self._revoked[name] = max(current.token, self._revoked.get(name, 0))
        self.lanes[name] = lane = SimLane(self, message, self.world.program(things[0]))
        lane.start()
        for src, end in self._early.pop((name, token), ()):
            lane.attach(src, end)
        self._drop_early(lambda key: key[0] == name and key[1] < token)

    def _edge(self, message: Message, things: list[Any]) -> None:
        name, token = message["lane"], message["token"]
        lane = self.lanes.get(name)
        if lane is not None and lane.token == token:
            lane.attach(message["src"], things[0])
        elif self._is_stale(message) or (lane is not None and lane.token > token):
            things[0].close()
        else:
            self._early.setdefault((name, token), []).append((message["src"], things[0]))

    def _run(self, message: Message, things: list[Any]) -> None:
        lane = self._current(message)
        if lane is not None:
            lane.run(message, self.world.program(things[0]) if things else None)

    def _ready(self, message: Message, _things: list[Any]) -> None:
        lane = self._current(message)
        if lane is not None:
            lane.ready(message["attempt"], message["src"], message["word"])

    def _revoke(self, message: Message, _things: list[Any]) -> None:
        name, token = message["lane"], message["token"]
        if self.world.plants("ignore-revoke", self.machine.name):
            self.lanes.pop(name, None)  # it goes on, and nobody knows it any more
            self.report("revoked", lane=name, token=token, **NOTHING)
            return
        self._revoked[name] = max(token, self._revoked.get(name, 0))
        state: Message = dict(NOTHING)
        if (lane := self.lanes.get(name)) is not None and lane.token <= token:
            state = self.lanes.pop(name).stop()
        self._drop_early(lambda key: key[0] == name and key[1] <= token)
        self.report("revoked", lane=name, token=token, **state)

    def _store(self, message: Message, _things: list[Any]) -> None:
        self.store_away = message["away"]

    def _limit(self, _message: Message, _things: list[Any]) -> None:
        """The job's rate, in a page that the daemon writes: buckets here take as long as the world says."""

    # Helpers.

    def _current(self, message: Message) -> SimLane | None:
        lane = self.lanes.get(message["lane"])
        if lane is not None and lane.token == message["token"]:
            return lane
        stale = self._is_stale(message) or (lane is not None and lane.token > message["token"])
        self._refuse(message, "stale token" if stale else "lane is not built")
        return None

    def _is_stale(self, message: Message) -> bool:
        return bool(message["token"] <= self._revoked.get(message["lane"], -1))

    def _refuse(self, message: Message, reason: str) -> None:
        known = {name: message[name] for name in ("lane", "token")}
        self.report("failed", **known, attempt=message.get("attempt", 0), edge=None, reason=reason, verified=[])

    def _drop_early(self, chosen: Callable[[tuple[str, int]], bool]) -> None:
        for key in [key for key in self._early if chosen(key)]:
            for _src, end in self._early.pop(key):
                end.close()


def _document(fd: int) -> bytes | None:
    """The bytes of a sealed document; None for shared memory that is none."""
    try:
        return read_document(fd)
    except ProtocolError:
        return None
