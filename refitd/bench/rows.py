"""From times to rows, and rows for people."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One number. ``ratio`` says how many times better than ``baseline`` it is; None where nothing compares."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` (0 to 1) of them do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def time_rows(name: str, seconds: Sequence[float], nbytes: int, rival: Sequence[float] | None) -> list[Row]:
    """Median in ms and in GB/s of moving ``nbytes``, next to the rival's median."""
    ours = statistics.median(seconds)
    theirs = statistics.median(rival) if rival else None
    ratio = theirs / ours if theirs else None
    return [
        Row(f"{name}_publish_to_commit", ours * 1e3, "ms", theirs and theirs * 1e3, ratio),
        Row(f"{name}_throughput", nbytes / ours / 1e9, "GB/s", theirs and nbytes / theirs / 1e9, ratio),
    ]


def small_rows(name: str, seconds: Sequence[float]) -> list[Row]:
    """Median and 90th percentile in ms."""
    return [
        Row(f"{name}_publish_to_commit", statistics.median(seconds) * 1e3, "ms"),
        Row(f"{name}_publish_to_commit_p90", percentile(seconds, 0.9) * 1e3, "ms"),
    ]


def rival_row(name: str, seconds: Sequence[float]) -> Row:
    """Median in ms."""
    return Row(name, statistics.median(seconds) * 1e3, "ms")


def peak_rows(name: str, peaks: Mapping[str, int]) -> list[Row]:
    """Peak memory of each process, MB."""
    return [Row(f"{name}_peak_{process}", nbytes / 1e6, "MB") for process, nbytes in peaks.items()]


def show(rows: Sequence[Row], machine: Mapping[str, object], commit: str, as_json: bool) -> None:
    """A table on a terminal, plain lines elsewhere; to stderr with ``as_json``, where stdout is for the object."""
    stream = sys.stderr if as_json else sys.stdout
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    if stream.isatty():
        _show_table(rows, Console(file=stream))
    else:
        print(*(line(row) for row in rows), sep="\n", file=stream)
    print(f"machine: {facts}\ncommit: {commit}", file=stream)


def _show_table(rows: Sequence[Row], console: Console) -> None:
    table = Table("", "value", "unit", "baseline", "ratio")
    for column in (1, 3, 4):
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(row.name, _number(row.value), row.unit, _number(row.baseline), _number(row.ratio))
    console.print(table)


def line(row: Row) -> str:
    """For people, where there is no terminal."""
    said = f"{row.name}: {_number(row.value)} {row.unit}"
    return said if row.baseline is None else f"{said} (baseline {_number(row.baseline)}, {_number(row.ratio)} times)"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
