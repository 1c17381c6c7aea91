"""``refitd bench plan``: how long plans, programs and plans after a loss take, each case in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refitd.bench import outcome
from refitd.bench.machine import commit, machine
from refitd.bench.plan_cases import GROWTH
from refitd.bench.plan_plot import growth_plot
from refitd.bench.plan_rows import CASES, MIB, Row, case_rows, show
from refitd.errors import RefitdError
from refitd.layout.presets import PRESETS

CHILD_SECONDS = 600
Points = list[dict[str, float]]


class ChildFailed(RefitdError):
    """A process that timed one case did not come to its end."""


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status (0 good, 1 failed). A target that is not met is no failure. 2 on usage."""
    arguments = _parse(argv)
    try:
        document = _document(arguments, argv)
    except ChildFailed as error:
        return outcome.failed(error, arguments.json)
    if arguments.plot is not None:
        arguments.plot.write_text(growth_plot(document["growth"]), encoding="utf-8")
    return outcome.finished(document, arguments)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="refitd bench plan", description="Measure the planner on one core.")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="only this preset (default: all cases, and growth)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="timed repeats (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw growth with tensors, ranks and experts")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        parser.error("--repeats: at least 1")
    if arguments.plot is not None and arguments.preset is not None:
        parser.error("--plot: not with --preset, which measures no growth")
    return arguments


def _document(arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    rows: list[Row] = []
    load = os.getloadavg()[0]
    for name in CASES if arguments.preset is None else (arguments.preset,):
        rows += case_rows(name, measure(name, arguments.repeats))
    grown = {} if arguments.preset is not None else growth(arguments.repeats)
    show(rows, machine(), commit(), arguments.json)
    return {
        "ok": True, "rows": [asdict(row) for row in rows], "growth": grown, "machine": machine(),
        "load_at_start": load, "repeats": arguments.repeats, "commit": commit(),
        "command": outcome.command("plan", argv),
    }  # fmt: skip


def growth(repeats: int) -> dict[str, Points]:
    """Median milliseconds and peak MiB of plans that grow in one way each: by tensors, by ranks, by experts."""
    grown: dict[str, Points] = {}
    for what, cases in GROWTH.items():
        grown[what] = []
        for case in cases:
            found = measure(f"growth:{case.layers}:{case.experts}:{case.ranks}", repeats)
            at = {"tensors": found["tensors"], "ranks": found["ranks"], "experts": case.experts}
            took, cpu = (statistics.median(found[clock]["plan"]) * 1e3 for clock in ("seconds", "cpu"))
            grown[what].append({**at, "plan_ms": took, "plan_cpu_ms": cpu, "peak_mib": found["plan_peak_bytes"] / MIB})
    return grown


def measure(name: str, repeats: int) -> dict[str, Any]:
    """What `plan_child` says of a case. Raises ChildFailed."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "refitd.bench.plan_child", name, str(repeats)]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **threads, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=CHILD_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{name} took more than {CHILD_SECONDS} s") from None
    if done.returncode:
        raise ChildFailed(f"{name} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured
