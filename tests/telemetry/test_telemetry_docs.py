"""The documents of this room say what the code says."""

from __future__ import annotations

import pathlib

from refitd.telemetry.reference import table
from refitd.telemetry.scrape import busy_node, series, shares

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


def test_what_a_fleet_costs_is_counted() -> None:
    """The table of 1,000 nodes follows from the number of series that each thing comes with, and its sum is right."""
    each, text = shares(), (DOCS / "metrics.md").read_text()
    counts = {"node": 1000, "bytes": 1000, "job": 1000, "replica": 1024}
    for name, count in counts.items():
        assert f"| {each[name]} | {count:,} x {each[name]} = {count * each[name]:,} |" in text
    total = sum(count * each[name] for name, count in counts.items()) + each["leader"]
    assert f"| sum | | {total:,} |" in text
    assert f"{total / 15:,.0f} samples a second" in text
    assert f"| of a job's leader: members and replicas by state | {each['leader']} | {each['leader']} |" in text
