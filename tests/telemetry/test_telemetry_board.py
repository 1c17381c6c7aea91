"""The board and the unit fit the program."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from refitd import config
from refitd.telemetry.metrics import Metrics, ReplicaState

ROOT = pathlib.Path(__file__).parents[2]
BOARD = ROOT / "dashboards" / "refit.json"
UNIT = ROOT / "systemd" / "refitd.service"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]


def exprs() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_board_is_what_the_builder_makes() -> None:
    """The committed JSON is up to date, and --check says so."""
    result = subprocess.run([sys.executable, str(ROOT / "dashboards" / "build.py"), "--check"], capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_stale_board_is_noticed(tmp_path: pathlib.Path) -> None:
    """--check fails when the JSON differs."""
    shutil.copy(ROOT / "dashboards" / "build.py", tmp_path)
    (tmp_path / "refit.json").write_text(BOARD.read_text().replace("Lane turns", "Turns"))
    result = subprocess.run([sys.executable, str(tmp_path / "build.py"), "--check"], capture_output=True)
    assert (result.returncode, result.stderr) == (1, b"refit.json is stale: run python dashboards/build.py\n")


def test_every_panel_is_complete() -> None:
    """At most 12 panels; each has a unit, a description, the data source variable and a place of its own."""
    found = panels()
    assert 1 <= len(found) <= 12
    for panel in found:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    everything = json.loads(BOARD.read_text())["panels"]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    cells = [(x, y) for p in everything for x in _span(p, "x", "w") for y in _span(p, "y", "h")]
    assert len(cells) == len(set(cells))


def test_every_metric_on_the_board_exists() -> None:
    """Each name in a query is a sample that the daemon exports, with the labels that it is grouped by."""
    metrics = Metrics(lambda: [ReplicaState("r0", 1, 2)])
    samples = {s.name: set(s.labels) for family in metrics.registry.collect() for s in family.samples}
    for expr in exprs():
        names = re.findall(r"\brefitd_\w+", expr)
        assert names
        assert set(names) <= set(samples)
        for group in re.findall(r"by \(([^)]*)\)", expr):
            assert set(group.split(", ")) <= samples[names[0]] | {"instance"}


def test_every_query_is_promql(tmp_path: pathlib.Path) -> None:
    """promtool parses each query once Grafana's variables are filled in."""
    if shutil.which("promtool") is None:
        pytest.fail("no promtool on PATH: apt-get install prometheus")
    filled = [expr.replace("$__rate_interval", "1m").replace("$instance", ".*") for expr in exprs()]
    rules = [{"record": f"board:query:n{number}", "expr": expr} for number, expr in enumerate(filled)]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    result = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=20)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"SUCCESS: {len(filled)} rules found" in result.stdout


def test_the_unit_is_clean() -> None:
    """systemd finds nothing to say about the unit: it warns about unknown keys without failing."""
    command = [_systemd_analyze(), "verify", "--man=no", str(UNIT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_unit_is_confined() -> None:
    """systemd rates the unit's exposure at 2.0 or less."""
    command = [_systemd_analyze(), "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stdout[-200:]


def test_the_example_configuration_loads() -> None:
    """The example beside the unit is a valid configuration, with the paths that the unit makes."""
    loaded = config.load(ROOT / "systemd" / "refitd.toml", {}, {"node.name": "n0"})
    assert loaded.hook.socket == "/run/refitd/hook.sock"
    credentials = re.findall(r"^LoadCredential=([\w-]+):", UNIT.read_text(), re.MULTILINE)
    folder = "/run/credentials/refitd.service/"
    assert [loaded.store.password_file, loaded.data.secret_file] == [folder + name for name in credentials]


def _span(panel: dict[str, Any], start: str, length: str) -> range:
    place = panel["gridPos"]
    return range(place[start], place[start] + place[length])


def _systemd_analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.fail("no systemd-analyze on PATH: apt-get install systemd")
    return program
