"""The helper that starts an etcd cluster: others' tests lean on it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest
from watching import until

from refitd.errors import StoreUnavailable
from refitd.store import open_store
from refitd.store._child import Child
from refitd.store.cluster import EtcdCluster


def test_three_nodes_lead_die_freeze_and_come_back() -> None:
    """Each verb does what it says, data is kept over all of them, and nothing is left behind."""
    with EtcdCluster(3) as etcd:
        store = open_store(etcd.url)
        revision = store.put("k", b"v")
        first = etcd.leader()
        etcd.kill(first)
        assert not etcd.running(first)
        second = etcd.leader()
        assert second != first
        etcd.restart(first)
        etcd.freeze(second)
        assert not etcd.healthy(second)
        assert etcd.running(second)
        assert etcd.leader() != second
        etcd.thaw(second)
        etcd.wait_healthy()
        item = store.get("k")
        assert item is not None
        assert (item.value, item.mod_revision) == (b"v", revision)
        store.close()
        pids, folder = [etcd.pid(i) for i in range(3)], etcd.folder
        assert len(etcd.endpoints) == len(set(etcd.endpoints)) == 3
    assert not folder.exists()
    assert [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()] == []


def test_one_left_of_three_does_not_lead() -> None:
    """Without a quorum leader() says so in its time; restart(wait=False) brings the quorum back."""
    with EtcdCluster(3) as etcd:
        lead = etcd.leader()
        others = [i for i in range(3) if i != lead]
        for i in others:
            etcd.kill(i)
        with pytest.raises(StoreUnavailable, match=r"led within 2 s"):
            etcd.leader(2)
        for i in others:
            etcd.restart(i, wait=False)
        etcd.wait_healthy()
        assert etcd.leader() in range(3)


def test_a_node_that_cannot_start_is_said_with_its_log() -> None:
    """A flag that etcd does not know ends the start at once, in etcd's own words."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailable, match="flag provided but not defined: -nonsense"):
        EtcdCluster(1, flags=["--nonsense=1"])
    assert time.monotonic() - start < 10


def test_a_node_is_started_by_its_prefix() -> None:
    """What stands before the command of a node runs it, as network namespaces need."""
    with EtcdCluster(2, prefixes=[(), ("nice", "-n", "7")]) as etcd:
        nice = [pathlib.Path(f"/proc/{etcd.pid(i)}/stat").read_text().rpartition(")")[2].split()[16] for i in range(2)]
    assert int(nice[1]) - int(nice[0]) == 7


def test_the_nodes_die_with_their_parent(tmp_path: pathlib.Path) -> None:
    """A parent that is killed takes its cluster along, frozen nodes too."""
    code = (
        "import time; from refitd.store.cluster import EtcdCluster; etcd = EtcdCluster(2); etcd.freeze(1); "
        "print(etcd.pid(0), etcd.pid(1), flush=True); time.sleep(60)"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    deadline = time.monotonic() + 5
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in pids if _alive(pid)] == []


def _alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_frozen_child_stands_still_with_all_its_threads() -> None:
    """When freeze() returns, none of them can answer any more; thawed, they go on; freezing a dead child ends, too."""
    busy = "import threading; [threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start() for _ in range(4)]"
    child = Child([sys.executable, "-c", busy])
    tasks = pathlib.Path(f"/proc/{child.pid}/task")
    assert until(lambda: len([*tasks.iterdir()]) == 5)
    child.freeze()
    assert {stat.read_text().rpartition(")")[2].split()[0] for stat in tasks.glob("*/stat")} == {"T"}
    child.thaw()
    assert until(lambda: "R" in {stat.read_text().rpartition(")")[2].split()[0] for stat in tasks.glob("*/stat")})
    child.kill()
    child.freeze()
    assert not child.running
