"""The boards and the rules fit the program."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from refitd.telemetry.scrape import busy_node

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "dashboards"
BOARDS = ["fleet.json", "node.json"]
RULES, RULE_TESTS = FOLDER / "rules" / "refitd.yml", FOLDER / "rules" / "refitd.test.yml"
OTHERS = {"up", "ALERTS"}  # Prometheus' own


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in json.loads((FOLDER / name).read_text())["panels"] if panel["type"] != "row"]


def exprs(name: str) -> list[str]:
    return [target["expr"] for panel in panels(name) for target in panel["targets"]]


def rule_exprs() -> list[str]:
    """Every expression of the rules: what stands behind ``expr:``, on that line or indented below it."""
    found = re.findall(r"^ {8}expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)", RULES.read_text(), re.MULTILINE)
    return [block or line for block, line in found]


def records() -> list[str]:
    return re.findall(r"record: (\S+)", RULES.read_text())


def alerts() -> list[str]:
    return re.findall(r"alert: (\w+)", RULES.read_text())


def samples() -> dict[str, set[str]]:
    """Names of all samples that a busy daemon exports, with their labels."""
    found = {s.name: set(s.labels) for family in busy_node().registry.collect() for s in family.samples}
    return {name: labels | {"instance"} for name, labels in found.items()}


def test_the_boards_are_what_the_builder_makes() -> None:
    """The committed JSON is up to date, and --check says so."""
    result = subprocess.run([sys.executable, str(FOLDER / "build.py"), "--check"], capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize("board", BOARDS)
def test_a_stale_board_is_noticed(tmp_path: pathlib.Path, board: str) -> None:
    """--check fails when a committed file differs or is not there, and names it."""
    for file in (*FOLDER.glob("*.py"), *FOLDER.glob("*.json")):
        shutil.copy(file, tmp_path)
    command = [sys.executable, str(tmp_path / "build.py"), "--check"]
    (tmp_path / board).write_text((tmp_path / board).read_text().replace("Lane turns", "Turns"))
    expected = (1, f"{board} is stale: run python dashboards/build.py\n".encode())
    result = subprocess.run(command, capture_output=True)
    assert (result.returncode, result.stderr) == expected
    (tmp_path / board).unlink()
    result = subprocess.run(command, capture_output=True)
    assert (result.returncode, result.stderr) == expected


@pytest.mark.parametrize("board", BOARDS)
def test_every_panel_is_complete(board: str) -> None:
    """At most 12 panels; each has a unit, a description, the data source variable and a place of its own."""
    found = panels(board)
    assert 1 <= len(found) <= 12
    for panel in found:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    everything = json.loads((FOLDER / board).read_text())["panels"]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    cells = [(x, y) for p in everything for x in _span(p, "x", "w") for y in _span(p, "y", "h")]
    assert len(cells) == len(set(cells))


def test_the_boards_have_names_of_their_own() -> None:
    """Fixed and different uids, so that a board that is imported again replaces the old one."""
    uids = [json.loads((FOLDER / board).read_text())["uid"] for board in BOARDS]
    assert uids == ["refitd-fleet", "refitd-node"]


@pytest.mark.parametrize("source", [*BOARDS, "rules"])
def test_every_metric_that_is_asked_for_exists(source: str) -> None:
    """Each name in a query is a sample that a daemon exports, or a record; aggregations name labels that are there."""
    have = samples()
    for expr in rule_exprs() if source == "rules" else exprs(source):
        names = re.findall(r"(?<![\w{=\"])(?:[a-z_]+:)?(?:refitd_\w+|up|ALERTS)(?::\w+)?\b(?=[{\s)>=\[,]|$)", expr)
        assert names, expr
        for name in names:
            assert name in have or name in records() or name in OTHERS, (name, expr)
        labels = {label for group in re.findall(r"(?:by|without|on) \(([^)]*)\)", expr) for label in group.split(", ")}
        assert labels <= set().union(*have.values()), expr


@pytest.mark.parametrize("board", BOARDS)
def test_every_query_is_promql(tmp_path: pathlib.Path, board: str) -> None:
    """promtool parses each query once Grafana's variables are filled in."""
    filled = [
        expr.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$refit_job", ".*")
        for expr in exprs(board)
    ]
    rules = [{"record": f"board:query:n{number}", "expr": expr} for number, expr in enumerate(filled)]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"SUCCESS: {len(filled)} rules found" in promtool("check", "rules", str(file))


def test_the_rules_are_good() -> None:
    """promtool has nothing to say about the rules."""
    assert f"SUCCESS: {len(records()) + len(alerts())} rules found" in promtool("check", "rules", str(RULES))


def test_each_alert_fires_in_its_fault_and_not_in_health() -> None:
    """The unit tests of the rules pass; they ask for each alert three times in health, and once in its fault."""
    assert promtool("test", "rules", str(RULE_TESTS)) == "Unit Testing:  " + str(RULE_TESTS) + "\n  SUCCESS\n\n"
    tested = RULE_TESTS.read_text()
    for alert in alerts():
        assert len(re.findall(rf"alertname: {alert}, .*exp_alerts: \[\]", tested)) == 3
        assert len(re.findall(rf"- alertname: {alert}\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels:", tested)) == 1


def test_every_alert_says_what_to_do() -> None:
    """A name with the product, a severity, a fixed summary, and a runbook that is there."""
    text = RULES.read_text()
    anchors = {f"docs/operations.md#{title.lower()}" for title in _titles()}
    assert all(alert.startswith("Refitd") for alert in alerts())
    assert set(re.findall(r"severity: (\w+)", text)) == {"warning", "critical"}
    assert [url in anchors for url in re.findall(r"runbook_url: (\S+)", text)] == [True] * len(alerts())
    assert len(re.findall(r"summary: [^{}]*\.\n", text)) == len(alerts())


def _titles() -> list[str]:
    return re.findall(r"^#+ (.*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)


def _span(panel: dict[str, Any], start: str, length: str) -> range:
    place = panel["gridPos"]
    return range(place[start], place[start] + place[length])


def promtool(*arguments: str) -> str:
    """What promtool says; a fault is a failure."""
    program = shutil.which("promtool")
    if program is None:
        pytest.fail("no promtool on PATH: apt-get install prometheus")
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout
