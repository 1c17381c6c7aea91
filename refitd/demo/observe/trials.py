"""The faults, and the alerts that are meant for each. A fault lasts as long as its context."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from refitd.demo.cluster import TRAINER_NODES, kill, movers
from refitd.demo.faults import Targets, restart
from refitd.demo.observe.load import HELD, Fact, Load
from refitd.demo.observe.stage import FLAPS
from refitd.demo.scene import JOB
from refitd.errors import RefitdError
from refitd.hook.admin import ask
from refitd.hook.messages import PROTO
from refitd.hook.wire import Connection

LIMIT = 2_000_000  # bytes a second: what plans may count on, and reach
TRICKLE = 6_000.0  # bytes a second that come through instead
REFUSALS_A_SECOND = 2.0
SOURCE_SECONDS = 1.0  # between two deaths of sources
JOIN_SECONDS = 30.0

Begin = Callable[[Load], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault, in words, and the alerts that must fire while it lasts."""

    words: str
    alerts: tuple[str, ...]
    begin: Begin


@asynccontextmanager
async def bad_file(load: Load) -> AsyncIterator[None]:
    """The configuration of node b gets an unknown section, and the daemon is told to read it again."""
    daemon = load.daemon("b")
    path: Path = daemon.folder / "refitd.toml"
    good = path.read_text()
    path.write_text(good + "\n[nonsense]\nkey = 1\n")
    kill(daemon.pid, Signals.SIGHUP)
    try:
        yield
    finally:
        path.write_text(good)
        kill(daemon.pid, Signals.SIGHUP)


@asynccontextmanager
async def strangers(load: Load) -> AsyncIterator[None]:
    """Somebody says again and again that it is a rank for which another process speaks."""

    async def knock() -> None:
        while True:
            await asyncio.to_thread(_claim, str(load.daemon("c").socket), "r0", 0)
            await asyncio.sleep(1 / REFUSALS_A_SECOND)

    task = asyncio.create_task(knock())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _claim(path: str, replica: str, rank: int) -> None:
    """Say hello as a rank, and hear that it is not ours."""
    hello = {
        "id": 1, "method": "hello", "proto": PROTO, "client": "a stranger", "job": JOB, "side": "engine",
        "group": replica, "rank": rank, "world": 2, "incarnation": "f" * 16,
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError, EOFError):
        sock.settimeout(2)
        sock.connect(path)
        connection = Connection(sock)
        connection.send(hello)
        connection.receive(2)


@asynccontextmanager
async def silent_store(load: Load) -> AsyncIterator[None]:
    """etcd takes connections and answers nobody (SIGSTOP)."""
    load.wires.freeze()
    try:
        yield
    finally:
        load.wires.thaw()


@asynccontextmanager
async def dead_engines(load: Load) -> AsyncIterator[None]:
    """One rank of each replica is killed."""
    targets = Targets("engines", clients=[replica.engines[1] for replica in load.scene.replicas])
    async with _killed(load, targets):
        yield


@asynccontextmanager
async def dying_movers(load: Load) -> AsyncIterator[None]:
    """Every mover of node c is killed whenever it begins to transfer."""

    def strike(fact: Fact) -> None:
        if fact["name"] == "transfer" and str(fact.get("key")).startswith("engine/"):
            kill(fact["pid"], Signals.SIGKILL)

    load.on_point = strike
    try:
        yield
    finally:
        load.on_point = None


@asynccontextmanager
async def leaving_sources(load: Load) -> AsyncIterator[None]:
    """Movers of trainers are killed in turn: every lane gets other sources, and the old ones again."""

    async def strike() -> None:
        while True:
            for node in TRAINER_NODES:
                for pid in movers(load.daemon(node)):
                    kill(pid, Signals.SIGKILL)
                    await asyncio.sleep(SOURCE_SECONDS)
            await asyncio.sleep(0)

    task = asyncio.create_task(strike())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def slow_link(load: Load) -> AsyncIterator[None]:
    """Plans count on 2 MB/s, and 6 kB/s come through to node d."""
    await _limit(load, LIMIT)
    load.sluice.rate = TRICKLE
    try:
        yield
    finally:
        load.sluice.rate = None
        await _limit(load, None)


async def _limit(load: Load, rate: int | None) -> None:
    await asyncio.to_thread(ask, "limit", str(load.daemon("a").socket), 5.0, job=JOB, rate=rate)


@asynccontextmanager
async def dead_daemon(load: Load) -> AsyncIterator[None]:
    """Node c's daemon is killed, and its movers with it."""
    async with _killed(load, Targets("daemon c", daemons=[load.daemon("c")])):
        yield


@asynccontextmanager
async def stuck_loop(load: Load) -> AsyncIterator[None]:
    """The loop of node d's daemon stands still, at a failpoint that gets no answer."""
    load.holder.hold()
    try:
        yield
    finally:
        load.holder.release()


@asynccontextmanager
async def flapping(load: Load) -> AsyncIterator[None]:
    """Node d's daemon is killed and started again as often as parks it."""
    for _ in range(FLAPS):
        async with _killed(load, Targets("daemon d", daemons=[load.daemon(HELD)])):
            pass
        await _joined(load)
    yield


@asynccontextmanager
async def _killed(load: Load, targets: Targets) -> AsyncIterator[None]:
    """Processes are dead for the length of the context; afterwards they begin another life."""
    targets.mark(down=True)
    for pid in targets.pids():
        kill(pid, Signals.SIGKILL)
    for client in targets.clients:
        client.options |= {"step": load.step}
    try:
        yield
    finally:
        await restart(targets, load.scene.cluster, load.scene.revive)


async def _joined(load: Load) -> None:
    """Return when the job knows the node again. Raises TimeoutError."""
    async with asyncio.timeout(JOIN_SECONDS):
        while True:
            with contextlib.suppress(RefitdError):
                job = (await asyncio.to_thread(load.daemon(HELD).status))["jobs"].get(JOB)
                if job and job["joined"]:
                    return
            await asyncio.sleep(0.1)


TRIALS = (
    Trial("a configuration with an unknown section is read again", ("RefitdReloadFailed",), bad_file),
    Trial("a stranger claims the rank of another process, twice a second", ("RefitdClientsRefused",), strangers),
    Trial("etcd answers nobody", ("RefitdStoreSilent", "RefitdLeaseLost", "RefitdNoLeader"), silent_store),
    Trial("a rank of every replica is dead", ("RefitdReplicaBehind", "RefitdReplicasBehind"), dead_engines),
    Trial(
        "movers die whenever they begin to transfer",
        ("RefitdRefitsFail", "RefitdNoRefitSucceeds", "RefitdMoversDie"),
        dying_movers,
    ),
    Trial("sources come and go: one mover of a trainer after another dies", ("RefitdLanesTurn",), leaving_sources),
    Trial("6 kB/s come through to node d", ("RefitdTransferSlow", "RefitdLinkSlow"), slow_link),
    Trial("the daemon of node c is dead", ("RefitdDown",), dead_daemon),
    Trial("the loop of node d's daemon stands still", ("RefitdLoopStuck",), stuck_loop),
    Trial("the daemon of node d comes and goes", ("RefitdNodeParked",), flapping),
)
