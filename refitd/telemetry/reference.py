"""``python -m refitd.telemetry.reference``: every metric of a daemon as a table in Markdown, for docs/metrics.md."""

from __future__ import annotations

import sys

from refitd.telemetry.scrape import busy_node

_PREFIX = "refitd_"


def table() -> str:
    """One row a metric: its name as it is queried, type, labels, and help."""
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for family in sorted(busy_node().registry.collect(), key=lambda family: family.name):
        if family.name.startswith(_PREFIX):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
            shown = ", ".join(f"`{label}`" for label in labels)
            rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
