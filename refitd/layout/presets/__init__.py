"""Named pairs of sides: trainers and engines of real sizes, for plans and benchmarks."""

from __future__ import annotations

from refitd.errors import InputError
from refitd.layout.presets.table import PRESETS, Preset
from refitd.layout.side import Side

__all__ = ["PRESETS", "Preset", "preset"]


def preset(name: str) -> tuple[Side, Side]:
    """Source and destination side of a preset. Raises InputError on an unknown name."""
    found = PRESETS.get(name)
    if found is None:
        raise InputError("preset", f"one of {', '.join(PRESETS)}", name)
    return found.sides()
