"""A slice of the chaos runs on real processes; `make chaos` and `make points` run the whole of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def chaos(*arguments: str) -> dict[str, object]:
    """The result of a run; what it printed goes into the failure."""
    command = [sys.executable, "-m", "refitd.demo.chaos", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("network", ["auto", "proxies"])
def test_i1_to_i7_i9_i10_hold_under_faults(network: str) -> None:
    """Nothing torn, lost or gone back, nobody innocent dead, all well within 60 s of each fault's end; and every record
    was seen by a witness who found nothing to say."""
    result = chaos("faults", "--seed", "4", "--faults", "4", "--network", network)
    assert (result["ok"], result["faults"], result["torn"], result["lost"], result["back"]) == (True, 4, 0, 0, 0)
    records = result["records"]
    assert isinstance(records, dict)
    assert records.keys() >= {"generation", "lanes", "acks", "commits"}
    assert "gaps" not in records


def test_a_kill_at_a_word_of_an_engine_ends_well() -> None:
    """A slice of the points: an engine dies before it writes one of the words of its control page."""
    result = chaos("points", "--signal", "KILL", "--only", "engine effect:word 2")
    assert (result["ok"], result["torn"], result["lost"], result["back"]) == (True, 0, 0, 0)
    points = result["points"]
    assert isinstance(points, list)
    assert ["engine", "effect:word 2", "nothing"] in points
    assert result["faults"] == len(points)


def test_i1_to_i7_i9_i10_a_replica_across_two_nodes_ends_at_one_end() -> None:
    """A slice of the split runs: a party of the other node dies while the lead's daemon is about to commit."""
    result = chaos("split", "--only", "r0, lead daemon, commit, kill other engine")
    assert (result["ok"], result["faults"], result["torn"], result["lost"], result["back"]) == (True, 1, 0, 0, 0)
