"""Bad luck on a fake GPU: a typed error, a new mover, trainer and engine live, and the refit commits."""

import json
import re

import pytest
from test_device_refit import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]  # many processes, on a machine that may be busy
ERRORS = {
    "oom": r"DeviceError: bucket \d+ by way of the host: OutOfMemoryError: CUDA out of memory",
    "oom-nccl": "DeviceError: staging for a bucket: OutOfMemoryError: ",
    "illegal": "DeviceError: move buckets: RuntimeError: CUDA error: an illegal memory access",
    "hung": "it did not answer a ping in time",
    "garbage": "it cannot map trainer/run/1: DeviceError: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE",
    "dead": "it cannot map trainer/run/1: DeviceError: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE",
    "no-peer": "it cannot map trainer/run/1: DeviceError: cuCtxEnablePeerAccess: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
}
ENGINES = {"engine/r0/0", "engine/r0/1"}
NEW = {"illegal": {"engine/r0/0"}, "hung": {"engine/r0/0"}, "garbage": ENGINES, "dead": ENGINES, "no-peer": ENGINES}


def met(tmp_path, *cases):
    faults = tmp_path / "nccl"
    faults.mkdir()
    done = run(tmp_path, "bad_luck.py", *cases, REFITD_FAKE_NCCL=str(faults))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert tuple(found) == cases
    return found


@pytest.mark.parametrize("cases", [("illegal", "hung", "garbage"), ("dead", "no-peer"), ("oom", "oom-nccl")])
def test_bad_luck_costs_a_mover_and_no_client(tmp_path, cases):
    """The same trainers and engines commit that refit, and the next, bit by bit."""
    for case, found in met(tmp_path, *cases).items():
        assert re.fullmatch(ERRORS[case], found["error"])
        assert set(found["new_movers"]) >= NEW.get(case, set())
        assert found["new_movers"]
        assert found["bit_exact"] is True
        assert found["deaths"] > 0
        assert found["next_refit_s"] > 0


def test_two_versions_of_nccl_are_named_and_move_nothing_until_they_are_one(tmp_path):
    """By two nodes' member records."""
    found = met(tmp_path, "versions")["versions"]
    assert found["error"].startswith("wants nccl, but ")
    assert "2.30.7" in found["error"]
    assert "2.99.1" in found["error"]
    assert (found["transport"], found["bit_exact"]) == ("nccl", True)
