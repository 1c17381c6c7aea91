"""The whole way on a fake GPU: real daemon, movers forked by its fork server, clients in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]  # many processes, on a machine that may be busy


def run(tmp_path, script, *arguments, **more):
    environment = {**os.environ, **more, "REFITD_FAKE_GPU": str(tmp_path)}
    environment["PYTHONPATH"] = f"{HERE}:{HERE.parents[1]}"
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_benchmark_refits_on_a_device_phase_by_phase(tmp_path):
    """Bit-exact (else it fails), with every phase in its rows, with checksums and with reread."""
    arguments = ["refit", "--device", "cuda", "--transport", "peer", "--model", "1GiB", "--repeats", "3", "--json"]
    done = run(tmp_path, "fake_bench.py", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    for label in ("cuda_1GiB", "cuda_1GiB_reread"):
        shares = [found[f"{label}_{phase}_share"]["value"] for phase in ("publish", "prepare", "transfer", "commit")]
        assert 0 < min(shares) <= max(shares) < 100
        assert 0 < found[f"{label}_movers"]["value"] < found[f"{label}_publish_to_commit"]["value"]
    assert found["cuda_1GiB_movers_throughput"]["baseline"] == 486.0
    assert (tmp_path / "touched").read_text()  # movers were told to stand by


def test_a_shadow_on_the_device_is_filled_there_and_copied_at_once(tmp_path):
    """Bit-exact (else it fails) in both modes; the pause of the shadow leaves out what the movers do."""
    arguments = ["pause", "--device", "cuda", "--model", "1GiB", "--repeats", "3", "--json"]
    done = run(tmp_path, "fake_bench.py", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the shadow is in host memory" not in done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    for mode in ("device_shadow", "in_place"):
        pause = found[f"pause_cuda_1GiB_{mode}"]
        assert pause["ratio"] == pytest.approx(pause["value"] / pause["baseline"])
    in_place = found["pause_cuda_1GiB_in_place"]
    assert in_place["baseline"] == found["pause_cuda_1GiB_in_place_movers"]["value"]
    assert in_place["value"] > in_place["baseline"]


@pytest.mark.parametrize(
    ("fault", "transport"),
    [("kill", "peer"), ("stop", "peer"), ("kill", "nccl"), ("stop", "nccl")],
)
def test_a_fault_in_the_middle_of_a_refit_is_survived(tmp_path, fault, transport):
    """The publication commits with a new mover."""
    faults = tmp_path / "nccl"
    faults.mkdir()
    done = run(tmp_path, "faults.py", fault, "1GiB", transport, REFITD_FAKE_NCCL=str(faults))
    assert done.returncode == 0, done.stderr[:1500] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["after_s"] > 0
    started = [line for line in found["movers"] if line == "mover_started"]
    assert len(started) == 5, found


def test_where_no_child_can_use_the_card_threads_of_the_clients_do(tmp_path):
    """The first refit already commits, by the engines' threads; so do those with a trainer that was replaced."""
    done = run(tmp_path, "library.py", "1GiB", "peer", "auto", REFITD_FAKE_GPU_EXCLUSIVE="1")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])["auto"]
    why = "a child cannot map its memory: DeviceError: cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE"
    assert found["before"]["engine/r0/0"] == found["after"]["engine/r0/1"] == ["library", why, 2]
    assert [found["before"]["trainer/run/1"][0], found["after"]["trainer/run/1"][0]] == ["child", "child"]


def test_a_trainer_that_dies_leaves_its_memory_to_the_one_in_its_place(tmp_path):
    """All that was its own is free although two movers had it mapped, and is taken again; it publishes."""
    done = run(tmp_path, "faults.py", "crowded", "1GiB")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["freed"] == found["taken_again"] == found["bytes"] == 2 << 20
    assert found["free_at_end"] == found["free_before"]
    assert found["after_s"] > 0
    assert len([line for line in found["movers"] if line == "mover_started"]) == 5, found


def test_without_a_device_movers_are_replaced_and_clients_live(tmp_path):
    """The typed error of the driver is in the daemon's log; the trainer's offer ends and the engine's receive fails."""
    done = run(tmp_path, "no_device.py")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["outcome"] == "SKIPPED"
    assert found["dirty"] is True
    assert found["failed"] == "no commit came within the timeout"
    assert "it cannot map engine/r0/0: DeviceError: cuInit: CUDA_ERROR_NO_DEVICE" in found["killed"]
    assert found["started"] > 2


def test_an_engine_lends_what_it_serves_to_the_next_daemon(tmp_path):
    """A joiner reads it from there, with no trainer left; once it was released nobody does."""
    done = run(tmp_path, "lent.py")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"received": [7, 7.0, 7.0], "joined": [7, 7.0, 7.0], "released": True}


def test_a_shadow_that_is_released_is_mapped_by_nobody(tmp_path):
    """Nothing is applied from it any more; the next registration brings the publication that was missed."""
    done = run(tmp_path, "shadow_release.py")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "steps": [[1, 1.0, 1.0], [2, 2.0, 2.0]], "mapped": [True, False], "released": True, "mode": "device_shadow",
    }  # fmt: skip
