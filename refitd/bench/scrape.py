"""``refitd bench scrape``: what a scrape of an 8-GPU node's daemon costs, next to what it may cost."""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from refitd.bench import outcome
from refitd.bench.machine import commit, machine
from refitd.bench.rows import Row, percentile, show
from refitd.telemetry.http import MetricsServer
from refitd.telemetry.scrape import busy_node, series

MAX_SERIES, MAX_MS = 2000, 50.0
LEAST_REPEATS = 2


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status (0 good, 2 usage)."""
    parser = argparse.ArgumentParser(prog="refitd bench scrape", description="Measure a scrape of a busy 8-GPU node.")
    parser.add_argument("--repeats", type=int, default=200, metavar="N", help="scrapes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    arguments = parser.parse_args(argv)
    if arguments.repeats < LEAST_REPEATS:
        parser.error(f"--repeats: at least {LEAST_REPEATS}")
    rows = measure(arguments.repeats)
    document = {
        "ok": True, "rows": [asdict(row) for row in rows], "machine": machine(), "repeats": arguments.repeats,
        "commit": commit(), "command": outcome.command("scrape", argv),
    }  # fmt: skip
    show(rows, machine(), document["commit"], arguments.json)
    return outcome.finished(document, arguments)


def measure(repeats: int) -> list[Row]:
    """Real scrapes over HTTP. ``scrape_cpu``: processor time of one, the client's part too, whatever else runs."""
    metrics = busy_node()
    server = MetricsServer("127.0.0.1", 0, metrics.registry)
    times, body, spent = [], b"", time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        with urllib.request.urlopen(server.url + "/metrics", timeout=5) as answer:
            body = answer.read()
        times.append((time.perf_counter() - start) * 1e3)
    spent = (time.process_time() - spent) / repeats * 1e3
    server.close()
    return [
        _limited("series", series(metrics), "series", MAX_SERIES),
        Row("scrape_bytes", len(body), "B"),
        _limited("scrape_cpu", spent, "ms", MAX_MS),
        _limited("scrape_p50", statistics.median(times), "ms", MAX_MS),
        _limited("scrape_p99", percentile(times, 0.99), "ms", MAX_MS),
    ]


def _limited(name: str, value: float, unit: str, limit: float) -> Row:
    """The baseline is what it may be at most."""
    return Row(name, value, unit, limit, limit / value)
