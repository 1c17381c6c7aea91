"""``python -m tests.sim [SEEDS]``: seeds as ``17``, ``0:2000`` or ``3,5,9``; ``--help`` for the rest.

Prints failures with the seed that repeats them, the table of states and faults, and one line of totals; exit status 1
where an invariant did not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections import Counter

from .batch import ENOUGH, Result, play_all, short, table, workers


def parse(text: str) -> list[int]:
    """``17``, ``0:2000``, ``3,5,9:12``."""
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        found += range(int(first), int(last)) if colon else [int(first)]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0:200")
    parser.add_argument("--workers", type=int, default=workers())
    parser.add_argument("--story", action="store_true", help="the end of each failed seed's trace")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--cells", action="store_true", help=f"fail where a cell was hit less than {ENOUGH} times")
    parser.add_argument("--scale", action="store_true", help="1,024 nodes and 64 lanes: what turns cost the store")
    parser.add_argument("--nodes", type=int, default=1024, help="with --scale")
    parser.add_argument("--lanes", type=int, default=64, help="with --scale")
    parser.add_argument("--turns", type=int, default=0, help="so many turns, and what has grown by then")
    options = parser.parse_args(arguments)
    if options.turns:
        return endurance(options.turns)
    if options.scale:
        from .scale import report

        return report(parse(options.seeds), options.nodes, options.lanes)
    return batch(options)


def endurance(count: int) -> int:
    from .endurance import endure, grown

    before, after, turned = endure(1, count)
    more = grown(before, after)
    tasks = sum(size for key, size in after.items() if key.endswith("tasks"))
    found = {"turns": turned, "store_keys": after["store keys"], "descriptors": after["descriptors"], "tasks": tasks}
    print(json.dumps({**found, "grown": more}))
    return 1 if more else 0


def batch(options: argparse.Namespace) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # either stops it, with what it has
        signal.signal(number, signal.default_int_handler)
    hits: Counter[tuple[str, str]] = Counter()
    counts: Counter[str] = Counter()
    failed: list[Result] = []
    slowest, runs, events, digests = 0.0, 0, 0, hashlib.blake2b(digest_size=16)
    try:
        for result in play_all(parse(options.seeds), options.workers):
            runs, events = runs + 1, events + result.events
            digests.update(result.digest.encode())
            hits.update(result.hits)
            counts.update(result.counts)
            slowest = max(slowest, result.recovery)
            if result.failure:
                failed.append(result)
                print(f"FAILED {result.failure}\n  repeat: make sim SEEDS={result.seed}", flush=True)
                if options.story:
                    print(result.story)
            if runs % 50 == 0:
                print(f"{runs} seeds, {len(failed)} failed", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped; so far:", file=sys.stderr)
    print(table(hits))
    few = short(hits)
    print(f"{len(few)} cells with less than {ENOUGH} hits" + (f": {'; '.join(few)}" if len(few) < 40 else ""))
    shown = ("commits", "turns", "parked", "switches", "answers", "offers RELEASED", "offers SKIPPED")
    totals = {
        "runs": runs, "failed": [r.seed for r in failed], "faults": hits.total(), "events": events,
        "short_cells": len(few), "worst_recovery_seconds": round(slowest, 2), "digests": digests.hexdigest(),
        **{key: counts[key] for key in shown},
    }  # fmt: skip
    print(json.dumps(totals) if options.json else "  ".join(f"{key} {value}" for key, value in totals.items()))
    return 1 if failed or (options.cells and few) else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names are walked in the same order everywhere
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
