"""What a turn costs the store grows with the lane, and with the job, and not faster."""

from __future__ import annotations

import pytest

from .scale import play


@pytest.mark.timeout(900)
def test_turns_cost_what_they_touch() -> None:
    """24 nodes and 3 lanes: one lane's turn writes for that lane only, at most three records a node of it."""
    found = play(1, 24, 3)
    lane, job = found["lane_turn"], found["job_turn"]
    assert lane["by_kind"]["lanes"] == 1
    assert lane["writes"] <= 3 * found["nodes_in_lane"]
    assert job["by_kind"]["lanes"] <= 2 * 3
    assert job["writes"] <= 12 * 24
