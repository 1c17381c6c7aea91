"""A simulated cluster: machines with real daemons on them, their clients, the network, the store, and one clock."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import random
import types
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import structlog

from refitd.config import Config, DataConfig, NodeConfig, StoreConfig
from refitd.daemon.data import digest_of
from refitd.daemon.job import Job
from refitd.daemon.orders import Orders
from refitd.daemon.requests import Requests
from refitd.daemon.secret import Secret
from refitd.epoch.codec import decode
from refitd.errors import TransportError
from refitd.plan import Program

from .client import SimClient
from .engine import Replica
from .etcd import SimEtcd
from .hook import SimHook
from .loop import PROCESS, Condition, Event, Process, RLock, Thread, VirtualLoop, loop
from .memory import SimMemory, identity
from .mover import SimHandle, SimPool
from .net import KERNEL, End, Net, Socket
from .oracle import Oracle, Violation
from .store import SimStore
from .trainer import TrainerGroup

BLOB_SECONDS = 5.0
_programs: dict[bytes, Program] = {}


class NoMetrics:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **fields: None


class Machine:
    """One node: a host on the network, at most one daemon, clients, movers."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.up = True
        self.boot = f"boot-{world.number()}"
        self.daemon: SimDaemon | None = None
        self.clients: dict[str, SimClient] = {}
        self.processes: dict[Process, None] = {}

    @property
    def live_daemon(self) -> bool:
        return self.up and self.daemon is not None and not self.daemon.process.dead

    def start_daemon(self) -> None:
        if self.up and not self.live_daemon:
            self.daemon = SimDaemon(self)

    def crash(self) -> None:
        """Power is gone: nobody says good-bye."""
        self.up = False
        for process in [*self.processes]:
            process.kill()

    def boot_up(self) -> None:
        self.up, self.boot = True, f"boot-{self.world.number()}"
        self.start_daemon()


class SimLimit:
    """Bandwidth has no price here; what is set can be looked at."""

    fd = -1
    rate: int | None = None

    @classmethod
    def create(cls) -> SimLimit:
        return cls()

    def set(self, rate: int | None) -> None:
        self.rate = rate

    def close(self) -> None:
        """As the real one has it."""


class SimDaemon:
    """One life of a daemon: the real jobs and requests, fakes around them."""

    def __init__(self, machine: Machine) -> None:
        world = machine.world
        self.machine, self.world = machine, world
        self.process = Process(f"{machine.name}/daemon#{world.number()}", machine.name)
        machine.processes[self.process] = None
        self.process.on_death.append(self._died)
        self.config = world.config(machine.name)
        self.metrics: Any = NoMetrics()
        self.jobs: dict[str, Job] = {}
        self.store = SimStore(world, machine.name)
        self.pool = SimPool(machine, self.process)
        self.orders = self.process.run(Orders, self)
        self.requests = self.process.run(Requests, self)
        self.hook = SimHook(self)
        world.daemons.append(self)

    def count_connections(self, change: int) -> None:
        """As the real one has it."""

    def job(self, name: str) -> Job:
        if name not in self.jobs:
            store, secret, address = self.world.store_of(self), Secret(b"secret"), f"{self.machine.name}:1"
            self.jobs[name] = Job(name, self.config, store, self.pool, self.metrics, secret, address)  # type: ignore[arg-type]
            self.jobs[name].draining.wanted = self.orders.draining
        return self.jobs[name]

    def find_blob(self, digest: str) -> bytes | None:
        return next((job.blobs[digest] for job in self.jobs.values() if digest in job.blobs), None)

    def take_edge(self, hello: dict[str, Any], end: End) -> None:
        """A data connection was accepted and its first frame read."""
        socket = self.world.socket(end, self.process)
        job = self.jobs.get(hello["job"])
        if job is None:
            socket.close()
        else:
            job.take_edge(hello, socket)  # type: ignore[arg-type]

    async def stop(self) -> None:
        """SIGTERM."""
        self.hook.stop()
        for job in self.jobs.values():
            await job.close()
        await self.pool.close()
        self.store.close()

    def _died(self) -> None:
        self.hook.died()
        self.store.close()
        self.machine.processes.pop(self.process, None)
        for job in self.jobs.values():
            for rank in job.ranks.values():
                rank.close()


