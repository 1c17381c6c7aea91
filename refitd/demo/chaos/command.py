"""The command line of a chaos run: a cluster after another until every fault was injected, a table, and a record."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refitd.demo.chaos.network import sandbox_command, sandboxed
from refitd.demo.chaos.schedule import KINDS, waves

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
                row = rows[strike["kind"]]
                row.runs += 1
                row.torn, row.lost, row.back = (
                    row.torn + outcome["torn"], row.lost + outcome["lost"], row.back + outcome["back"],
                )  # fmt: skip
                row.worst = max(row.worst, outcome["recovery"] or 0.0)
                if outcome["why"]:
                    row.failed.append(f"SEED={self.seed} wave {outcome['wave']}: {outcome['why'][0]}")
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
            "table": {name: vars(row) for name, row in self.rows().items()},
            "failures": [outcome for outcome in self.outcomes if outcome["why"]],
        }  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 where it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m refitd.demo.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which faults, when, and in what order")
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="how many")
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds whose name contains it")
    parser.add_argument("--first", type=int, default=1, metavar="WAVE", help="begin with this wave of the seed")
    parser.add_argument("--network", choices=("auto", "proxies"), default="auto", help="how nodes are cut off")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="logs of clusters that failed")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the result there, with the commit")
    parser.add_argument("--session", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        next(waves(arguments.seed, arguments.faults, arguments.only))
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where anything was torn, lost, dead or too late."""
    arguments = parse(argv)
    if arguments.session:
        from refitd.demo.chaos.session import main as session

        return session(arguments.seed, arguments.faults, arguments.only, arguments.first, arguments.keep_logs)
    began, tally = time.monotonic(), Tally(arguments.seed)
    total = sum(1 for _ in waves(arguments.seed, arguments.faults, arguments.only))
    first = arguments.first
    while first <= total and len(tally.broken) < 3:
        for line in _session(arguments, first):
            first = _take(tally, line, first)
    print(tally.table())  # noqa: T201
    result = tally.to_json(time.monotonic() - began)
    if arguments.record:
        arguments.record.write_text(json.dumps({"commit": _commit(), **result}, indent=1) + "\n")
    print(json.dumps(result))  # noqa: T201
    return 0 if tally.good else 1


def _take(tally: Tally, line: dict[str, Any], first: int) -> int:
    """Note what a session said; the wave to go on with."""
    tally.network = line.get("network", tally.network)
    if "broken" in line:
        tally.broken.append(line["broken"])
    if "wave" not in line:
        return first
    tally.outcomes.append(line)
    good = f"all well again in {line['recovery']} s" if not line["why"] else f"FAILED: {'; '.join(line['why'])}"
    print(f"wave {line['wave']}, {tally.faults} faults: {good}", file=sys.stderr, flush=True)  # noqa: T201
    return int(line["wave"]) + 1


def _session(arguments: argparse.Namespace, first: int) -> Iterator[dict[str, Any]]:
    """A cluster in a process (and, where that can be had, a network) of its own; the objects that it prints."""
    command = [sys.executable, "-m", "refitd.demo.chaos", "--session", "--seed", str(arguments.seed)]
    command += ["--faults", str(arguments.faults), "--only", arguments.only, "--first", str(first)]
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


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()
