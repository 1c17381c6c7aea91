"""Groups N and O of the field cases, with real daemons: the socket's file, the watchdog, and the number of series.

The same cases piece by piece: tests/hook/test_hook_socket_file.py, tests/systemd, tests/telemetry.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from refitd import connect_engine, connect_trainer
from refitd.hook.admin import ask
from refitd.hook.messages import PROTO
from refitd.hook.wire import Connection
from refitd.testing import LocalDaemon, split_layout, wait_until

SECONDS = 60.0
REFUSED = 78  # for systemd too: a start again would not help


@contextlib.contextmanager
def waiting(*daemons: LocalDaemon) -> Iterator[None]:
    """All of them end with the test."""
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.stop()


def at(path: Path, name: str) -> LocalDaemon:
    """A daemon of a name whose socket is at ``path``."""
    return LocalDaemon(name=name, config={"hook.socket": str(path)})


def test_n1_after_a_hard_kill_the_daemon_starts_at_once(tmp_path: Path) -> None:
    """N1: SIGKILL leaves the socket's file; the next start replaces it and answers. Of two that start together on a
    stale file exactly one serves, and the other ends with a status that is not zero."""
    path = tmp_path / "hook.sock"
    one, two = at(path, "one"), at(path, "two")
    with waiting(one, two):
        one.start()
        one.kill()
        assert path.is_socket()
        one.start()
        assert ask("status", str(path))["node"] == "one"
        one.kill()
        for each in (one, two):
            each.launch()
        wait_until(
            lambda: None in (codes := [one.returncode, two.returncode]) and codes != [None, None], "one ends", SECONDS
        )
        winner, loser = (one, two) if one.returncode is None else (two, one)
        assert loser.returncode == REFUSED
        assert "hook.socket: expected" in loser.log
        wait_until(lambda: _node(path) == winner.config["node.name"], "the other serves", SECONDS)


def _node(path: Path) -> str:
    with contextlib.suppress(Exception):
        return str(ask("status", str(path))["node"])
    return ""


def test_n1_a_daemon_that_lives_keeps_its_socket(tmp_path: Path) -> None:
    """N1: one that stands still (its backlog takes connections, nothing answers) is not dead; a regular file is not
    ours. Both starts are refused, and what is at the path stays."""
    path, precious = tmp_path / "hook.sock", tmp_path / "precious"
    precious.write_text("not a socket")
    busy, late, wrong = at(path, "busy"), at(path, "late"), at(precious, "wrong")
    with waiting(busy, late, wrong):
        busy.start()
        busy.pause()
        before = path.stat()
        late.launch()
        wrong.launch()
        assert (late.wait(SECONDS), wrong.wait(SECONDS)) == (REFUSED, REFUSED)
        assert "hook.socket: expected" in late.log
        assert (path.stat().st_ino, path.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
        assert precious.read_text() == "not a socket"
        busy.resume()
        wait_until(lambda: _node(path) == "busy", "it serves again", SECONDS)


class Held:
    """Failpoints of which one, by name, gets no answer until `go` is set."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._name = str(path), name
        self.reached, self.go = threading.Event(), threading.Event()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._threads.append(threading.Thread(target=self._answer, args=(self._server.accept()[0],)))
                self._threads[-1].start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, sock.makefile("r") as lines, contextlib.suppress(OSError):
            if json.loads(lines.readline())["name"] == self._name:
                self.reached.set()
                self.go.wait(SECONDS)
            sock.sendall(b"go\n")

    def close(self) -> None:
        self.go.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join()


