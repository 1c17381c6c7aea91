"""A real trainer and a real engine, in small: FSDP2 in fp32, Qwen3 on two tensor-parallel ranks in bf16."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_an_engine_says_what_a_fresh_model_says_until_a_bit_is_wrong():
    """Tokens, logits and weights are equal after a refit; the check finds the bit that is changed after the second."""
    command = [sys.executable, str(HERE / "real_check.py"), "--model", "own", "--refits", "2", "--steps", "1"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [*command, "--spoil", "2"], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1, done.stderr[-2000:]
    assert "reason" not in found, found
    first, second = found["refits"]
    assert [first["equal"], second["equal"]] == [True, False]
    for rank in first["ranks"]:
        assert all(rank[what] for what in ("weights_equal", "tokens_equal", "logits_equal", "finite"))
    assert [rank["weights_equal"] for rank in second["ranks"]] == [False, True]
    assert found["trainer"] == "FSDP2 (fully_shard) over gloo, weights on cpu"
