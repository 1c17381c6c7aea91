"""``refitd bench pause``: how long an engine stands still for new weights, by mode, beside the bare copy of the bytes.

The pause runs from the first rank that stops serving (it has the ticket) to the last that serves again. For shadows it
is compared with a plain copy of the model on the same memory, for ``in_place`` with what the movers alone take.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refitd.bench import clients, contest, models, on_device, outcome, rows
from refitd.bench.daemon import Settings
from refitd.bench.machine import commit, machine
from refitd.bench.on_device import BUCKET_BYTES, WARM_UPS, Round, mark, round_of
from refitd.bench.party import BenchFailed, Process
from refitd.bench.rows import Row, percentile
from refitd.hook.gpu.batch import LARGE, Batch
from refitd.hook.messages import DEVICE_SHADOW, IN_PLACE

MODES = (DEVICE_SHADOW, IN_PLACE)
COPY_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
LAYERS = {"cpu": 1, "cuda": 32}
_COPIES = 10
_WAYS = {"mixed": LARGE, "one_by_one": 0, "launches": 1 << 62}  # least bytes that are copied one by one


def main(argv: Sequence[str]) -> int:
    """Measure what the command line asks for and say it; the exit status."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    where = machine()
    try:
        found = measure(arguments.device, arguments.model, arguments.modes, arguments.repeats)
        where |= on_device.facts() if arguments.device == "cuda" else {}
    except BenchFailed as error:
        return outcome.failed(error, arguments.json)
    document = {
        "ok": True, "rows": [asdict(row) for row in found], "machine": where, "repeats": arguments.repeats,
        "command": outcome.command("pause", argv), "commit": commit(),
    }  # fmt: skip
    rows.show(found, where, commit(), arguments.json)
    return outcome.finished(document, arguments)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="refitd bench pause", description="How long an engine stands still.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--model", choices=models.NAMES, default="big", help="default: %(default)s")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help="default: all")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    return parser.parse_args(argv)


def measure(device: str, name: str, modes: Sequence[str], repeats: int) -> list[Row]:
    """All rows. Raises BenchFailed, also where a rank had other bytes than were published."""
    bare = _ask(partial(Bare, device), list(_WAYS))
    found = [Row(f"pause_{device}_plain_copy", bare[0], "GB/s")]
    for way, rate in zip(_WAYS, bare[1:], strict=True):
        found.append(Row(f"pause_{device}_switch_{way}", rate, "GB/s", bare[0], rate / bare[0]))
    model = models.model(name)
    for mode in modes:
        pauses, rounds = _rounds(model, device, mode, repeats)
        found += _rows(f"pause_{device}_{name}_{mode}", models.nbytes(model), mode, pauses, rounds, bare[0])
    return found


def _rounds(model: models.Model, device: str, mode: str, repeats: int) -> tuple[list[float], list[Round]]:
    """Pauses and rounds, seconds; every bit of every round was compared."""
    bucket = BUCKET_BYTES if device == "cuda" else 4 << 20
    with contest.refit(model, "peer", device, Settings("checksum", bucket, traced=True), mode=mode) as one:
        pauses, spans = [], []
        for step in range(WARM_UPS + repeats):
            one.round(step)
            pauses.append(one.pause())
            spans.append(one.times)
        marks = [found for found in map(mark, one.lines()) if found is not None]
        return pauses[WARM_UPS:], [round_of(span, marks) for span in spans[WARM_UPS:]]


def _rows(
    label: str, nbytes: int, mode: str, pauses: Sequence[float], rounds: Sequence[Round], copied: float
) -> Iterator[Row]:
    pause = statistics.median(pauses) * 1e3
    moved = statistics.median(one.moved for one in rounds) * 1e3
    copy = nbytes / copied / 1e6
    bare = moved if mode == IN_PLACE else copy
    yield Row(label, pause, "ms", bare, pause / bare)
    yield Row(f"{label}_p90", percentile(pauses, 0.9) * 1e3, "ms")
    yield Row(f"{label}_over_plain_copy", pause, "ms", copy, pause / copy)
    yield Row(f"{label}_movers", moved, "ms")
    yield Row(f"{label}_publish_to_commit", statistics.median(one.total for one in rounds) * 1e3, "ms")
    for i, phase in enumerate(on_device.PHASES):
        yield Row(f"{label}_{phase}", statistics.median(one.phases[i] for one in rounds) * 1e3, "ms")


class Bare:
    """A process that only copies: GB/s of one large copy (step 0), and of the ways to switch (steps from 1)."""

    def __init__(self, device: str) -> None:
        self._device = device

    def fill(self, step: int) -> None:
        """Nothing to fill."""

    def move(self, step: int) -> float:
        """GB/s of payload, the best of ten."""
        if step == 0:
            return self._rate([COPY_BYTES[self._device]], 0)
        return self._rate(_sizes(LAYERS[self._device]), list(_WAYS.values())[step - 1])

    def _rate(self, sizes: Sequence[int], large: int) -> float:
        pairs = [(self._empty(nbytes), self._empty(nbytes)) for nbytes in sizes]
        batch = Batch(pairs, large)
        return sum(sizes) / min(self._seconds(batch) for _ in range(WARM_UPS + _COPIES)) / 1e9

    def _seconds(self, batch: Batch) -> float:
        clients._settle(self._device)
        began = time.monotonic()
        batch.run()
        return time.monotonic() - began

    def _empty(self, nbytes: int) -> torch.Tensor:
        if self._device == "cpu":
            return torch.zeros(nbytes, dtype=torch.uint8)
        return clients.device_empty((nbytes, 1), torch.uint8).reshape(-1)

    def exact(self, step: int) -> bool:  # noqa: ARG002  a plain copy is trusted
        return True

    def close(self) -> None:
        """Nothing to let go of."""


def _sizes(layers: int) -> list[int]:
    """Bytes of the bf16 tensors of ``layers`` layers of an 8B model on one of two ranks: matrices and norms."""
    matrices = [4096 * 3072, 4096 * 2048, *[4096 * 6144] * 3]
    return [2 * numel for _ in range(layers) for numel in (*matrices, 4096, 4096, 128, 128)]


def _ask(make: Callable[[], Any], ways: Sequence[str]) -> list[float]:
    process = Process("copier", make)
    try:
        answers = []
        for step in range(1 + len(ways)):
            process.ask("move", step)
            answers.append(process.answer())
        return answers
    finally:
        process.end()
