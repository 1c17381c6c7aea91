"""A slice of the seeds, as ``make sim`` runs them, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def sim(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the totals, and everything that was printed."""
    command = [sys.executable, "-m", "tests.sim", *arguments, "--json"]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.timeout(900)
def test_seeds_of_the_slice() -> None:
    """16 seeds: faults at chosen states, every invariant held, everybody at the newest publication at the end."""
    status, totals, output = sim("0:16", "--workers", "2")
    assert (status, totals["failed"]) == (0, []), output
    assert totals["runs"] == 16
    assert totals["faults"] > 40
    assert totals["commits"] > 100
    assert totals["answers"] > 1000


@pytest.mark.timeout(300)
def test_a_seed_repeats_itself_in_another_process() -> None:
    """The trace of a seed has the same hash wherever it runs."""
    first, second = (sim("4", "--workers", "1")[1] for _ in range(2))
    assert first["digests"] == second["digests"] != sim("1", "--workers", "1")[1]["digests"]
