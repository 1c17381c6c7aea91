"""``refitd bench repair``: shrink, grow and fresh init, planned and after a kill, the first transfer included.

Ranks are three processes on one card (each a host of its own for NCCL), or one on each of several cards. Without a
GPU the fake library stands in: that shows the control flow and nothing about NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from refitd.bench import outcome
from refitd.bench.machine import commit, machine
from refitd.bench.party import BenchFailed, kill
from refitd.bench.repair_rank import Rank, answer_of
from refitd.bench.rows import Row, show
from refitd.errors import CommunicatorError
from refitd.hook.wire import Connection, Message
from refitd.mover.nccl.repair import FRESH, GROW, SHRINK

RANKS = 3  # on one card
DEADLINE_SECONDS = 10.0
ANSWER_SECONDS = 60.0
DIED = "killed"
PLANNED = "planned"


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status."""
    arguments = _parse(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="refitd-repair-") as folder:
            found = Bench(arguments.device, arguments.gpus, Path(folder)).run(arguments.repeats)
    except (BenchFailed, CommunicatorError) as error:
        return outcome.failed(error, arguments.json)
    where = machine()
    document = {
        "ok": True, "rows": [asdict(row) for row in found.rows], "refused": found.refused, "library": found.version,
        "device": arguments.device, "machine": where, "repeats": arguments.repeats, "commit": commit(),
        "command": outcome.command("repair", argv),
    }  # fmt: skip
    show(found.rows, where, document["commit"], arguments.json)
    return outcome.finished(document, arguments)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="refitd bench repair", description="Measure how communicators are mended.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: over a fake library")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="cards to spread over (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed repeats (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    arguments = parser.parse_args(argv)
    if min(arguments.repeats, arguments.gpus) < 1:
        parser.error("--repeats and --gpus: at least 1")
    return arguments


class Bench:
    """Everything of it is in ``folder``; faults of the fake library are read from ``faults.json`` there."""

    def __init__(self, device: str, gpus: int, folder: Path) -> None:
        self._device, self._gpus, self._folder = device, gpus, folder
        self.ranks = gpus if gpus > 1 else RANKS
        self._meetings = 0
        self._times: dict[str, list[float]] = {}
        self.refused: dict[str, str] = {}
        self.version = ""

    @property
    def rows(self) -> list[Row]:
        """Medians, ms."""
        return [Row(name, statistics.median(times) * 1e3, "ms") for name, times in self._times.items()]

    def run(self, repeats: int) -> Bench:
        """Measure all. Raises BenchFailed, CommunicatorError where even fresh communicators fail."""
        for _ in range(repeats):
            self._planned()
            self._after_kill(FRESH)
            self._after_kill(SHRINK)
        return self

    def _planned(self) -> None:
        """One leaves, by shrink; one joins, by grow; and the same by fresh init."""
        with self._ranks(self.ranks) as ranks:
            self._mend(ranks, FRESH, "start")
            leaver = ranks[-1]
            self._mend(ranks[:-1], SHRINK, PLANNED, gone=(self.ranks - 1,))
            leaver.ask({"do": "drop"})
            leaver.answer()
            self._mend(ranks, GROW, PLANNED)
            self._mend(ranks, FRESH, PLANNED)

    def _after_kill(self, method: str) -> None:
        with self._ranks(self.ranks) as ranks:
            self._mend(ranks, FRESH, "start")
            survivors, victim = ranks[:-1], ranks[-1]
            for number, rank in enumerate(survivors):
                rank.ask({"do": "hang", "rank": number, "size": self.ranks, "seconds": ANSWER_SECONDS})
                rank.answer()
            killed = victim.kill()
            for rank in survivors:
                rank.ask({"do": "wake", "killed": killed})
            noticed = [rank.answer() for rank in survivors]
            self._note("notice", max(one["noticed"] for one in noticed))
            self._mend(survivors, method, DIED, gone=(self.ranks - 1,), died=True)

    def _mend(
        self, ranks: Sequence[Child], method: str, cause: str, gone: tuple[int, ...] = (), died: bool = False
    ) -> None:
        self._meetings += 1
        folder = str(self._folder / f"meeting{self._meetings}")
        for number, rank in enumerate(ranks):
            rank.ask({
                "do": "repair", "method": method, "size": len(ranks), "rank": number, "gone": list(gone), "died": died,
                "folder": folder, "deadline": DEADLINE_SECONDS,
            })  # fmt: skip
        answers = [rank.answer() for rank in ranks]
        label = f"{method}_{cause}"
        reasons = {answer["refused"] for answer in answers if answer["refused"]}
        if reasons:
            self.refused[label] = "; ".join(sorted(reasons))
            label += "_then_init"
        self._note(label, max(answer["seconds"] for answer in answers))
        for step in sorted({step for answer in answers for step in answer["steps"]}):
            taken = max(answer["steps"].get(step, 0.0) for answer in answers)
            self._note(f"{label}_{step.replace(' ', '_')}", taken)
        for number, rank in enumerate(ranks):
            rank.ask({"do": "transfer", "rank": number, "size": len(ranks), "seconds": DEADLINE_SECONDS})
        for rank in ranks:
            rank.answer()

    def _note(self, name: str, seconds: float) -> None:
        self._times.setdefault(f"repair_{self._device}_{name}", []).append(seconds)

    @contextlib.contextmanager
    def _ranks(self, count: int) -> Iterator[list[Child]]:
        ranks: list[Child] = []
        try:
            for number in range(count):
                host = f"rank{number}" if self._gpus < count else ""
                rank = Rank(number, self._device, number % self._gpus, host, self._folder / "faults.json")
                ranks.append(Child(rank))
            for one in ranks:
                self.version = one.answer()["ready"]
            yield ranks
        finally:
            for one in ranks:
                one.kill()


class Child:
    """A rank's process."""

    def __init__(self, rank: Rank) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise BenchFailed(f"rank {rank.number} would be a fork of a process that uses CUDA, and could not use it")
        ours, theirs = socket.socketpair()
        torch.set_num_threads(1)
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ours.close()
                rank.serve(Connection(theirs))
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self._connection, self._number = Connection(ours), rank.number

    def ask(self, message: Message) -> None:
        """Have the rank begin something. Raises BenchFailed where it is gone."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise BenchFailed(f"rank {self._number}: {error}") from error

    def answer(self) -> dict[str, Any]:
        """What it says next. Raises BenchFailed where it is gone or silent, CommunicatorError where it failed."""
        try:
            message, _fds = self._connection.receive(ANSWER_SECONDS)
        except (EOFError, OSError) as error:
            raise BenchFailed(f"rank {self._number}: {type(error).__name__}: {error}") from error
        return answer_of(message)

    def kill(self) -> float:
        """SIGKILL, and wait for its end; when it was sent. Harmless when repeated."""
        now = time.monotonic()
        if self.pid:
            kill(self.pid)
            self.pid = 0
            self._connection.close()
        return now
