"""Times one case in a process of its own, which has one thread: ``python -m refitd.bench.plan_child CASE REPEATS``.

Prints one JSON object: ``seconds`` and ``cpu`` (lists by what was done: on the clock, and of this process),
``plan_peak_bytes`` and ``peak_bytes`` (most resident memory, after the plans and at the end), ``tensors``, ``ranks``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from refitd.bench.plan_cases import find_case
from refitd.plan import SidePlan, lose, plan_sides
from refitd.planning.cases import Sides

NODE = 8
T = TypeVar("T")


class Times(NamedTuple):
    """Seconds by what was done."""

    clock: dict[str, list[float]]
    cpu: dict[str, list[float]]


def main(name: str, repeats: int) -> None:
    """Time ``repeats`` plans after a first one, which is listed apart: it also fills the caches of the catalogue."""
    case, times, peak, report = find_case(name), Times({}, {}), 0, {}
    for turn in range(repeats + 1):
        sides = case.make()
        gc.collect()
        plan = _timed(times, "plan" if turn else "first_plan", partial(plan_sides, *sides, case.topology))
        peak, report = max(peak, peak_bytes()), dict(plan.report)
        if case.whole:
            _rest(plan, sides, times)
    facts = {"plan_peak_bytes": peak, "peak_bytes": peak_bytes()}
    print(
        json.dumps(
            {"seconds": times.clock, "cpu": times.cpu, **facts, "tensors": report["tensors"], "ranks": report["ranks"]}
        )
    )


def _rest(plan: SidePlan, sides: Sides, times: Times) -> None:
    """Programs of one rank of each side, each the first of its plan, and what is left after a node is lost."""
    source, destination = sides
    _timed(times, "destination", partial(plan.program, destination.ranks[0]))
    _timed(times, "destination_again", partial(plan.program, destination.ranks[1]))
    _timed(times, "lose", partial(lose, plan, destination.ranks[:NODE], 0.5))
    _timed(times, "source", partial(plan.program, source.ranks[-1]))


def _timed(times: Times, name: str, do: Callable[[], T]) -> T:
    began, cpu = time.perf_counter(), time.process_time()
    result = do()
    times.clock.setdefault(name, []).append(time.perf_counter() - began)
    times.cpu.setdefault(name, []).append(time.process_time() - cpu)
    return result


def peak_bytes() -> int:
    """The most memory that this process ever had resident (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
