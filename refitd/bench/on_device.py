"""``refitd bench refit --device cuda``: publish to commit on one GPU, phase by phase, beside a plain copy.

Two trainers hold the rows, two engines the columns; each is a process, and each engine has a mover. Memory is mapped
from process to process, and only the movers' kernels copy; with ``--transport nccl`` each rank counts as a host of its
own, and trainers' movers send to engines' movers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from refitd.bench import contest, models, moments
from refitd.bench.daemon import Settings
from refitd.bench.party import BenchFailed, Process
from refitd.bench.rows import Row, percentile
from refitd.stamps import Stamp

WARM_UPS = 3
BUCKET_BYTES = 256 << 20
NCCL_BUCKET_BYTES = 16 << 20  # two buffers an edge are on the card
M2N = {"1GiB": 486.0, "256MiB": 132.0}  # GB/s of NCCL M2N 0.1.0 (NCCL 2.30.7) on one H200, one call at a time
COPY_BYTES = 2 << 30
PHASES = ("publish", "prepare", "transfer", "commit")


class Round(NamedTuple):
    """Seconds of one refit: in all, by `PHASES`, from the first mover's start to the last checksum in hand, and by
    `refitd.bench.moments.STEPS`."""

    total: float
    phases: tuple[float, ...]
    moved: float
    steps: tuple[float, ...] = ()


def measure(names: Sequence[str], repeats: int, transport: str = "peer") -> list[Row]:
    """All rows of the models, by ``transport`` peer or nccl. Raises BenchFailed."""
    copied = _alone(Copier)
    found = [Row("cuda_plain_copy", copied, "GB/s")]
    for name in names:
        model = models.model(name)
        for verify in ("checksum", "reread"):
            settings = Settings(verify, BUCKET_BYTES if transport == "peer" else NCCL_BUCKET_BYTES, stamped=True)
            rounds, peaks = _rounds(model, transport, settings, repeats)
            label = "_".join(["cuda", name, *([] if transport == "peer" else [transport])])
            label += "" if verify == "checksum" else f"_{verify}"
            found += _rows(label, name, models.nbytes(model), rounds, copied)
            found += [Row(f"{label}_peak_{who}", nbytes / 1e6, "MB") for who, nbytes in peaks.items() if "mover" in who]
    return found


def facts() -> dict[str, Any]:
    """The card, from a process of its own: this one forks, and must not touch CUDA."""
    from refitd.bench.pack import device_facts

    return dict(device_facts("cuda"))


def _rounds(
    model: models.Model, transport: str, settings: Settings, repeats: int
) -> tuple[list[Round], dict[str, int]]:
    with contest.refit(model, transport, "cuda", settings) as one:
        spans = []
        for step in range(WARM_UPS + repeats):
            one.round(step)
            spans.append(one.times)
        found = one.stamps()
        return [stamped(span, found) for span in spans[WARM_UPS:]], one.peaks()


def stamped(span: tuple[float, float], found: Sequence[Stamp], ranks: int = models.ENGINES) -> Round:
    """Raises BenchFailed where the stamps do not show every phase."""
    began, ended = span
    inside = [stamp for stamp in found if began <= stamp.at <= ended]
    starts = [[stamp.at for stamp in inside if (stamp.name, stamp.key) == ("stage", name)] for name in PHASES[1:]]
    moves = {
        name: [stamp.at for stamp in inside if stamp.name == name and stamp.key.startswith("engine")]
        for name in ("opened", "counted")
    }
    if not all(starts) or min(map(len, moves.values())) < ranks:
        raise BenchFailed(f"the stamps do not show every phase: {[stamp[1:] for stamp in inside]}")
    edges = [began, *(times[0] for times in starts), ended]
    phases = tuple(after - before for before, after in pairwise(edges))
    return Round(ended - began, phases, max(moves["counted"]) - min(moves["opened"]), moments.steps(span, inside))


class Mark(NamedTuple):
    at: float  # monotonic seconds
    what: str
    span: tuple[float, float]


def mark(line: str) -> Mark | None:
    """What a line of the daemon's log says about a refit's progress."""
    try:
        said = json.loads(line)
        at = datetime.fromisoformat(said["timestamp"]).timestamp() - time.time() + time.monotonic()
    except (ValueError, KeyError, TypeError):
        return None
    if said.get("event") == "stage":
        return Mark(at, str(said["stage"]), (0.0, 0.0))
    if said.get("event") == "moved" and "engine" in str(said.get("rank")):
        return Mark(at, "moved", tuple(said["span"]))
    return None


def round_of(span: tuple[float, float], marks: Sequence[Mark], ranks: int = models.ENGINES) -> Round:
    """Raises BenchFailed where the log does not show every phase."""
    began, ended = span
    inside = [one for one in marks if began <= one.at <= ended]
    starts = [[one.at for one in inside if one.what == what] for what in PHASES[1:]]
    moves = [one.span for one in inside if one.what == "moved"]
    if not all(starts) or len(moves) != ranks:
        raise BenchFailed(f"the daemon's log does not show every phase: {[one.what for one in inside]}")
    edges = [began, *map(min, starts), ended]
    phases = tuple(after - before for before, after in pairwise(edges))
    return Round(ended - began, phases, max(move[1] for move in moves) - min(move[0] for move in moves))


def _rows(label: str, name: str, nbytes: int, rounds: Sequence[Round], copied: float) -> list[Row]:
    total = statistics.median(one.total for one in rounds)
    moved = statistics.median(one.moved for one in rounds)
    rate, moved_rate, baseline = nbytes / total / 1e9, nbytes / moved / 1e9, M2N.get(name, copied)
    rows = [
        Row(f"{label}_publish_to_commit", total * 1e3, "ms"),
        Row(f"{label}_publish_to_commit_p90", percentile([one.total for one in rounds], 0.9) * 1e3, "ms"),
        Row(f"{label}_throughput", rate, "GB/s", copied, rate / copied),
        Row(f"{label}_movers", moved * 1e3, "ms"),
        Row(f"{label}_movers_throughput", moved_rate, "GB/s", baseline, moved_rate / baseline),
    ]
    for i, phase in enumerate(PHASES):
        seconds = statistics.median(one.phases[i] for one in rounds)
        rows.append(Row(f"{label}_{phase}", seconds * 1e3, "ms"))
        rows.append(Row(f"{label}_{phase}_share", 100 * seconds / total, "%"))
    for i, step in enumerate(moments.STEPS):
        seconds = statistics.median(one.steps[i] for one in rounds)
        rows.append(Row(f"{label}_step{i:02}_{step.label}", seconds * 1e3, "ms"))
    return rows


class Copier:
    """A process that copies on the GPU, and nothing else."""

    def fill(self, step: int) -> None:
        """Nothing to fill."""

    def move(self, step: int) -> float:  # noqa: ARG002  every copy is of the same bytes
        """GB/s of a plain copy, the best of ten."""
        source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return max(_copy_rate(source, target) for _ in range(10 + WARM_UPS))

    def exact(self, step: int) -> bool:  # noqa: ARG002  a plain copy is trusted
        return True

    def close(self) -> None:
        """Nothing to let go of."""


def _copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    target.copy_(source)
    torch.cuda.synchronize()
    return source.nbytes / (time.monotonic() - began) / 1e9


def _alone(make: Callable[[], Any]) -> float:
    process = Process("copier", partial(make))
    try:
        process.ask("move")
        return process.answer()
    finally:
        process.end()
