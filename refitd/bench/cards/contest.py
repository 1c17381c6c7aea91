"""A scene at work: a daemon for each simulated node, a process for each rank."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from refitd.bench.cards.clients import JOB, Engine, Trainer
from refitd.bench.cards.layouts import ENGINE, Model, Scene
from refitd.bench.party import BenchFailed, Process, ask_all
from refitd.errors import ConfigError, RefitdError
from refitd.stamps import Stamp, collecting, read
from refitd.testing import LocalDaemon, wait_until

BUCKET_BYTES = 256 << 20
LANE_SECONDS = 60.0
PEER, NCCL, TCP = "peer", "nccl", "tcp"
_AT_REST = ("idle", "committed")
_NO_ETCD = "etcd://127.0.0.1:1"  # a store that is shared, as the nodes are to know; nobody calls it
Edges = dict[tuple[str, str, str], int]


class Settings(NamedTuple):
    """``patient``: see `Trainer`; ``config``: more of the daemons' keys; ``stamped``: keep `refitd.stamps`."""

    verify: str = "checksum"
    bucket_bytes: int = BUCKET_BYTES
    patient: bool = False
    config: tuple[tuple[str, object], ...] = ()
    stamped: bool = False


class Contest:
    """``round`` may be called any number of times, with growing steps."""

    def __init__(self, scene: Scene, daemons: list[LocalDaemon], makers: dict[str, Callable[[], Any]]) -> None:
        self.scene, self.daemons, self.makers = scene, daemons, makers
        self.processes = {key: Process(key, make) for key, make in makers.items()}
        self.trainers = [self.processes[seat.key] for seat in scene.trainers]
        self.engines = [self.processes[seat.key] for seat in scene.engines]
        self.ends: dict[str, float] = {}  # of the last round: when each engine had everything
        self.times = 0.0, 0.0  # of the last round: the first trainer's beginning, the last engine's end
        self.folder: Path | None = None  # where all processes keep their stamps, if they do

    def round(self, step: int, moved: Callable[[], None] | None = None) -> float:
        """Move the values of ``step``; seconds from the first trainer's beginning to the last engine's end.

        ``moved`` is called when all have ended, before anybody looks. Raises BenchFailed where a party failed or an
        engine holds anything else than these values.
        """
        ask_all(self.trainers, "fill", step)
        movers = [*self.engines, *self.trainers]
        times = ask_all(movers, "move", step)
        if moved is not None:
            moved()
        self.ends = {seat.key: end for seat, end in zip(self.scene.engines, times, strict=False)}
        self.times = min(times[len(self.engines) :]), max(times[: len(self.engines)])
        self.check(step)
        return self.times[1] - self.times[0]

    def check(self, step: int) -> None:
        """Raises BenchFailed where an engine does not hold the values of ``step``."""
        found = ask_all(self.engines, "exact", step)
        if wrong := [seat.key for seat, good in zip(self.scene.engines, found, strict=True) if not good]:
            raise BenchFailed(f"{self.scene.name}: step {step} did not arrive bit for bit at {wrong}")

    def edges(self) -> Edges:
        """Bytes that came over each (source, destination, link) in the last refit, as the daemons counted them."""
        found: Edges = {}
        for row in (row for job in self.jobs() for row in job["links"]):
            key = row["src"], row["dst"], row["link"]
            found[key] = found.get(key, 0) + int(row["moved"])
        return found

    def jobs(self) -> list[dict[str, Any]]:
        """What each daemon says about the job."""
        return [daemon.status()["jobs"].get(JOB, {}) for daemon in self.daemons]

    def network_bytes(self) -> int:
        """Payload that came from other nodes since the start."""
        return sum(int(job["last_refit"]["network_bytes"]) for job in self.jobs())

    def transports(self) -> list[str]:
        """What the network edges go by, and why."""
        lanes = [lane for job in self.jobs() for lane in job.get("lanes", [])]
        return sorted({f"{lane['transport']}: {lane['transport_why']}" for lane in lanes if lane["transport"]})

    def lines(self) -> list[str]:
        """What the daemons said so far."""
        return [line for daemon in self.daemons for line in daemon.log.splitlines()]

    def stamps(self) -> list[Stamp]:
        """What all processes have noted so far, by time; nothing where nobody asked for it."""
        return read(self.folder) if self.folder is not None else []

    def wait_lanes(self) -> None:
        """Return when every replica has its lane from all trainers to all its ranks. Raises BenchFailed."""
        deadline = time.monotonic() + LANE_SECONDS
        while not self._built():
            if time.monotonic() > deadline:
                lanes = [(lane["replica"], lane["stage"], lane["why"]) for job in self.jobs() for lane in job["lanes"]]
                raise BenchFailed(f"no lanes after {LANE_SECONDS:g} s: {lanes}\n{self.tail()}")
            time.sleep(0.05)

    def _built(self) -> bool:
        worlds = {
            name: len([seat for seat in self.scene.engines if seat.group == name]) for name in self.scene.replicas
        }
        good = set()
        for lane in (lane for job in self.jobs() for lane in job.get("lanes", [])):
            ends = len(lane["sources"]), len(lane["members"])
            if lane["stage"] in _AT_REST and ends == (len(self.scene.trainers), worlds.get(lane["replica"])):
                good.add(lane["replica"])
        return good == set(self.scene.replicas)

    def tail(self) -> str:
        """Warnings, errors, and the end of what the daemons said."""
        lines = [f"{number}: {line}" for number, daemon in enumerate(self.daemons) for line in daemon.log.splitlines()]
        loud = [line for line in lines if not _quiet(line.partition(": ")[2])]
        return "\n".join([*loud[-30:], "the end:", *lines[-6:]])


