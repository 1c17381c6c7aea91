"""The rules of dashboards/rules, made faster: an alert that waits minutes must come within seconds of a short run.

Two factors and nothing else: windows of rates are divided by `WINDOW`, so that five scrapes of `SCRAPE_SECONDS` are in
what was five minutes, and ``for:`` by `PATIENCE`, down to `LEAST_FOR`: a scrape that a busy machine misses is no
fault. Thresholds stay.
"""

from __future__ import annotations

import re
from pathlib import Path

WINDOW = 20
PATIENCE = 60
LEAST_FOR = 4.0  # seconds: more than one scrape
SCRAPE_SECONDS = 3  # a daemon whose loop stands answers after 2 s: the timeout of a scrape must be more
RULES = Path(__file__).parents[3] / "dashboards" / "rules" / "refitd.yml"

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def faster(text: str) -> str:
    """The rules with every window and every ``for:`` divided by its factor."""
    text = re.sub(r"\[(\d+)([smh])\]", lambda found: f"[{_milliseconds(_seconds(found) / WINDOW)}]", text)
    return re.sub(
        r"(?<=for: )(\d+)([smh])", lambda found: _milliseconds(max(_seconds(found) / PATIENCE, LEAST_FOR)), text
    )


def _seconds(found: re.Match[str]) -> int:
    return int(found[1]) * _SECONDS[found[2]]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"


def names(text: str, kind: str) -> list[str]:
    """Names of the rules of a kind, ``record`` or ``alert``, in their order."""
    return re.findall(rf"- {kind}: (\S+)", text)
