"""``python -m refitd.demo.observe``: every panel, record and alert against a real Prometheus; pictures of it all."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from refitd.demo import text, weights
from refitd.demo.chaos.book import Book
from refitd.demo.model import settle
from refitd.demo.nursery import Nursery
from refitd.demo.observe import verdict
from refitd.demo.observe.load import Load
from refitd.demo.observe.prometheus import Prometheus
from refitd.demo.observe.rules import PATIENCE, RULES, SCRAPE_SECONDS, WINDOW, faster
from refitd.demo.observe.run import OLDER, Run
from refitd.demo.observe.verdict import Row
from refitd.demo.scene import client_body, keep_logs


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 where it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m refitd.demo.observe", description=__doc__)
    parser.add_argument("--healthy", type=float, default=60.0, metavar="SECONDS", help="default: %(default)g")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose words contain it (others are missing)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw boards and status page there")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="copy all logs there")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where anything is missing, or fired in health."""
    arguments = parse(argv)
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    settle()
    spec, began = weights.SMALL, time.monotonic()
    start = weights.make(spec)
    ids, _mask = text.encode(text.SENTENCES, None, spec.vocab)
    nursery = Nursery.start(client_body(spec, start, ids))
    folder = Path(tempfile.mkdtemp(prefix="refitd-observe-"))
    try:
        found = asyncio.run(_observe(arguments, folder, nursery, Book(spec, start)))
        if arguments.keep_logs:
            keep_logs(folder, arguments.keep_logs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = all(row.good for row in found)
    print(verdict.table(found))
    if arguments.json:
        facts = {"ok": good, "seconds": round(time.monotonic() - began), "window": WINDOW, "patience": PATIENCE}
        print(json.dumps({**facts, "rows": [asdict(row) for row in found]}))
    return 0 if good else 1


async def _observe(arguments: argparse.Namespace, folder: Path, nursery: Nursery, book: Book) -> list[Row]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    data = folder / "prometheus"
    data.mkdir()
    rules, load = faster(RULES.read_text()), Load(folder, nursery, book)
    with Prometheus(data, rules, load.wires.metrics, SCRAPE_SECONDS) as prometheus:
        run = Run(folder, load, prometheus, arguments.pictures)
        try:
            await load.start()
            await asyncio.to_thread(prometheus.wait_ready)
            await run.health(arguments.healthy)
            await run.suffer(arguments.only)
            found = [*verdict.pages(load), verdict.rule_file(data / "rules.yml"), *verdict.invariants(load)]
        finally:
            await load.stop()
        if arguments.pictures:
            _draw(run, prometheus, arguments.pictures)
        return [*verdict.rows(run, prometheus, rules), *found]


def _draw(run: Run, prometheus: Prometheus, folder: Path) -> None:
    from refitd.demo.observe.picture import draw  # matplotlib: only for those who want pictures

    shaded = [span for span in run.faults if span.words != OLDER]  # that one lasts as long as all others
    for span, faults in ((run.healthy, []), (run.faulty, shaded)):
        draw(prometheus, folder, "healthy" if span is run.healthy else "faulty", span, faults)
