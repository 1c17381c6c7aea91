"""The operators' commands against a real daemon: what they print, what they change, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd import connect_engine, connect_trainer
from refitd.cli import main
from refitd.hook.admin import ask
from refitd.testing import LocalDaemon, split_layout, wait_until

LAYOUT = split_layout({"w": ((4, 6), "float32")}, 0, 1)
CONTRACT = {"node", "store", "members", "lanes", "replicas", "last_refit"}
REPLICA = {"name", "publication", "step", "ready", "mode", "why", "lag"}
JOB = {"paused", "paused_reason", "limit", "draining", "parked", "leader", "generation", "publication"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(config={"timeouts.offer": 60.0}) as running:
        yield running


@contextlib.contextmanager
def job(daemon: LocalDaemon, name: str) -> Iterator[dict[str, Any]]:
    """A job whose engine has committed one publication; yields what status says of it."""
    with (
        connect_trainer(name, "run0", 0, 1, daemon.socket) as trainer,
        connect_engine(name, "r0", 0, 1, daemon.socket) as engine,
    ):
        trainer.plan_seconds = 60.0
        trainer.register(LAYOUT)
        engine.register(LAYOUT)
        offer = trainer.publish(1, {"w": np.ones((4, 6), np.float32)})
        ticket = engine.pending(wait=60.0)
        assert ticket is not None
        engine.receive(ticket, {"w": np.zeros((4, 6), np.float32)}, timeout=60.0)
        assert offer.committed(timeout=60.0).committed == ["r0"]
        yield daemon.status()["jobs"][name]


class Said:
    """What a command printed and how it ended."""

    def __init__(self, daemon: LocalDaemon, capsys: pytest.CaptureFixture[str], *argv: str, where: bool = True) -> None:
        self.code = main([*argv, *(["--socket", daemon.socket] if where else [])])
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out.splitlines()[-1])
        assert isinstance(found, dict)
        return found


def shown(daemon: LocalDaemon, name: str) -> dict[str, Any]:
    found = daemon.status()["jobs"][name]
    assert isinstance(found, dict)
    return found


def test_status_has_what_scripts_rely_on(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of the contract, with ok and an empty reason, and status 0."""
    with job(daemon, "status"):
        said = Said(daemon, capsys, "status", "--json")
    assert (said.code, said.json["ok"], said.json["reason"], said.err) == (0, True, "", "")
    assert said.json.keys() >= CONTRACT
    mine = said.json["jobs"]["status"]
    assert mine.keys() >= CONTRACT - {"node", "store"} | JOB
    assert set(mine["replicas"][0]) == REPLICA
    replica = mine["replicas"][0]
    assert (replica["name"], replica["step"], replica["ready"], replica["lag"]) == ("r0", 1, True, 0)
    assert (replica["publication"], replica["mode"], replica["why"]) == (mine["publication"], "in_place", "")
    assert said.json["store"] == {"url": "memory://", "local": True, "answers": True}
    assert (mine["paused"], mine["limit"], mine["draining"], mine["parked"]) == (False, None, [], [])


