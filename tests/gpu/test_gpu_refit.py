"""Refits on the card by the real daemon: bit-exact, with a mover killed in between, with a trainer killed meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]
ROOT = Path(__file__).parents[2]


def run(*command, **more):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'device'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, *command], env=environment | more, capture_output=True, text=True, timeout=160, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"], ids=["ipc", "vmm"])
def test_a_refit_is_bit_exact(allocator):
    """Trainers' rows to engines' columns, where they are; the benchmark compares every bit after each refit."""
    command = ["-m", "refitd.cli", "bench", "refit", "--device", "cuda", "--model", "small", "--repeats", "5", "--json"]
    rows = {row["name"]: row for row in run(*command, PYTORCH_CUDA_ALLOC_CONF=allocator)["rows"]}
    print({name: row["value"] for name, row in rows.items() if "publish_to_commit" in name})
    assert 0 < rows["cuda_small_movers"]["value"] < rows["cuda_small_publish_to_commit"]["value"]


@pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"], ids=["ipc", "vmm"])
def test_an_engine_lends_what_it_serves_to_the_next_daemon(allocator):
    """A joiner reads it from there, with no trainer left; once it was released nobody does."""
    found = run(str(ROOT / "tests/device/lent.py"), PYTORCH_CUDA_ALLOC_CONF=allocator)
    assert found == {"received": [7, 7.0, 7.0], "joined": [7, 7.0, 7.0], "released": True}


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_mover_that_is_hit_in_the_middle_is_replaced_and_the_refit_commits(fault):
    """Killed or stopped. Bit-exact afterwards; nobody but the mover died."""
    found = run(str(ROOT / "tests/device/faults.py"), fault, "big")
    print(found)
    assert [line for line in found["movers"] if "died" in line] == ["mover_died"]


def test_the_memory_of_a_trainer_that_is_killed_while_mapped_is_free_again_within_a_second():
    """And a new process in its place allocates it and publishes."""
    found = run(str(ROOT / "tests/device/faults.py"), "trainer", "1GiB")
    print(found)
    assert found["free_again_s"] < 1.0
    assert found["taken_again"] >= 0.95 * found["freed"] > found["bytes"] * 0.95
