"""What a mover spends on a refit whatever its size: ``python -m refitd.bench.fixed [--gpus 2]``.

Refits by the peer path of several sizes, on one card (two trainers hold the rows, two engines the columns) or from one
card to another (``one_to_one``). For each: when each mover came to each of its moments, medians, after the first of
them began.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from refitd.bench import contest, models
from refitd.bench.cards import contest as cards
from refitd.bench.cards import layouts
from refitd.bench.daemon import Settings
from refitd.bench.machine import commit
from refitd.bench.party import BenchFailed
from refitd.stamps import Stamp, collecting, read

WARM_UPS = 3
MOMENTS = ("touch", "touched", "run.heard", "opened", "pull", "launch", "launched", "summed", "counted", "done.told")
SIZES = {"1MiB": 1 << 20, "16MiB": 1 << 24, "256MiB": 1 << 28, "1GiB": 1 << 30}
# GB/s of NCCL M2N 0.1.0, recorded, one call at a time, between two H200s; on one of them twice its 486 are the aim.
AIMS = {1: {"1GiB": 972.0}, 2: {"1MiB": 5.9, "16MiB": 80.0, "256MiB": 221.0, "1GiB": 264.0}}
BUCKET_BYTES = 256 << 20


class Refits(Protocol):
    """One refit after another."""

    times: tuple[float, float]

    def round(self, step: int) -> float: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where every size was moved."""
    parser = argparse.ArgumentParser(prog="python -m refitd.bench.fixed", description="A mover's fixed cost.")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args(argv)
    document: dict[str, Any] = {"ok": True, "commit": commit(), "gpus": arguments.gpus, "sizes": {}, "failed": {}}
    for size in arguments.sizes:
        try:
            document["sizes"][size] = _measured(arguments.gpus, size, arguments.repeats)
        except BenchFailed as error:
            document["ok"], document["failed"][size] = False, str(error)[-3000:]
        print(f"{size}: {document['sizes'].get(size, 'failed')}", file=sys.stderr, flush=True)
    print(json.dumps(document))
    return 0 if document["ok"] else 1


def _measured(gpus: int, size: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="refitd-fixed-") as folder, collecting(Path(folder)):
        with _refits(gpus, size) as one:
            spans = []
            for step in range(WARM_UPS + repeats):
                one.round(step)
                spans.append(one.times)
        found = read(Path(folder))
    rounds = [_moments(span, found) for span in spans[WARM_UPS:]]
    return summary(rounds, SIZES[size], AIMS[gpus].get(size, 0.0))


@contextmanager
def _refits(gpus: int, size: str) -> Iterator[Refits]:
    with ExitStack() as stack:
        if gpus == 1:
            model = (models.Matrix("weight", 16384, SIZES[size] >> 15),)
            yield stack.enter_context(contest.refit(model, "peer", "cuda", Settings(bucket_bytes=BUCKET_BYTES)))
        else:
            scene = next(scene for scene in layouts.SCENES if scene.name == "one_to_one")
            shape = layouts.model(scene, SIZES[size], layouts.CONTIGUOUS)
            settings = cards.Settings(config=(("log.level", "warning"),))
            yield stack.enter_context(cards.refit(scene, shape, cards.PEER, settings))


Moments = dict[str, dict[str, float]]  # by engine's rank, seconds by moment, after the first mover's beginning


def _moments(span: tuple[float, float], found: Sequence[Stamp]) -> Moments:
    inside = [one for one in found if span[0] <= one.at <= span[1] and one.key.startswith("engine")]
    begun = min((one.at for one in inside if one.name == "opened"), default=0.0)
    made: Moments = {}
    for one in inside:
        if one.name in MOMENTS:
            made.setdefault(one.key, {})[one.name] = one.at - begun
    return made


def summary(rounds: Sequence[Moments], nbytes: int, aim: float) -> dict[str, Any]:
    """Medians of the transfer (first mover's beginning to last bucket counted) in µs, and of each moment by rank.

    ``moments_max``: the last rank's. Raises BenchFailed where stamps are missing.
    """
    if any(not one or any("counted" not in rank for rank in one.values()) for one in rounds):
        raise BenchFailed(f"the stamps do not show every mover: {rounds[:1]}")
    moved = [max(rank["counted"] for rank in one.values()) for one in rounds]
    rate = nbytes / statistics.median(moved) / 1e9
    return {
        "moved_us": _us(moved), "moved_least_us": round(min(moved) * 1e6, 1), "rate": round(rate, 2), "aim": aim,
        "ratio": round(rate / aim, 3) if aim else None,
        "moments_us": {rank: _medians([one[rank] for one in rounds if rank in one]) for rank in sorted(rounds[0])},
        "all_us": [round(seconds * 1e6) for seconds in moved],
    }  # fmt: skip


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        name: _us([row[name] for row in rows if name in row]) for name in MOMENTS if any(name in row for row in rows)
    }


def _us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


if __name__ == "__main__":
    sys.exit(main())
