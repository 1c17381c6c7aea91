"""Every fault of the demo on the small model, one run each: ``python -m refitd.demo.matrix``."""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from refitd.demo.faults import PLANTS, VICTIMS
from refitd.failpoints import PHASES

SIGNALS = ("KILL", "STOP")
DEADLINE_SECONDS = 150
TAIL_CHARACTERS = 8000


@dataclass(frozen=True)
class Case:
    """One run of the demo: ``name`` is phase-victim-signal, or the plant."""

    name: str
    arguments: tuple[str, ...]
    planted: bool = False


@dataclass
class Outcome:
    """How a case went; ``why`` is empty where it is good."""

    name: str
    why: str
    seconds: float
    recover_seconds: float | None
    torn: int | None
    tail: str = ""  # the end of what a failed run printed


def cases(only: str = "") -> list[Case]:
    """All cases whose name contains ``only``."""
    found = [
        Case(f"{phase}-{victim}-{number}", ("--kill", phase, "--victim", victim, "--signal", number))
        for phase, victim, number in itertools.product(PHASES, VICTIMS, SIGNALS)
    ]
    found += [Case(plant, ("--plant", plant), planted=True) for plant in PLANTS]
    return [case for case in found if only in case.name]


def judge(case: Case, status: int, result: dict[str, Any]) -> str:
    """What is wrong with a result; empty where it is as it must be."""
    if case.planted:
        return "" if result.get("torn", 0) >= 1 else "the planted fault was not noticed"
    if status != 0 or not result.get("ok"):
        return "; ".join(map(str, result.get("reasons", []))) or f"exit status {status}"
    wrong = [key for key, good in (("bit_exact", True), ("torn", 0), ("recovered", True)) if result.get(key) != good]
    return f"unexpected {', '.join(wrong)}" if wrong else ""


def run(case: Case, refits: int, logs: Path | None = None) -> Outcome:
    """Run one case in a process of its own; logs go to a folder of its name in ``logs``."""
    began = time.monotonic()
    command = [sys.executable, "-m", "refitd.cli", "demo", "--json", "--refits", str(refits), *case.arguments]
    command += ["--deadline", str(DEADLINE_SECONDS)]
    if logs is not None:
        command += ["--keep-logs", str(logs / case.name)]
    tail = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS + 50, check=False)
        lines = done.stdout.strip().splitlines()
        result = json.loads(lines[-1]) if lines else {}
        why = judge(case, done.returncode, result)
        tail = (done.stdout + done.stderr)[-TAIL_CHARACTERS:] if why else ""
    except subprocess.TimeoutExpired:
        result, why = {}, f"not finished after {DEADLINE_SECONDS + 50} s"
    except ValueError:
        result, why = {}, "no JSON on the last line"
    seconds = round(time.monotonic() - began, 1)
    return Outcome(case.name, why, seconds, result.get("recover_seconds"), result.get("torn"), tail)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case and one JSON object last; the exit status is 1 where any case failed."""
    parser = argparse.ArgumentParser(prog="python -m refitd.demo.matrix", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it (phase-victim-signal)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time")
    parser.add_argument("--refits", type=int, default=4, metavar="N", help="publications that each case must commit")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="a folder of logs for each case")
    arguments = parser.parse_args(argv)
    chosen = cases(arguments.only)
    if not chosen:
        parser.error(f"--only: no case is called {arguments.only!r}")
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda case: run(case, arguments.refits, arguments.keep_logs), chosen):
            outcomes.append(outcome)
            _show(outcome)
    good = all(not outcome.why for outcome in outcomes)
    print(json.dumps({"ok": good, "cases": [asdict(outcome) for outcome in outcomes]}))
    return 0 if good else 1


def _show(outcome: Outcome) -> None:
    recovered = "" if outcome.recover_seconds is None else f"recovered in {outcome.recover_seconds:6.2f} s"
    verdict = f"FAILED  {outcome.why}" if outcome.why else "good"
    print(f"{outcome.name:24} {outcome.seconds:6.1f} s  {recovered:24} {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