def _quiet(line: str) -> bool:
    try:
        return json.loads(line)["level"] in ("debug", "info")
    except (ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def refit(scene: Scene, model: Model, transport: str, settings: Settings | None = None) -> Iterator[Contest]:
    """refitd, by ``peer`` under one daemon, or with each simulated node under a daemon of its own and the bytes
    between them by ``nccl`` or ``tcp``. One card cannot be halved: there each rank is a host of its own.
    """
    settings = settings or Settings()
    with contextlib.ExitStack() as stack:
        folder = _stamps(stack) if settings.stamped else None
        daemons = _daemons(stack, scene, transport, settings)
        contest = Contest(scene, daemons, _makers(stack, scene, model, daemons, settings))
        contest.folder = folder
        try:
            ask_all(list(contest.processes.values()), "start")
            contest.wait_lanes()
            yield contest
            ask_all([*contest.engines, *contest.trainers], "close")
        except RefitdError as error:
            raise BenchFailed(f"{scene.name} by {transport}: {error}\n{contest.tail()}") from error
        finally:
            for process in contest.processes.values():
                process.end()


def _stamps(stack: contextlib.ExitStack) -> Path:
    """A folder in which all processes from here on keep their stamps."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="refitd-stamps-")))
    stack.enter_context(collecting(folder))
    return folder


def _daemons(stack: contextlib.ExitStack, scene: Scene, transport: str, settings: Settings) -> list[LocalDaemon]:
    split = transport != PEER and scene.nodes > 1
    url = _etcd(stack) if split else "memory://"
    config = {
        "data.verify": settings.verify, "data.bucket_bytes": settings.bucket_bytes, "log.level": "debug",
        "data.transport": TCP if transport == PEER else transport, "timeouts.build": 60.0,
        "job.max_dirty": len(scene.replicas), **dict(settings.config),
    }  # fmt: skip
    links = "network" if transport != PEER and not split else "auto"
    daemons = [
        LocalDaemon(url or _NO_ETCD, links, f"n{node}", config, own_session=False)
        for node in range(scene.nodes if split else 1)
    ]
    for daemon in daemons:
        stack.callback(daemon.stop)
    if split and not url:
        _together(stack, daemons)
    else:
        for daemon in daemons:
            daemon.launch()
    for daemon in daemons:
        _wait_answer(daemon)
    return daemons


def _etcd(stack: contextlib.ExitStack) -> str:
    """The URL of an etcd of our own; empty where none can be had."""
    try:
        from refitd.store.spawn import spawn_etcd

        etcd = spawn_etcd()
    except (ImportError, ConfigError) as error:
        print(f"no etcd, so the nodes share a process: {error}", file=sys.stderr, flush=True)
        return ""
    stack.callback(etcd.stop)
    return etcd.url


def _together(stack: contextlib.ExitStack, daemons: list[LocalDaemon]) -> None:
    """All in one process, whose log is the first one's."""
    command = [sys.executable, "-m", "refitd.bench.cards.nodes", *(str(daemon.write_config()) for daemon in daemons)]
    with (daemons[0].folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_answer(daemon: LocalDaemon) -> None:
    try:
        wait_until(daemon.answers, "a daemon", LANE_SECONDS)
    except TimeoutError as error:
        raise BenchFailed(f"a daemon did not start: {daemon.log[-2000:]}") from error


def _makers(
    stack: contextlib.ExitStack, scene: Scene, model: Model, daemons: list[LocalDaemon], settings: Settings
) -> dict[str, Callable[[], Any]]:
    """What each rank's process is to run, by key."""
    mates, found = _mates(stack, scene), dict[str, Callable[[], Any]]()
    for seat in scene.seats:
        path = daemons[scene.node(seat) if len(daemons) > 1 else 0].socket
        if seat.side == ENGINE:
            found[seat.key] = partial(Engine, scene, model, seat, path, mates[seat.key])
        else:
            found[seat.key] = partial(Trainer, scene, model, seat, path, settings.patient)
    return found


def _mates(stack: contextlib.ExitStack, scene: Scene) -> dict[str, list[socket.socket]]:
    """For each lead a socket to every other rank of its replica, for those the other end."""
    found: dict[str, list[socket.socket]] = {seat.key: [] for seat in scene.engines}
    for seat in (seat for seat in scene.engines if seat.number):
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        found[seat._replace(number=0).key].append(ours)
        found[seat.key].append(theirs)
    return found


def crossing(scene: Scene, edges: Edges) -> tuple[list[int], list[int]]:
    """Bytes out of and into each card from and to others, of ``edges``."""
    place = {seat.key: seat.card for seat in scene.seats}
    out, into = [0] * scene.cards, [0] * scene.cards
    for (src, dst, _link), nbytes in edges.items():
        if place[src] != place[dst]:
            out[place[src]] += nbytes
            into[place[dst]] += nbytes
    return out, into
