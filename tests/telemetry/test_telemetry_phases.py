"""Under which outcome a phase, and under which cause a turn, is counted."""

from __future__ import annotations

import pytest

from refitd.daemon.lane import _cause, _outcome
from refitd.epoch.records import PubId
from refitd.epoch.stage import Stage
from refitd.telemetry.metrics import CAUSES, OUTCOMES

OLD, NEW = PubId(1, 5), PubId(1, 9)


@pytest.mark.parametrize(
    ("left", "now", "outcome"),
    [
        (("prepare", OLD), ("transfer", OLD), "ok"),
        (("transfer", OLD), ("commit", OLD), "ok"),
        (("commit", OLD), ("committed", OLD), "ok"),
        (("prepare", OLD), ("prepare", NEW), "superseded"),
        (("transfer", OLD), ("gone", None), "failed"),
        (("transfer", OLD), ("build", OLD), "failed"),
        (("commit", OLD), ("failed", OLD), "failed"),
    ],
)
def test_a_phase_ends_well_where_the_lane_went_on(
    left: tuple[str, PubId], now: tuple[str, PubId | None], outcome: str
) -> None:
    """Forwards is ok, another publication supersedes, and anything else must be done again."""
    assert _outcome(Stage(*left, ""), Stage(*now, "")) == outcome
    assert outcome in OUTCOMES


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("the replica is whole; its own ranks hold it", "join"),
        ("members changed: +(engine/r0/1)", "join"),
        ("members changed: -(engine/r0/1)", "death"),
        ("members changed: -(engine/r0/1) +(engine/r0/1)", "death"),
        ("sources changed: -(trainer/a/0, trainer/a/1) +(trainer/b/0)", "generation"),
        ("sources changed: -(trainer/a/0, trainer/a/1)", "death"),
        ("again, after n1: no progress", "failure"),
    ],
)
def test_a_turn_has_a_cause(reason: str, cause: str) -> None:
    """The leader's words say who came and who went."""
    assert _cause(reason) == cause
    assert cause in CAUSES
