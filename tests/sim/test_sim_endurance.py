"""I8 in the simulation: what is held after many turns is what was held after a few."""

from __future__ import annotations

import pytest

from .endurance import endure, grown


@pytest.mark.timeout(600)
def test_i8_nothing_grows_with_turns() -> None:
    """90 turns: store keys, descriptors, tasks, lanes in movers, and every table of the daemons."""
    before, after, turned = endure(1, 90)
    assert turned >= 90
    assert grown(before, after) == {}
