"""What movers cost and leave behind, on a fake GPU: `refitd bench mover`, turns, and memory that moves."""

import json

import descriptors
import fake_gpu
import pytest
from test_device_refit import run

from refitd.bench.mover import PARTS, _cold, _cold_rows
from refitd.bench.party import BenchFailed

pytestmark = pytest.mark.slow


def last(done):
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_movers_memory_its_start_and_its_neighbours_slowdown_are_measured(tmp_path):
    """Its context is all that comes free with it; the parts of a start make the whole."""
    rows = last(run(tmp_path, "fake_bench.py", "mover", "--transport", "peer", "--repeats", "2", "--json"))["rows"]
    found = {row["name"]: row["value"] for row in rows}
    assert found["mover_peer_idle_memory"] == fake_gpu.CONTEXT_BYTES / 1e6
    for how in ("compiled", "cached"):
        start = f"mover_peer_cold_start_{how}"
        parts = {name: value for name, value in found.items() if name.startswith(f"{start}_")}
        assert set(parts) == {f"{start}_{part}" for part in ("spawn", "context", "kernels", "mount", "rest")}
        assert min(parts.values()) > 0
        assert sum(parts.values()) == pytest.approx(found[start])
    assert found["mover_peer_slowdown_idle"] < 100


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_turns_leave_nothing_behind(tmp_path, transport):
    """Descriptors and device memory are what they were; the engines' movers live through all of them."""
    faults = tmp_path / "nccl"
    faults.mkdir()
    found = last(run(tmp_path, "leaks.py", "turns", "4", "1GiB", transport, REFITD_FAKE_NCCL=str(faults)))
    assert (found["grown"], found["of_nccl"]) == ({}, {})
    assert found["turns"] >= 4 + 4
    assert set(found["movers_that_lived"]) >= {"engine/r0/0", "engine/r0/1", "trainer/run/0"}


def test_only_what_nccl_is_known_to_leave_is_excused():
    """Two sockets a communicator; names that NCCL makes up each time are no growth, and a pipe always is."""
    here = "socket that is nowhere"
    found = {
        "mover a": [80, 92], "kinds of mover a": {here: [2, 14], "tcp N.N.N.N:N to N.N.N.N:N open": [12, 14]},
        "mover b": [80, 94], "kinds of mover b": {here: [2, 15], "pipe:[N]": [4, 5]},
        "mover c": [80, 105], "kinds of mover c": {here: [2, 27]},
        "engine0": [7, 8], "kinds of engine0": {here: [0, 1]},
    }  # fmt: skip
    taken = descriptors.excused(found, 12)
    assert sorted(found) == sorted(
        f"{of}{who}" for of in ("", "kinds of ") for who in ("mover b", "mover c", "engine0")
    )
    assert taken["mover b"] == {here: [2, 15]}
    assert taken["mover c"] == {}
    kinds = {descriptors.kind(f"unix @tmp/nccl-socket-0-{name}@@@") for name in ("88668d3a", "a5f0e393")}
    assert kinds == {"unix @tmp/nccl-socket-N"}
    assert descriptors.kind("/dev/shm/nccl-BftDkQ (deleted)") == "/dev/shm/nccl-N (deleted)"


def test_memory_that_moves_is_read_where_it_is(tmp_path):
    """At other addresses, and at addresses that are another allocation's now; all bits are compared (else it fails)."""
    found = last(run(tmp_path, "leaks.py", "moved", "6", "1GiB", "peer"))
    assert (found["grown"], found["cycles"]) == ({}, 6)
    assert 0 < found["same_address"] < 4 * 6
    assert len(found["movers_that_lived"]) == 4


def event(name, **facts):
    return json.dumps({"event": name, "timestamp": "2026-01-01T00:00:00Z", **facts})


def test_a_start_is_read_from_the_log_of_the_mover_that_lives():
    """The last one that was started; a log that does not show all of it is named."""
    lines = [
        event("mover_started", key="engine/r0/0", seconds=7.0),
        event("mover_started", key="engine/r0/0", seconds=0.25),
        "no JSON",
        event("mounted", rank="engine/r0/0", spent={"mount": 0.5}),
        event("mounted", rank="engine/r0/1", spent={"mount": 9.0}),
        event("moved", rank="engine/r0/0", first=100.0),
    ]
    cold = _cold(lines, "engine/r0/0")
    assert (cold.spawn, cold.parts) == (0.25, {"mount": 0.5})
    rows = {row.name: row.value for row in _cold_rows("start", [cold._replace(total=1.0)] * 2)}
    assert rows == {"start": 1000.0, "start_spawn": 250.0, "start_mount": 500.0, "start_rest": 250.0}
    assert "mount" in PARTS
    with pytest.raises(BenchFailed, match="does not show moved of engine/r0/1"):
        _cold([*lines, event("mover_started", key="engine/r0/1", seconds=1)], "engine/r0/1")
