"""One way to move the weights, ready to do it again and again."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from refitd.bench.clients import EngineParty, TrainerParty
from refitd.bench.daemon import USUAL, Daemon, Settings
from refitd.bench.models import ENGINES, TRAINERS, Model
from refitd.bench.party import BenchFailed, Party, Process, ask_all
from refitd.bench.rivals import GatherBroadcast, SendRecv
from refitd.hook.messages import IN_PLACE
from refitd.stamps import Stamp, collecting, read


class Contest:
    """Four processes and what serves them. ``round`` may be called any number of times, with growing steps."""

    def __init__(self, name: str, trainers: list[Process], engines: list[Process], daemon: Daemon | None) -> None:
        self.name, self._trainers, self._engines, self._daemon = name, trainers, engines, daemon
        self.folder: Path | None = None  # where all processes keep their stamps, if they do
        self.times = 0.0, 0.0  # of the last round: the first trainer's beginning, the last engine's end

    @property
    def trainers(self) -> list[Process]:
        return self._trainers

    @property
    def engines(self) -> list[Process]:
        return self._engines

    @property
    def daemon(self) -> Daemon:
        """Raises BenchFailed for a rival, which has none."""
        if self._daemon is None:
            raise BenchFailed(f"{self.name} has no daemon")
        return self._daemon

    def round(self, step: int) -> float:
        """Move the values of ``step``; seconds from the first trainer's beginning to the last engine's end.

        Raises BenchFailed where a party failed or an engine holds anything else than these values.
        """
        ask_all(self._trainers, "fill", step)
        seconds = self.move(step)
        if not all(ask_all(self._engines, "exact", step)):
            raise BenchFailed(f"{self.name}: step {step} did not arrive bit for bit")
        return seconds

    def move(self, step: int) -> float:
        """As `round`, of whatever the weights are."""
        times = ask_all([*self._engines, *self._trainers], "move", step)
        self.times = min(times[ENGINES:]), max(times[:ENGINES])
        return self.times[1] - self.times[0]

    def pause(self) -> float:
        """Seconds of the last round from the first engine that stopped serving to the last that serves again."""
        return self.times[1] - min(ask_all(self._engines, "paused"))

    def lines(self) -> list[str]:
        """What the daemon said so far."""
        return self._daemon.lines() if self._daemon is not None else []

    def stamps(self) -> list[Stamp]:
        """What all processes have noted so far, by time; nothing where nobody asked for it."""
        return read(self.folder) if self.folder is not None else []

    def peaks(self) -> dict[str, int]:
        """Most resident memory of each process so far, bytes."""
        for process in (*self._trainers, *self._engines):
            process.look()
        found = {process.name: process.peak for process in (*self._trainers, *self._engines)}
        if self._daemon is not None:
            self._daemon.look()
            found |= self._daemon.peaks
        return found

    def close(self) -> None:
        """Let every party leave in order."""
        ask_all([*self._engines, *self._trainers], "close")


@contextmanager
def refit(
    model: Model,
    transport: str,
    device: str = "cpu",
    settings: Settings = USUAL,
    trainer: type[TrainerParty] | None = None,
    mode: str = IN_PLACE,
) -> Iterator[Contest]:
    """refitd with ``transport`` peer, tcp or nccl, weights on ``device``. ``trainer``: else `TrainerParty`.

    ``mode``: of the engines.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="refitd-bench-")))
        if settings.stamped:
            stack.enter_context(collecting(folder))
        yield from _refit(model, transport, device, settings, (trainer or TrainerParty, mode), folder)


def _refit(
    model: Model, transport: str, device: str, settings: Settings, how: tuple[type[TrainerParty], str], folder: Path
) -> Iterator[Contest]:
    processes: list[Process] = []
    daemon = Daemon(folder, transport, settings)
    try:
        daemon.wait_answer()
        mates = socket.socketpair()
        with mates[0], mates[1]:
            trainers = [partial(how[0], model, rank, daemon.socket, device) for rank in range(TRAINERS)]
            engines = [
                partial(EngineParty, model, rank, daemon.socket, mates[rank], device, how[1]) for rank in range(ENGINES)
            ]
            contest = _start(transport, trainers, engines, daemon, processes)
        contest.folder = folder if settings.stamped else None
        daemon.wait_lane()
        yield contest
        contest.close()
    except BenchFailed as error:
        raise BenchFailed(f"{error}\n{daemon.log()}".rstrip()) from error
    finally:
        for process in processes:
            process.end()
        daemon.end()


@contextmanager
def rival(model: Model, name: str) -> Iterator[Contest]:
    """``gather_broadcast`` or ``gloo_send_recv``."""
    make = {"gather_broadcast": GatherBroadcast, "gloo_send_recv": SendRecv}[name]
    processes: list[Process] = []
    port = _free_port()
    parties = [partial(make, model, rank, port) for rank in range(TRAINERS + ENGINES)]
    try:
        contest = _start(name, parties[:TRAINERS], parties[TRAINERS:], None, processes)
        yield contest
        contest.close()
    finally:
        for process in processes:
            process.end()


def _start(
    name: str,
    trainers: Sequence[Callable[[], Party]],
    engines: Sequence[Callable[[], Party]],
    daemon: Daemon | None,
    processes: list[Process],
) -> Contest:
    for side, makers in (("trainer", trainers), ("engine", engines)):
        for rank, make in enumerate(makers):
            processes.append(Process(f"{side}{rank}", make))
    ask_all(processes, "start")
    return Contest(name, processes[: len(trainers)], processes[len(trainers) :], daemon)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
