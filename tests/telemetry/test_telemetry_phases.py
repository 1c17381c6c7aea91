"""Under which outcome a phase, and under which cause a turn, is counted."""

from __future__ import annotations

import pytest

from refitd.daemon.counting import cause_of, outcome_of
from refitd.epoch.records import Lane, PubId, SlotId
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
    assert outcome_of(Stage(*left, ""), Stage(*now, "")) == outcome
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
    assert cause_of(None, Lane("r0", (), (), (), (), reason), ()) == cause
    assert cause in CAUSES


def test_a_node_that_asked_to_go_leaves() -> None:
    """The same words are a leave where the node that goes is drained, and not where another one is."""
    source = SlotId("trainer/a/0", "n1", 7, 1)
    before = Lane("r0", (), (source,), (), (), "")
    after = Lane("r0", (), (), (), (), "sources changed: -(trainer/a/0)")
    assert cause_of(before, after, {"n1"}) == "leave"
    assert cause_of(before, after, {"n2"}) == "death"
    assert cause_of(before, before, {"n1"}) == "join"
