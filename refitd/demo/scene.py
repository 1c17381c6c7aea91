"""The parties of the demo: who runs where, how a process of each kind begins, and how all of them end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from refitd.demo import engine, trainer
from refitd.demo.cluster import NODES, TRAINER_NODES, Cluster, Wiring, tail
from refitd.demo.faults import FailpointServer
from refitd.demo.ledger import Ledger
from refitd.demo.nursery import Body, Nursery, Options
from refitd.demo.parties import Client, Engine, Replica, Trainer, until
from refitd.demo.shards import TENSOR_PARALLEL, TRAINERS_PER_NODE
from refitd.demo.weights import Spec, Weights
from refitd.errors import RefitdError
from refitd.hook.wire import Connection, Message

T = TypeVar("T", bound=Client)

JOB = "demo"
START_SECONDS = 60.0


class Seat(NamedTuple):
    """Where an engine rank runs, and how it takes new weights."""

    replica: str
    rank: int
    node: str
    mode: str


ENGINES = (
    Seat("r0", 0, "c", "in_place"),
    Seat("r0", 1, "c", "in_place"),
    Seat("r1", 0, "c", "host_shadow"),
    Seat("r1", 1, "d", "host_shadow"),
)


def client_body(spec: Spec, weights: Weights, ids: Any) -> Body:
    """What the nursery runs in each child."""

    def body(options: Options, connection: Connection) -> None:
        if options["failpoints"]:
            os.environ["REFITD_FAILPOINTS"] = options["failpoints"]
        if options["role"] == "trainer":
            trainer.run(options, connection, spec, weights, ids)
        else:
            engine.run(options, connection, spec)

    return body


class Scene:
    """Cluster, clients and replicas. ``changed`` is set whenever any of them was heard of."""

    def __init__(
        self,
        folder: Path,
        nursery: Nursery,
        ledger: Ledger,
        point: Callable[[dict[str, Any]], str] | None,
        seats: Sequence[Seat] = ENGINES,
        wiring: Wiring | None = None,
    ) -> None:
        self.folder, self._nursery, self.ledger = folder, nursery, ledger
        self._seats, self._wiring = seats, wiring
        self.changed = asyncio.Event()
        self.deaths: list[str] = []
        self.points = FailpointServer(folder / "failpoints.sock", point) if point else None
        self.cluster: Cluster
        self.trainers: list[Trainer] = []
        self.replicas: list[Replica] = []
        self._run = 1

    @property
    def clients(self) -> list[Client]:
        return [*self.trainers, *(engine for replica in self.replicas for engine in replica.engines)]

    # -- beginning

    async def start(self, training: Options | None = None) -> None:
        """Start everything and wait until each client is registered; ``training``: more options for trainers.

        Raises TimeoutError.
        """
        if self.points:
            await self.points.start()
        self.cluster = Cluster.start(self.folder, self.points.path if self.points else None, self._wiring)
        await self._wait("daemons", lambda: all(d.answers() for d in self.cluster.daemons.values()))
        self._cast(training or {})
        for client in self.clients:
            self.launch(client)
        await self._wait("clients", lambda: all(client.ready for client in self.clients))
        await self._wait_for_lanes()

    async def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        if not await until(lambda: condition() or bool(self.dead()), self.changed, START_SECONDS) or self.dead():
            raise TimeoutError(f"{what} did not come up" + f" ({', '.join(self.dead())} ended)" * bool(self.dead()))

    async def _wait_for_lanes(self) -> None:
        """Wait until every daemon knows of a lane for each replica: movers have started by then. Raises TimeoutError.

        Asked from a thread: a daemon may stand at a failpoint, and wait for this loop.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await asyncio.to_thread(self._lanes_open):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError("lanes did not come up") from None

    def _lanes_open(self) -> bool:
        try:
            jobs = [daemon.status()["jobs"].get(JOB) for daemon in self.cluster.daemons.values()]
        except RefitdError:
            return False
        lanes = [{lane["replica"] for lane in job["lanes"] if lane["members"]} if job else set() for job in jobs]
        return all(names == {replica.name for replica in self.replicas} for names in lanes)

    def _cast(self, training: Options) -> None:
        world = TRAINERS_PER_NODE * len(TRAINER_NODES)
        for rank in range(world):
            node = TRAINER_NODES[rank // TRAINERS_PER_NODE]
            options = self._options("trainer", node, rank=rank, world=world, run="run1", step=0) | training
            self.trainers.append(self._client(Trainer, f"trainer {rank}", options))
        for name in dict.fromkeys(seat.replica for seat in self._seats):
            engines = [self._seat(seat) for seat in self._seats if seat.replica == name]
            self.replicas.append(Replica(name, engines, self.ledger))

    def _seat(self, seat: Seat) -> Engine:
        options = self._options("engine", **seat._asdict(), world=TENSOR_PARALLEL)
        return self._client(Engine, f"{seat.replica} rank {seat.rank}", options)

    def _options(self, role: str, node: str, **more: Any) -> dict[str, Any]:
        points = str(self.points.path) if self.points else ""
        return {"role": role, "job": JOB, "node": node, "failpoints": points, **more}

    def _client(self, kind: type[T], name: str, options: dict[str, Any]) -> T:
        daemon = self.cluster.daemons[options["node"]]
        options["socket"] = str(daemon.socket)
        return kind(name, options, daemon, daemon.folder / f"{name.replace(' ', '-')}.log")

    def launch(self, client: Client) -> None:
        """Begin a life of ``client``."""
        pid, sock = self._nursery.spawn(client.options, client.log)
        client.attach(pid, sock, self._hear, self._ended)

    async def revive(self, client: Client) -> None:
        """Begin another life, and wait until it is registered."""
        self.launch(client)
        await until(lambda: client.ready or client.down, self.changed, START_SECONDS)

    def new_run(self, step: int, clients: list[Client]) -> None:
        """How killed trainers come back: trained up to ``step``, under a new run where all of them died."""
        if all(client in clients for client in self.trainers):
            self._run += 1
        for client in clients:
            if client.trains:
                client.options |= {"step": step, "run": f"run{self._run}"}

    # -- events

    def _hear(self, client: Client, message: Message) -> None:
        if isinstance(client, Trainer):
            client.hear(message)
        elif isinstance(client, Engine):
            self._replica(client).hear(client, message)
        self.changed.set()

    def _ended(self, client: Client) -> None:
        if not client.down:
            client.down = True
            self.deaths.append(client.name)
        if isinstance(client, Engine):
            self._replica(client).ended(client)
        self.changed.set()

    def _replica(self, engine: Engine) -> Replica:
        return next(replica for replica in self.replicas if replica.name == engine.replica)

    def dead(self) -> list[str]:
        """Who ended although nobody ordered it: nobody may."""
        daemons = [d for d in self.cluster.daemons.values() if not d.down and d.exited() is not None]
        return [*self.deaths, *(f"daemon {d.name} (exit status {d.exited()})" for d in daemons)]

    # -- the end

    def logs(self) -> dict[str, str]:
        """The last lines of every process's log."""
        if not hasattr(self, "cluster"):
            return {}
        out = {f"daemon {name}": tail(self.cluster.daemons[name].log) for name in NODES}
        return out | {client.name: tail(client.log) for client in self.clients}

    async def stop(self) -> None:
        """End every process and hang up."""
        for client in self.clients:
            await client.close()
        await asyncio.to_thread(self._nursery.close)
        if hasattr(self, "cluster"):
            await asyncio.to_thread(self.cluster.stop)
        if self.points:
            await self.points.close()


def keep_logs(folder: Path, target: Path) -> None:
    """Copy all logs to a folder of the user's."""
    target.mkdir(parents=True, exist_ok=True)
    for log in sorted(folder.glob("*/*.log")):
        with contextlib.suppress(OSError):
            shutil.copy(log, target / f"{log.parent.name}-{log.name}")