class Manager:
    """A service manager that counts signs of life."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.path)

    def pings(self, seconds: float) -> int:
        """How many come within ``seconds``."""
        count, deadline = 0, time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._sock.settimeout(left)
            with contextlib.suppress(TimeoutError):
                count += self._sock.recv(4096) == b"WATCHDOG=1"
        return count

    def ping(self) -> None:
        """Return when one comes."""
        wait_until(lambda: self.pings(0.2) > 0, "a sign of life", SECONDS)

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path / "points", "prepare")
    yield held
    held.close()


def test_n3_a_loop_that_hangs_in_a_refit_is_silent(manager: Manager, held: Held) -> None:
    """N3: signs of life while idle and around a refit; none while the daemon's loop hangs in the middle of one, so that
    systemd restarts it; and again when it goes on, and the refit ends well."""
    environ = {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "2000000", "REFITD_FAILPOINTS": held.path}
    with LocalDaemon(config={"timeouts.offer": SECONDS}, environ=environ) as daemon, Refits(daemon, 1) as refits:
        manager.ping()
        working = threading.Thread(target=refits.one)
        working.start()
        assert held.reached.wait(SECONDS)
        manager.pings(0.2)  # what was under way
        assert manager.pings(3.0) == 0
        held.go.set()
        manager.ping()
        working.join(SECONDS)
        assert refits.done == 1
        manager.ping()


class Refits:
    """A trainer and an engine of one job, with ``names`` parameters; `one` is a whole refit."""

    def __init__(self, daemon: LocalDaemon, names: int) -> None:
        spec = {f"layer.{number}.weight": ((2, 4), "float32") for number in range(names)}
        layout = split_layout(spec, 0, 1)
        self.done = 0
        self._stack = contextlib.ExitStack()
        self._trainer = self._stack.enter_context(connect_trainer("grpo", "run0", 0, 1, daemon.socket))
        self._engine = self._stack.enter_context(connect_engine("grpo", "r0", 0, 1, daemon.socket))
        self._trainer.plan_seconds = SECONDS
        self._trainer.client._stale_seconds = 10.0  # of the daemon's heartbeat, on a busy machine
        self._trainer.register(layout)
        self._engine.register(layout)
        self._weights = {name: np.zeros((2, 4), np.float32) for name in spec}
        self._memory = {name: np.zeros((2, 4), np.float32) for name in spec}

    def one(self) -> None:
        step = self.done + 1
        for array in self._weights.values():
            array.fill(step)
        offer = self._trainer.publish(step, self._weights)
        ticket = self._engine.pending(wait=SECONDS)
        assert ticket is not None
        self._engine.receive(ticket, self._memory, timeout=SECONDS)
        assert offer.committed(timeout=SECONDS).committed == ["r0"]
        self.done = step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()


def test_o1_series_do_not_grow_with_refits_versions_and_errors() -> None:
    """O1: a real daemon has the same series after refit 40 as after refit 10, with 30 requests refused for as many
    reasons in between; no label carries a step, a parameter, an address with a port, or a text."""
    with (
        LocalDaemon(config={"metrics.listen": "127.0.0.1:0", "timeouts.offer": SECONDS}) as daemon,
        Refits(daemon, 200) as refits,
    ):
        counts = []
        for number in range(40):
            refits.one()
            if number >= 10:
                _refused(daemon, number)
            if number in (9, 39):
                counts.append(_series(daemon))
        first, last = counts
        assert last == first
        values = {value for _name, labels in last for value in re.findall(r'="([^"]*)"', labels)}
        assert not [value for value in values if re.search(r"layer|weight|:\d|\s|^f+$", value)]
        assert {value for value in values if value.isdecimal()} <= {str(gpu) for gpu in range(2)}


def _refused(daemon: LocalDaemon, number: int) -> None:
    """A client of a replica of its own, whose rank is beyond its world: every time another text."""
    hello = {
        "id": 1, "method": "hello", "proto": PROTO, "client": f"client {number}", "job": "grpo", "side": "engine",
        "group": f"replica{number}", "rank": number, "world": 1, "incarnation": f"{number:016x}",
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket)
        connection = Connection(sock)
        connection.send(hello)
        answer, _fds = connection.receive(SECONDS)
    assert answer["error"]["code"] == "protocol", answer


def _series(daemon: LocalDaemon) -> set[tuple[str, str]]:
    """Names and labels (without ``le``) of every series of one scrape."""
    url = next(line["http"] for line in map(json.loads, daemon.log.splitlines()) if line["event"] == "ready")
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("refitd_")]
    return {
        (line.split("{")[0].split()[0], re.sub(r'le="[^"]*",?', "", line.partition("{")[2].rpartition("}")[0]))
        for line in lines
    }
