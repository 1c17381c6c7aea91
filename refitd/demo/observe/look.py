"""How boards look: colours of a light and a dark theme, units as Grafana writes them, legends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.ticker import EngFormatter

_FONTS = ["Inter", "DejaVu Sans"]


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours. ``lines`` differ in lightness too, for those who do not tell hues apart; ``named``: Grafana's names."""

    name: str
    page: str
    panel: str
    edge: str
    grid: str
    ink: str
    faint: str
    shade: str
    lines: tuple[str, ...]
    named: Mapping[str, str]

    def style(self) -> AbstractContextManager[Any]:
        """Text of matplotlib in this theme."""
        return mpl.rc_context({"font.family": _FONTS, "text.color": self.ink, "legend.labelcolor": self.ink})


LIGHT = Theme(
    "light", "#f4f5f5", "#ffffff", "#d8d9da", "#e6e7e8", "#1b1e23", "#5f6670", "#e4e0f0",
    ("#1f60c4", "#d9480f", "#1a7f37", "#a0378f", "#b58900", "#0a9cb8", "#6b4fbb", "#c4162a", "#5c6670", "#7a4f1d"),
    {"green": "#1a7f37", "orange": "#c2570c", "red": "#c4162a"},
)  # fmt: skip
DARK = Theme(
    "dark", "#111217", "#181b1f", "#2c3235", "#2a2e34", "#e4e6ea", "#9fa7b3", "#3a3350",
    ("#5794f2", "#ff9830", "#73bf69", "#e07bd0", "#fade2a", "#4fd1d9", "#b877d9", "#f2495c", "#b0b7c3", "#c98d4e"),
    {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"},
)  # fmt: skip
THEMES = (LIGHT, DARK)

_UNITS = {"Bps": "B/s", "ops": "/s", "reqps": "/s", "s": "s", "short": ""}
_NUMBER = {name: EngFormatter(unit, places=None, sep=" " if unit else "") for name, unit in _UNITS.items()}


def shown(value: float, unit: str) -> str:
    """A value in a unit of Grafana's: ``250 ms``, ``1.5 MB/s``, ``50 %``."""
    if unit == "percentunit":
        return f"{float(f'{value * 100:.3g}'):g} %"
    rounded = float(f"{value:.3g}")
    if unit in ("ops", "reqps", "short") and abs(rounded) < 1:
        return f"{rounded:g} {_UNITS[unit]}".strip()
    return _NUMBER[unit](rounded).strip()


def legend(text: str, labels: Mapping[str, str]) -> str:
    """Grafana's legend with the labels of a series put in."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), text)
