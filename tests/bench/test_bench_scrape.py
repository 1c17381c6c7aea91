"""``refitd bench scrape``: what it prints, and that a node stays below its limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refitd.bench import main
from refitd.telemetry.scrape import busy_node, series


def test_a_scrape_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Series, bytes and milliseconds of real scrapes; limits are the baselines; processor time is far below."""
    out = tmp_path / "scrape.json"
    assert main(["scrape", "--repeats", "3", "--json", "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["series", "scrape_bytes", "scrape_cpu", "scrape_p50", "scrape_p99"]
    assert (rows["series"]["value"], rows["series"]["baseline"]) == (series(busy_node()), 2000)
    assert {rows[name]["baseline"] for name in ("scrape_cpu", "scrape_p50", "scrape_p99")} == {50.0}
    assert 50_000 < rows["scrape_bytes"]["value"] < 200_000
    assert 0 < rows["scrape_p50"]["value"] <= rows["scrape_p99"]["value"]
    assert document["command"] == "refitd bench scrape --repeats 3 --json"


def test_too_few_repeats_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2."""
    with pytest.raises(SystemExit) as exit_:
        main(["scrape", "--repeats", "1"])
    assert exit_.value.code == 2
    assert "--repeats: at least 2" in capsys.readouterr().err
