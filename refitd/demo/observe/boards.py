"""The boards as they are committed: panels, and their queries with Grafana's variables filled in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refitd.demo.observe.rules import SCRAPE_SECONDS

FOLDER = Path(__file__).parents[3] / "dashboards"
BOARDS = ("fleet", "node")
RATE_SECONDS = 5 * SCRAPE_SECONDS  # Grafana takes four scrapes and the width of a pixel


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``place``: x, y, width, height in Grafana's units; ``queries``: (PromQL, legend)."""

    title: str
    kind: str
    place: tuple[int, int, int, int]
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool
    steps: tuple[tuple[float, str], ...]  # of a number: from which value on it has which colour

    def color(self, value: float) -> str:
        """Grafana's name of the colour of a number."""
        return [name for start, name in self.steps if value >= start][-1]


@dataclass(frozen=True, slots=True)
class Board:
    """A board: ``rows`` are the titles of rows, with their y."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    rows: tuple[tuple[int, str], ...]


def read(name: str) -> Board:
    """The board ``fleet`` or ``node``."""
    board = json.loads((FOLDER / f"{name}.json").read_text())
    rows = tuple((panel["gridPos"]["y"], panel["title"]) for panel in board["panels"] if panel["type"] == "row")
    panels = tuple(_panel(panel) for panel in board["panels"] if panel["type"] != "row")
    return Board(name, board["title"], panels, rows)


def filled(expr: str) -> str:
    """A query with "all" chosen for every variable."""
    for name in ("$refit_job", "$instance"):
        expr = expr.replace(name, ".+")
    return expr.replace("$__rate_interval", f"{RATE_SECONDS}s")


def queries() -> Iterator[tuple[str, str]]:
    """(name, PromQL) of every query of every panel of all boards; a panel's second query is its "B"."""
    for board in map(read, BOARDS):
        for panel in board.panels:
            for number, (expr, _legend) in enumerate(panel.queries):
                yield f"{board.name}: {panel.title}" + f" {chr(ord('A') + number)}" * (len(panel.queries) > 1), expr


def _panel(found: dict[str, Any]) -> Panel:
    defaults, at = found["fieldConfig"]["defaults"], found["gridPos"]
    steps = defaults.get("thresholds", {}).get("steps", ())
    return Panel(
        found["title"], found["type"], (at["x"], at["y"], at["w"], at["h"]), defaults["unit"],
        tuple((filled(target["expr"]), target["legendFormat"]) for target in found["targets"]),
        defaults.get("custom", {}).get("drawStyle") == "bars",
        tuple((float("-inf") if step["value"] is None else step["value"], step["color"]) for step in steps),
    )  # fmt: skip
