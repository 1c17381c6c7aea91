"""What the run has shown: a row for every query of the boards, every record, every alert, and what promtool says."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from refitd.demo.observe import boards
from refitd.demo.observe.load import Load
from refitd.demo.observe.prometheus import Prometheus
from refitd.demo.observe.rules import SCRAPE_SECONDS, names
from refitd.demo.observe.run import Run, Span


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that had to be shown."""

    kind: str
    name: str
    good: bool
    result: str


def rows(run: Run, prometheus: Prometheus, rules: str) -> Iterator[Row]:
    """Panels, records and alerts."""
    asked = [("panel", *query) for query in boards.queries()]
    asked += [("record", name, name) for name in names(rules, "record")]
    for kind, name, expr in asked:
        counts = [_series(prometheus, expr, span) for span in (run.healthy, run.faulty)]
        result = "{} series in health, {} in faults".format(*counts)
        yield Row(kind, name, any(counts), result)
    early = prometheus.firing(run.healthy.start, run.healthy.end)
    for name in names(rules, "alert"):
        yield _alert(name, run.faults, early)
    for span in run.faults:
        if span.trouble:
            yield Row("check", f"all is well after: {span.words}", good=False, result=span.trouble)
    for what in run.undrawn:
        yield Row("check", "pictures of the status page", good=False, result=what)


def _series(prometheus: Prometheus, expr: str, span: Span) -> int:
    """How many series of an expression had a number at some time of a span."""
    return len(prometheus.over(expr, span.start, span.end, SCRAPE_SECONDS)) if span.end > span.start else 0


def _alert(name: str, faults: list[Span], early: dict[str, float]) -> Row:
    """An alert must fire in the fault that it is meant for, and must not in health."""
    for span in faults:
        if name in span.alerts and name in span.fired and name not in early:
            return Row("alert", name, good=True, result=f"after {span.fired[name]:.0f} s of: {span.words}")
    meant = next((span.words for span in faults if name in span.alerts), "no fault of this run")
    why = "it fired in health" if name in early else f"it did not fire in: {meant}"
    return Row("alert", name, good=False, result=why)


def pages(load: Load) -> Iterator[Row]:
    """What promtool says of each daemon's metrics now."""
    for node, address in load.wires.metrics.items():
        name = f"promtool check metrics of {node}"
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                page = answer.read()
        except OSError as error:
            yield Row("check", name, good=False, result=str(error))
        else:
            yield _promtool(name, ["check", "metrics"], page)


def rule_file(path: Path) -> Row:
    """What promtool says of the rules that the run has used."""
    return _promtool("promtool check rules", ["check", "rules", str(path)], b"")


def _promtool(name: str, arguments: list[str], page: bytes) -> Row:
    result = subprocess.run(["promtool", *arguments], input=page, capture_output=True, check=False)
    said = (result.stdout + result.stderr).decode().strip().splitlines()
    return Row("check", name, result.returncode == 0, "clean" if result.returncode == 0 else "; ".join(said)[:200])


def invariants(load: Load) -> Iterator[Row]:
    """What must hold whatever happens."""
    torn, dead = load.book.torn + load.book.back, load.scene.dead()
    yield Row("check", "no replica served a mix, or went back", not torn, "; ".join(torn[:3]) or "none did")
    yield Row("check", "nobody died whom no fault killed", not dead, "; ".join(dead[:3]) or "nobody did")


def table(found: list[Row]) -> str:
    """For people."""
    width = max(len(row.name) for row in found)
    return "\n".join(f"{'ok ' if row.good else 'NOT'}  {row.kind:6}  {row.name:{width}}  {row.result}" for row in found)