class World:
    """Everything, made from one seed."""

    job = "sim"

    def __init__(self, seed: int | str, plants: dict[str, str] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(f"refitd {seed}")
        self.loop = VirtualLoop()
        self._numbers = 0
        self._weights = 0
        self._plants = plants or {}
        self._hash = hashlib.blake2b(digest_size=16)
        self.tail: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=20000)
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.net = Net(self.rng)
        self.etcd = SimEtcd(self.loop.time, self._later)
        self.oracle = Oracle(self)
        self.etcd.on_change.append(self.oracle.changed)
        self.machines: dict[str, Machine] = {}
        self.daemons: list[SimDaemon] = []
        self.groups: list[TrainerGroup] = []
        self.replicas: dict[str, Replica] = {}
        self.clients: dict[str, SimClient] = {}
        self.movers: dict[int, SimHandle] = {}
        self.sockets: dict[int, Socket] = {}
        self.memories: dict[tuple[int, int], SimMemory] = {}
        self._kept: list[SimMemory] = []
        self.store_of: Callable[[SimDaemon], Any] = lambda daemon: daemon.store  # a test may put something before it
        self.bucket_bytes: dict[str, int] = {}  # of nodes that are configured otherwise than the rest
        self.on_death: list[Callable[[SimClient], None]] = []
        self.still = False  # trainers hold their last offer
        self.silent = False  # trainers have not begun to train
        self.mixed_planners = False
        self.spawn_fails = 0.0
        self.bucket_time = (0.0005, 0.01)
        self.late_spans = 0.05  # how many of the changes that a watch tells come late, and those of other spans before
        self.slow_lanes: dict[str, float] = {}  # seconds that reading a bucket takes in these
        self.watch_delay = 0.0  # seconds that the store gathers events for, beside the network's
        self.train_seconds, self.patience = 1.0, 10.0
        self.leisure = 1.0  # how much longer engines take between two answers

    # Small things.

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def new_weights(self) -> int:
        self._weights += 1
        return self._weights

    def bucket_seconds(self, lane: str = "") -> float:
        return self.slow_lanes.get(lane) or self.rng.uniform(*self.bucket_time)

    def plants(self, name: str, host: str) -> bool:
        """Whether a fault was planted on this host, to see it caught."""
        return self._plants.get(name) in (host, "*")

    def say(self, event: str, **facts: Any) -> None:
        """One line of the trace; the trace's hash tells whether two runs were the same."""
        line = (self.loop.now, event, facts)
        self._hash.update(repr(line).encode())
        self.tail.append(line)

    def story(self, last: int = 200) -> str:
        """The end of the trace, a line an event."""
        lines = list(self.tail)[-last:]
        return "\n".join(f"{at:.6f} {event} {facts}" for at, event, facts in lines)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def violate(self, text: str) -> None:
        self.say("violation", text=text)
        self.violations.append(f"{self.loop.now:.3f} {text}")

    def check(self) -> None:
        """Raises Violation for the first that was found."""
        if self.violations:
            raise Violation(f"seed {self.seed}: {self.violations[0]}")
        if self.loop.faults:
            raise Violation(f"seed {self.seed}: I9: {self.loop.faults[0]}")

    def _later(self, seconds: float, callback: Callable[[], None]) -> object:
        return self.loop.call_later(seconds, callback, context=KERNEL)

    @property
    def own_descriptors(self) -> int:
        """Descriptors that stand for clients, which a real daemon would not see."""
        return sum(1 + (memory is memory.owner.memory) for memory in self._kept)

    # Finding things.

    def find_client(self, key: str) -> SimClient | None:
        return self.clients.get(key)

    def remember(self, client: SimClient, memory: SimMemory) -> None:
        self.memories[identity(memory.fd)] = memory
        self._kept.append(memory)
        self.clients[client.key] = client

    def socket(self, end: End, holder: Process) -> Socket:
        socket = Socket(end, -1_000_000 - self.number(), holder)
        self.sockets[socket.number] = socket
        return socket

    def program(self, document: bytes) -> Program:
        if document not in _programs:
            _programs[document] = Program.from_bytes(document)
        return _programs[document]

    # What crosses the network between daemons.

    async def dial(self, host: str, process: Process, peer: str, hello: dict[str, Any]) -> End | None:
        """A connection to a peer's data port whose first frame is ``hello``; None where nobody listens."""
        await self.net.carry(host, peer)
        machine = self.machines[peer]
        if not machine.live_daemon:
            if machine.up:
                await self.net.carry(peer, host)
            else:
                await loop_forever()
            return None
        await self.net.carry(peer, host)
        near, far = self.net.connect((host, process), peer)
        daemon = machine.daemon
        assert daemon is not None
        far.owned_by(daemon.process)
        daemon.process.call(self.net.delay(host, peer), daemon.take_edge, hello, far)
        return near

    async def fetch_blob(self, address: str, secret: str, digest: str) -> bytes:
        """Instead of `refitd.daemon.data.fetch_blob`."""
        import asyncio

        process = PROCESS.get()
        assert process is not None
        peer = address.rpartition(":")[0]
        try:
            async with asyncio.timeout(BLOB_SECONDS):
                await self.net.carry(process.host, peer)
                daemon = self.machines[peer].daemon
                if not self.machines[peer].up:
                    await loop_forever()
                if daemon is None or daemon.process.dead:
                    raise ConnectionRefusedError(peer)
                while daemon.process.paused:
                    await asyncio.sleep(0.1)
                data = daemon.find_blob(digest)
                await self.net.carry(peer, process.host)
        except (TimeoutError, OSError) as error:
            raise TransportError((address, "here"), f"document {digest}: {error!r}") from error
        if data is None:
            raise TransportError((address, "here"), f"document {digest}: EOF")
        assert digest_of(data) == digest
        return data

    # Building.

    def config(self, node: str) -> Config:
        return dataclasses.replace(
            Config(),
            node=NodeConfig(node, node, ""),
            store=StoreConfig(url="etcd://sim"),
            data=DataConfig(bucket_bytes=self.bucket_bytes.get(node, 256)),
        )

    def machine(self, name: str) -> Machine:
        if name not in self.machines:
            self.machines[name] = Machine(self, name)
        return self.machines[name]

    def end(self) -> None:
        """Everything ends at once."""
        for machine in self.machines.values():
            machine.crash()

    def close(self) -> None:
        """Give back what was held; the loop has stopped."""
        for memory in self._kept:
            memory.close()
            memory.page.close()
        self.loop.graveyard.clear()
        self.loop.close()

    @contextlib.contextmanager
    def virtual(self) -> Iterator[None]:
        """Time, chance, threads and the data port of the real code, replaced by ours for a while."""
        threads = types.SimpleNamespace(
            Event=Event, Thread=Thread, Condition=Condition, RLock=RLock, current_thread=lambda: None
        )
        with contextlib.ExitStack() as stack:
            for target, fake in {
                "time.monotonic": self.loop.time,
                "uuid.uuid4": lambda: uuid.UUID(int=self.number()),
                "refitd.daemon.following.threading": threads,
                "refitd.store.keeper.threading": threads,
                "refitd.store.keeper.CHANCE": self.rng,
                "refitd.daemon.job.fetch_blob": self.fetch_blob,
                "refitd.daemon.job.Limit": SimLimit,
                "refitd.daemon.membership.boot_id": self._boot_id,
                "refitd.daemon.job.TICK_SECONDS": 0.25,  # what nothing else wakes may wait a little longer
                "refitd.epoch.view.decode": _decode,  # the same bytes, once for all nodes
            }.items():
                stack.enter_context(mock.patch(target, fake))
            structlog.configure(processors=[self._log], cache_logger_on_first_use=False)
            stack.callback(structlog.reset_defaults)
            yield

    def _boot_id(self) -> str:
        process = PROCESS.get()
        assert process is not None
        return self.machines[process.host].boot

    def _log(self, _logger: Any, method: str, event: dict[str, Any]) -> Any:
        name = event.pop("event")
        if name in ("job_fault", "lane_fault"):
            import traceback

            self.violate(f"I9: {name}: {traceback.format_exc()}")
        self.say(name, **{key: str(value) for key, value in event.items() if key != "exc_info"})
        raise structlog.DropEvent


@functools.lru_cache(maxsize=4096)
def _decode(kind: type, data: bytes, where: str) -> Any:
    return decode(kind, data, where)


async def loop_forever() -> None:
    await loop().create_future()


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
