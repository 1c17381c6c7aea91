"""Layouts over several cards, on fake ones: real daemons, movers and clients, and what else moves the bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # daemons, fork servers and clients on a busy machine


def run(tmp_path, script, *arguments, **more):
    faults = tmp_path / "nccl"
    faults.mkdir()
    environment = {**os.environ, **more, "REFITD_FAKE_NCCL": str(faults), "REFITD_FAKE_GPU": str(tmp_path)}
    environment["PYTHONPATH"] = f"{HERE}:{HERE.parents[1]}"
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def cards(tmp_path, number, transport, layout, width, rivals, **more):
    arguments = ["refit", "--device", "cuda", "--gpus", str(number), "--transport", transport, "--layout", layout]
    arguments += ["--size", "1MiB", "--width", width, "--rivals", rivals, "--repeats", "2", "--json"]
    return run(tmp_path, "fake_bench.py", *arguments, **more)


def test_both_cards_on_both_sides_beside_every_rival(tmp_path):
    """Bit-exact (else it fails); half of the bytes cross, and every rival has its time."""
    found = cards(tmp_path, 2, "peer", "rows_to_cols", "128", "all")
    assert (found["ok"], found["failed"]) == (True, {})
    cell = "rows_to_cols_peer_1MiB_128"
    edges = found["facts"][cell]["edges"]
    assert edges == {f"trainer/run/{i} engine/r0/{j} peer": 1 << 19 for i in range(2) for j in range(2)}
    rows = {row["name"]: row for row in found["rows"]}
    others = ["torch_copies", "send_recv_8", "send_recv_16", "send_recv_32", "gather_broadcast", "dtensor_redistribute"]
    assert min(rows[f"{cell}_than_{other}"]["baseline"] for other in others) > 0
    assert rows[f"{cell}_movers"]["ratio"] > 0


def test_each_byte_enters_a_node_once(tmp_path):
    """Of two nodes: one replica gets all from the trainers by NCCL, the other from its neighbour; here without etcd."""
    found = cards(tmp_path, 4, "nccl", "tp2_to_2xtp1", "512", "none", REFITD_NO_ETCD="1")
    assert (found["ok"], found["failed"]) == (True, {})
    cell = "tp2_to_2xtp1_nccl_1MiB_512"
    assert found["facts"][cell]["transports"] == ["nccl: NCCL 2.30.7 on all 3 ranks"]
    rows = {row["name"]: row for row in found["rows"]}
    assert rows[f"{cell}_network_bytes"]["value"] == rows[f"{cell}_network_bytes"]["baseline"] == (2 << 20) / 1e6
    edges = found["facts"][cell]["edges"]
    assert sum(nbytes for edge, nbytes in edges.items() if edge.endswith("network")) == 2 << 20
    assert sum(nbytes for edge, nbytes in edges.items() if edge.endswith("peer")) == 2 << 20


def test_a_layout_for_eight_on_two_cards(tmp_path):
    """Ranks that share a card are hosts of their own for NCCL; still each byte enters the engines' domain once."""
    arguments = ["refit", "--device", "cuda", "--gpus", "8", "--per-card", "4", "--transport", "nccl", "--layout"]
    arguments += ["four_to_four", "--size", "1MiB", "--width", "512", "--rivals", "none", "--repeats", "2", "--json"]
    found = run(tmp_path, "fake_bench.py", *arguments, REFITD_NO_ETCD="1")
    assert (found["ok"], found["failed"]) == (True, {})
    rows = {row["name"]: row for row in found["rows"]}
    network = rows["four_to_four_nccl_1MiB_512_network_bytes"]
    assert network["value"] == network["baseline"] == (4 << 20) / 1e6
    edges = found["facts"]["four_to_four_nccl_1MiB_512"]["edges"]
    assert sum(nbytes for edge, nbytes in edges.items() if edge.endswith("peer")) == 3 * (4 << 20)


def test_a_mover_that_is_killed_leaves_the_other_replica_alone(tmp_path):
    """Which commits; the killed one's replica gets what is left, and the next refit is undisturbed."""
    found = run(tmp_path, "card_faults.py", "kill", "tp2_to_2xtp1", "peer", "16MiB")
    assert (found["victim"], found["missed"]) == ("engine/r1/0", False)
    assert set(found["engines_with_fault_s"]) == {"engine/r0/0", "engine/r1/0"}
    assert {replica: row["outcome"] for replica, row in found["refits"].items()} == {"r0": "ok", "r1": "ok"}
    assert found["refits"]["r0"]["failures"] == 0 < found["refits"]["r1"]["failures"]
    moved = {replica: row["moved"] for replica, row in found["refits"].items()}
    assert moved["r0"] == {"peer": 32 << 20}
    assert moved["r1"]["peer"] > 0
    assert 0 < found["notice_s"] < found["finish_s"]
    assert found["after_s"] > 0


def test_a_replica_that_leaves_is_done_without_and_joins_again(tmp_path):
    """It catches up from its neighbour, not from a trainer."""
    found = run(tmp_path, "card_faults.py", "leave", "tp2_to_2xtp1", "nccl", "1MiB")
    assert found["without_s"] > 0
    assert found["joiner_read"] == {"peer": 2 << 20}
    assert found["after_s"] > 0
