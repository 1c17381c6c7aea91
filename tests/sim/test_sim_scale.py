"""What a turn costs the store, and what it tells, grows with the lane and with the job, and not faster."""

from __future__ import annotations

import pytest

from .scale import play


@pytest.mark.timeout(900)
def test_turns_cost_what_they_touch_and_tell_those_whom_they_concern() -> None:
    """24 nodes and 3 lanes of 10 nodes, counted: requests to the store, records by kind, events that watches carry."""
    nodes, in_lane = 24, 10
    found = play(1, nodes, 3)
    assert found["nodes_in_lane"] == in_lane
    lane, job = found["lane_turn"], found["job_turn"]
    acks = lane["by_kind"]["acks"]
    assert lane["by_kind"] == {"acks": acks, "lanes": 1, "members": 2}
    assert in_lane <= acks <= 2 * in_lane
    assert lane["requests"] == {"txn": acks + 3}  # nobody reads anything anew
    assert 3 * nodes + acks * in_lane <= lane["watch_events"] <= 3 * nodes + acks * (in_lane + 1)  # and the leader
    kinds = job["by_kind"]
    assert kinds["lanes"] <= 2 * 3
    assert job["writes"] <= 12 * nodes
    shared = job["writes"] - kinds["acks"] - kinds["offers"]
    most = shared * nodes + kinds["acks"] * (in_lane + 1) + 2 * kinds["offers"]  # one more: the leader
    assert job["watch_events"] <= most
    assert job["watch_events"] < 0.6 * job["writes"] * nodes  # what it would be if everybody were told everything
