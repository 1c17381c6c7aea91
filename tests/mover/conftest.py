"""Fixtures of the mover's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from mover_rig import Rig, Sketch


@pytest.fixture
def rig() -> Iterator[Callable[[Sketch], Rig]]:
    """Makes rigs and closes them after the test."""
    made: list[Rig] = []

    def make(sketch: Sketch) -> Rig:
        made.append(Rig(sketch))
        made[-1].fill()
        return made[-1]

    yield make
    for one in made:
        one.close()