def test_pause_and_resume_change_the_record_and_nothing_else(
    daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said by status with the reason; again is harmless; resume takes the reason away and leaves the limit."""
    with job(daemon, "paused"):
        for _time in range(2):
            said = Said(daemon, capsys, "pause", "paused", "--reason", "the network is being repaired", "--json")
            assert (said.code, said.json) == (
                0,
                {"ok": True, "reason": "paused is paused: the network is being repaired"},
            )
        assert Said(daemon, capsys, "limit", "paused", "1.5GB/s").out == (
            "paused sends at most 1500000000 bytes a second from each node\n"
        )
        facts = shown(daemon, "paused")
        assert (facts["paused"], facts["paused_reason"], facts["limit"]) == (
            True, "the network is being repaired", 1_500_000_000,
        )  # fmt: skip
        text = Said(daemon, capsys, "status").out
        assert "limit 1.5GB/s a node, paused: the network is being repaired" in text
        assert Said(daemon, capsys, "resume", "paused").out == "paused is not paused\n"
        facts = shown(daemon, "paused")
        assert (facts["paused"], facts["paused_reason"], facts["limit"]) == (False, "", 1_500_000_000)
        assert Said(daemon, capsys, "limit", "paused", "none", "--json").json == {
            "ok": True,
            "reason": "paused is not limited",
        }
        assert shown(daemon, "paused")["limit"] is None


def test_a_job_that_nobody_is_in_is_refused(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo makes no record; status 1, told on stderr and in the object."""
    for argv in (("pause", "nobody"), ("resume", "nobody"), ("limit", "nobody", "5MB/s")):
        said = Said(daemon, capsys, *argv, "--json")
        reason = "job: expected a job that has members, got nobody"
        assert (said.code, said.err) == (1, f"refitd: {reason}\n")
        assert said.json == {
            "ok": False, "reason": reason, "field": "job", "expected": "a job that has members", "got": "nobody",
        }  # fmt: skip
    assert "nobody" not in daemon.status()["jobs"]


@contextlib.contextmanager
def moving(daemon: LocalDaemon, name: str, rate: int = 1_000_000) -> Iterator[None]:
    """A job whose engine receives 3 MB, at 1 MB a second; ends when it has them."""
    layout, memory = split_layout({"w": ((3, 250_000), "float32")}, 0, 1), np.zeros((3, 250_000), np.float32)
    with (
        connect_trainer(name, "run0", 0, 1, daemon.socket) as trainer,
        connect_engine(name, "r0", 0, 1, daemon.socket) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer.plan_seconds = 60.0
        trainer.register(layout)
        engine.register(layout)
        wait_until(lambda: shown(daemon, name)["joined"] and shown(daemon, name)["replicas"], "the job", 30)
        ask("limit", daemon.socket, job=name, rate=rate)
        offer = trainer.publish(1, {"w": np.ones((3, 250_000), np.float32)})
        ticket = engine.pending(wait=60.0)
        assert ticket is not None
        received = pool.submit(engine.receive, ticket, {"w": memory}, timeout=60.0)
        wait_until(lambda: shown(daemon, name)["lanes"][0]["stage"] == "transfer", "the transfer", 30)
        yield
        received.result(60.0)
        assert offer.committed(timeout=60.0).committed == ["r0"]
        assert memory.min() == 1


def test_a_drain_waits_says_what_for_and_can_be_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    """While bytes move: not drained within the time, status 1, and the wish stands until cancelled."""
    with LocalDaemon(links="network", config={"timeouts.offer": 60.0}) as daemon:
        said = Said(daemon, capsys, "drain", "--json")
        assert (said.code, said.json) == (0, {"ok": True, "drained": True, "reason": "this node has no job"})
        Said(daemon, capsys, "drain", "--cancel")
        with moving(daemon, "held"):
            said = Said(daemon, capsys, "drain", "--timeout", "0.3", "--json")
            assert (said.code, said.json["ok"], said.json["drained"]) == (1, False, False)
            assert said.json["reason"] == "held: lane r0 uses engine/r0/0, trainer/run0/0"
            assert daemon.status()["drain"]["wanted"] is True
            assert shown(daemon, "held")["draining"] == [{"node": "node0", "reason": "its operator drains it"}]
            said = Said(daemon, capsys, "drain", "--cancel", "--json")
            assert (said.code, said.json) == (0, {"ok": True, "drained": False, "reason": "this node takes part again"})
            wait_until(lambda: not shown(daemon, "held")["draining"], "the record to go")
            found = daemon.status()["drain"]
            assert (found["wanted"], found["drained"]) == (False, False)


def test_a_drain_ends_once_the_transfer_has(capsys: pytest.CaptureFixture[str]) -> None:
    """The refit under way is committed first; then the lane closes."""
    with LocalDaemon(links="network", config={"timeouts.offer": 60.0}) as daemon, moving(daemon, "last"):
        said = Said(daemon, capsys, "drain", "--timeout", "60", "--json")
        assert (said.code, said.json) == (
            0, {"ok": True, "drained": True, "reason": "last: no lane uses this node"},
        )  # fmt: skip
        lane = shown(daemon, "last")["lanes"][0]
        assert (lane["stage"], lane["turned"]) == ("gone", "node0: draining")


def test_a_drain_counts_for_jobs_that_come_later(capsys: pytest.CaptureFixture[str]) -> None:
    """The wish is the node's, not the job's."""
    with LocalDaemon(config={"timeouts.offer": 60.0}) as daemon:
        assert Said(daemon, capsys, "drain").code == 0
        with connect_engine("later", "r0", 0, 1, daemon.socket) as engine:
            engine.register(LAYOUT)
            wait_until(lambda: daemon.status()["jobs"].get("later", {}).get("draining"), "the drain record", 30)
            assert shown(daemon, "later")["draining"][0]["node"] == "node0"


@pytest.mark.parametrize(
    "argv", [("status",), ("pause", "j"), ("resume", "j"), ("limit", "j", "5MB/s"), ("drain",), ("drain", "--cancel")]
)
def test_without_a_daemon_every_command_says_so(
    tmp_path: Path, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 and the path, on stderr and in the object."""
    path = str(tmp_path / "none.sock")
    assert main([*argv, "--socket", path, "--json"]) == 1
    out, err = capsys.readouterr()
    reason = f"no refitd daemon answers at {path}: No such file or directory"
    assert json.loads(out) == {"ok": False, "reason": reason}
    assert err == f"refitd: {reason}\n"


def test_a_daemon_that_hangs_is_not_waited_for_forever(tmp_path: Path) -> None:
    """A socket that takes connections and never answers."""
    path = tmp_path / "hung.sock"
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(path))
        hung.listen()
        with pytest.raises(Exception, match=r"does not answer within 0\.2 s"):
            ask("status", str(path), timeout=0.2)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ("limit", "j", "fast"),
            "expected a rate such as 500MB/s or 2GiB/s, from 1MB/s to 1000TB/s, or none, got 'fast'",
        ),
        (("limit", "j", "500Mb/s"), "got '500Mb/s'"),
        (("limit", "j"), "the following arguments are required: RATE"),
        (("pause", "a/b"), "expected a name of 1 to 128 letters"),
        (("drain", "--timeout", "soon"), "expected seconds, 0 or more, got 'soon'"),
        (("drain", "--timeout", "-1"), "expected seconds, 0 or more, got '-1'"),
    ],
)
def test_usage_is_status_2(argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asked; stderr names the argument."""
    with pytest.raises(SystemExit) as caught:
        main([*argv])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_bad_configuration_is_status_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is none, and a path that no socket can have."""
    (tmp_path / "bad.toml").write_text("[hook]\nsockte = 'x'\n")
    assert main(["status", "--config", str(tmp_path / "bad.toml"), "--json"]) == 78
    assert json.loads(capsys.readouterr().out)["field"] == "hook.sockte"
    assert main(["drain", "--socket", "x" * 200, "--json"]) == 78
    assert json.loads(capsys.readouterr().out)["field"] == "hook.socket"


def test_the_configuration_names_the_socket(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """``--config`` finds the daemon that was started with it."""
    path = str(daemon.folder / "refitd.toml")
    said = Said(daemon, capsys, "status", "--config", path, "--json", where=False)
    assert (said.code, said.json["node"]) == (0, "node0")


def test_as_a_process_logs_go_to_stderr_and_a_pipe_gets_plain_text(daemon: LocalDaemon) -> None:
    """What a script sees: one object last on stdout; what a pager sees: no control characters."""
    environ = {**os.environ, "REFITD_SOCKET": daemon.socket}
    command = [sys.executable, "-m", "refitd.cli", "status"]
    plain = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert plain.stdout.startswith("node node0, store memory://")
    assert "\x1b" not in plain.stdout
    done = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is True
