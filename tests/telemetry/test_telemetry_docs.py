"""The documents of this room say what the code says."""

from __future__ import annotations

import json
import pathlib

import pytest

from refitd.telemetry import scrape
from refitd.telemetry.reference import table
from refitd.telemetry.scrape import busy_node, series

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_reference_of_metrics_is_made_from_the_code() -> None:
    """docs/metrics.md has the table that the code makes."""
    text = (DOCS / "metrics.md").read_text()
    assert text.partition("<!-- table -->\n")[2].partition("<!-- end -->")[0] == table()


def test_the_number_of_series_in_the_docs_is_counted() -> None:
    """What the documents say of a node's series is what a scrape has."""
    number = series(busy_node())
    assert f"{number} series" in (DOCS / "metrics.md").read_text()
    assert f"exports {number} series" in (DOCS / "dashboards.md").read_text()


def test_the_cost_of_a_scrape_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints series, bytes and milliseconds of real scrapes."""
    monkeypatch.setattr(scrape, "SCRAPES", 3)
    assert scrape.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["series"] == series(busy_node())
    assert found["bytes"] > 50_000
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["cpu_ms"] > 0
