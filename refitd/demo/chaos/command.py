"""The command line of the chaos runs: a cluster after another until everything was done, a table, and a record."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from refitd.demo.chaos.journal import Journal
from refitd.demo.chaos.network import sandbox_command, sandboxed
from refitd.demo.chaos.schedule import KINDS, waves

WHATS = ("faults", "points", "split", "recovery", "soak")
MAX_BROKEN = 3  # clusters that did not even come up
_COLUMNS = "{:22} {:>5} {:>5} {:>5} {:>5}  {:>15}  {}"


@dataclass
class Row:
    """What is known of one kind of fault."""

    runs: int = 0
    torn: int = 0
    lost: int = 0
    back: int = 0
    worst: float = 0.0
    failed: list[str] = field(default_factory=list)


@dataclass
class Tally:
    """All outcomes of a run."""

    seed: int
    network: str = ""
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    done: bool = False  # a cluster came to the end of its work
    points: list[list[str]] = field(default_factory=list)  # role, name, how it was brought about

    @property
    def faults(self) -> int:
        return sum(len(outcome["strikes"]) for outcome in self.outcomes)

    @property
    def good(self) -> bool:
        return not self.broken and not any(outcome["why"] for outcome in self.outcomes)

    def rows(self) -> dict[str, Row]:
        """By kind of fault. A wave of two faults counts for both."""
        rows = {kind.name: Row() for kind in KINDS}
        for outcome in self.outcomes:
            for strike in outcome["strikes"]:
                row = rows.setdefault(strike["kind"], Row())
                row.runs += 1
                row.torn, row.lost, row.back = (
                    row.torn + outcome["torn"], row.lost + outcome["lost"], row.back + outcome["back"],
                )  # fmt: skip
                row.worst = max(row.worst, outcome["recovery"] or 0.0)
                if outcome["why"]:
                    row.failed.append(
                        f"SEED={self.seed} wave {outcome['wave']} ({strike['victim']}): {outcome['why'][0]}"
                    )
        return {name: row for name, row in rows.items() if row.runs}

    def table(self) -> str:
        """The table that the run ends with."""
        head = _COLUMNS.format("fault", "runs", "torn", "lost", "back", "worst recovery", "failures")
        lines = [
            _COLUMNS.format(
                name, row.runs, row.torn, row.lost, row.back, f"{row.worst:.1f} s", "; ".join(row.failed) or "none"
            )
            for name, row in self.rows().items()
        ]
        return "\n".join([head, *lines])

    def to_json(self, seconds: float) -> dict[str, Any]:
        """What is recorded."""
        return {
            "ok": self.good, "seed": self.seed, "faults": self.faults, "waves": len(self.outcomes),
            "network": self.network, "seconds": round(seconds), "broken": self.broken,
            "torn": sum(o["torn"] for o in self.outcomes), "lost": sum(o["lost"] for o in self.outcomes),
            "back": sum(o["back"] for o in self.outcomes),
            "records": sum((Counter(o["records"]) for o in self.outcomes), Counter()),
            "table": {name: vars(row) for name, row in self.rows().items()},
            "failures": [outcome for outcome in self.outcomes if outcome["why"]],
        }  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 where it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m refitd.demo.chaos", description=__doc__)
    parser.add_argument("what", nargs="?", choices=WHATS, default="faults", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of faults: which, when, and in what order")
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="how many")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults, points or cases whose name contains it")
    parser.add_argument("--signal", choices=("KILL", "STOP"), help="points: one of the two (default: both)")
    parser.add_argument("--first", type=int, default=1, metavar="NUMBER", help="begin with this wave, or point")
    parser.add_argument("--network", choices=("auto", "proxies"), default="auto", help="how nodes are cut off")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="logs of clusters that failed")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the result there, with the commit")
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="points, split: leave out what FILE says has passed"
    )
    parser.add_argument("--runs", type=int, default=20, help="of recovery: how often each case")
    parser.add_argument("--turns", type=int, default=1000, help="of soak")
    parser.add_argument("--hold", type=Path, metavar="FILE", help="rest, between two faults, while this file is there")
    parser.add_argument("--session", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        next(waves(arguments.seed, arguments.faults, arguments.only if arguments.what == "faults" else ""))
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where anything was torn, lost, dead or too late."""
    arguments = parse(argv)
    if arguments.what == "soak":
        from refitd.demo.chaos.soak import main as soak

        return soak(arguments.turns)
    if arguments.session:
        return _play(arguments)
    if arguments.what == "recovery":
        return _recovery(arguments)
    began, tally = time.monotonic(), Tally(arguments.seed)
    first, journal, commit = arguments.first, Journal(arguments.journal), _commit()
    while not tally.done and len(tally.broken) < MAX_BROKEN:
        for line in _session(arguments, first):
            first = _take(tally, line, first)
            if "wave" in line:
                journal.note(line, commit)
    seconds = time.monotonic() - began
    table = tally.table() if arguments.what == "faults" else _points_table(tally)
    print(table)
    result = tally.to_json(seconds) | ({} if arguments.what == "faults" else {"points": tally.points})
    if arguments.journal:
        result["passed"] = len(journal.passed)
    if arguments.record:
        arguments.record.write_text(json.dumps({"commit": _commit(), **result}, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if tally.good else 1


def _play(arguments: argparse.Namespace) -> int:
    """In the process of one cluster."""
    passed = Journal(arguments.journal).passed
    if arguments.what == "points":
        from refitd.demo.chaos.points import main as points

        signals = [Signals[f"SIG{arguments.signal}"]] if arguments.signal else [Signals.SIGKILL, Signals.SIGSTOP]
        return points(arguments.only, signals, arguments.first, arguments.keep_logs, arguments.hold, passed)
    if arguments.what == "split":
        from refitd.demo.chaos.split import main as split

        return split(arguments.only, arguments.first, arguments.keep_logs, arguments.hold, passed)
    if arguments.what == "recovery":
        from refitd.demo.chaos.recovery import main as recovery

        return recovery(arguments.only, arguments.runs, arguments.keep_logs, arguments.hold)
    from refitd.demo.chaos.session import main as session

    return session(
        arguments.seed, arguments.faults, arguments.only, arguments.first, arguments.keep_logs, arguments.hold
    )


def _recovery(arguments: argparse.Namespace) -> int:
    """One cluster; a line for each case, and all of them as one object."""
    said: dict[str, Any] = {"commit": _commit()}
    for line in _session(arguments, 1):
        if "case" in line:
            said.setdefault("cases", []).append(line)
            print(json.dumps(line), flush=True)
        else:
            said |= line
    said["ok"] = said.pop("done")
    if arguments.record:
        arguments.record.write_text(json.dumps(said, indent=1) + "\n")
    print(json.dumps(said))
    return 0 if said["ok"] else 1


def _points_table(tally: Tally) -> str:
    reached = "\n".join(f"{who:12} {name:34} {how}" for who, name, how in tally.points)
    rows = [f"{name:34} {row.runs:4} runs  {len(row.failed)} failed  worst {row.worst:.1f} s  {'; '.join(row.failed)}"
            for name, row in tally.rows().items()]  # fmt: skip
    return "\n".join([reached, *rows])


def _take(tally: Tally, line: dict[str, Any], first: int) -> int:
    """Note what a session said; the wave to go on with."""
    tally.network, tally.points = line.get("network", tally.network), line.get("points", tally.points)
    tally.done = line.get("done", False)
    if "broken" in line:
        tally.broken.append(line["broken"])
    if "wave" not in line:
        return first
    tally.outcomes.append(line)
    good = f"all well again in {line['recovery']} s" if not line["why"] else f"FAILED: {'; '.join(line['why'])}"
    what = ", ".join(f"{strike['kind']} ({strike['victim']})" for strike in line["strikes"])
    print(f"{line['wave']}: {what}: {good}", file=sys.stderr, flush=True)
    return int(line["wave"]) + 1


def _session(arguments: argparse.Namespace, first: int) -> Iterator[dict[str, Any]]:
    """A cluster in a process (and, where that can be had, a network) of its own; the objects that it prints."""
    command = [sys.executable, "-m", "refitd.demo.chaos", arguments.what, "--session", "--seed", str(arguments.seed)]
    command += ["--signal", arguments.signal] if arguments.signal else []
    command += ["--faults", str(arguments.faults), "--only", arguments.only, "--first", str(first)]
    command += ["--runs", str(arguments.runs)]
    command += ["--hold", str(arguments.hold)] if arguments.hold else []
    command += ["--journal", str(arguments.journal)] if arguments.journal else []
    if arguments.keep_logs:
        command += ["--keep-logs", str(arguments.keep_logs / f"seed-{arguments.seed}-from-{first}")]
    environ, sandbox = dict(os.environ), sandbox_command() if arguments.network == "auto" else None
    if sandbox:
        command, environ = [*sandbox, *command], sandboxed(environ)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        failed = False
        for line in process.stdout:
            said = json.loads(line)
            failed |= bool(said.get("why") or said.get("broken"))
            yield said
    if process.returncode and not failed:
        yield {"broken": f"the driver of wave {first} ended with status {process.returncode}"}
    yield {"done": process.returncode == 0}


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()
