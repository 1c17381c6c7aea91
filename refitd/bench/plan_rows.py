"""From times of the planner to rows with their targets, and rows for people."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
DEEPSEEK = "deepseek-v3-h100"
ROW_TO_COLUMN, FLAT = "row_to_column", "flat_to_engines"
THOUSAND = ("qwen3.8-2.4t-gb200", "kimi-k3-gb200")
TWO_THOUSAND = ("qwen3.8-2.4t-gb200-2048", "kimi-k3-gb200-2048")
CASES = (DEEPSEEK, ROW_TO_COLUMN, FLAT, *THOUSAND, *TWO_THOUSAND)

# Most milliseconds of (case, what), and most MiB of a case.
TARGETS: Mapping[tuple[str, str], float] = {
    (DEEPSEEK, "plan"): 100.0,
    (DEEPSEEK, "destination"): 40.0,
    (DEEPSEEK, "source"): 40.0,
    (DEEPSEEK, "lose"): 50.0,
    (ROW_TO_COLUMN, "plan"): 1.0,
    (FLAT, "plan"): 1000.0,
    **{(name, "plan"): 500.0 for name in THOUSAND},
    **{(name, "plan"): 2500.0 for name in TWO_THOUSAND},
}
PEAK_TARGETS: Mapping[str, float] = dict.fromkeys(THOUSAND, 1024.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One number and the most that it may be (``target``). ``cpu``: the same as CPU time of the process, which other
    work on the machine disturbs less. ``baseline`` and ``ratio`` are as in all benchmarks; here there is none.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    cpu: float | None = None


def make_row(name: str, value: float, unit: str, target: float | None, cpu: float | None = None) -> Row:
    """A row that knows whether it meets its target."""
    return Row(name, value, unit, target=target, met=None if target is None else value <= target, cpu=cpu)


def case_rows(name: str, measured: Mapping[str, Any]) -> list[Row]:
    """Medians in ms of all that was timed of a case, and its peak memory in MiB."""
    found = [
        make_row(f"{name}.{what}", _median(times), "ms", TARGETS.get((name, what)), _median(measured["cpu"][what]))
        for what, times in measured["seconds"].items()
    ]
    return [*found, make_row(f"{name}.peak", measured["peak_bytes"] / MIB, "MiB", PEAK_TARGETS.get(name))]


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def show(rows: Sequence[Row], machine: Mapping[str, object], commit: str, as_json: bool) -> None:
    """A line for each row; to stderr with ``as_json``, where stdout is for the object."""
    stream = sys.stderr if as_json else sys.stdout
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        said = "" if row.target is None else f"  at most {row.target:g}: {'met' if row.met else 'NOT MET'}"
        cpu = "" if row.cpu is None else f" ({row.cpu:.3f} of CPU)"
        print(f"{row.name:<{width}}  {row.value:10.3f} {row.unit}{cpu}{said}", file=stream)
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    print(f"machine: {facts}\ncommit: {commit}", file=stream)
