"""The daemon under a service manager: what it says to a fake one, and clients that come while it restarts."""

from __future__ import annotations

import asyncio
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from refitd import connect_trainer
from refitd.config import load
from refitd.daemon.app import STUCK_SECONDS, Daemon
from refitd.hook.admin import ask
from refitd.layout import Layout
from refitd.telemetry.pulse import Pulse
from refitd.testing import LocalDaemon, split_layout

WEIGHTS: Layout = split_layout({"w": ((4, 6), "float32")}, 0, 1)
SECONDS = 30.0


class Manager:
    """A service manager's end of the notify socket."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.path)
        self.heard: list[str] = []

    def wait_for(self, word: str, seconds: float = SECONDS) -> str:
        """The next message with ``word`` in it; everything that comes is kept in ``heard``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._sock.settimeout(left)
            try:
                self.heard.append(self._sock.recv(4096).decode())
            except TimeoutError:
                break
            if word in self.heard[-1]:
                return self.heard[-1]
        raise AssertionError(f"no {word} within {seconds} s: {self.heard}")

    def pings(self, seconds: float) -> int:
        """How often the daemon shows life within ``seconds``."""
        count, deadline = 0, time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._sock.settimeout(left)
            try:
                count += self._sock.recv(4096) == b"WATCHDOG=1"
            except TimeoutError:
                break
        return count

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def environ(manager: Manager, watchdog: float = 10.0) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": str(round(watchdog * 1e6))}


def test_ready_watchdog_reload_and_stop(manager: Manager) -> None:
    """N3: READY does not wait for the store; signs of life come at least every half of the limit, and none while the
    process stands; HUP is a reload; TERM is a stop with status 0."""
    quiet = {"log.level": "warning", "store.url": "etcd://127.0.0.1:9", "metrics.listen": ""}
    with LocalDaemon(config=quiet, environ=environ(manager)) as daemon:
        assert manager.wait_for("READY=1").startswith(f"READY=1\nSTATUS=serving {daemon.socket}")
        assert "EXTEND_TIMEOUT_USEC=60000000" in manager.heard
        assert manager.pings(4.5) >= 2
        os.kill(daemon.pid, signal.SIGSTOP)
        manager.pings(0.2)
        assert manager.pings(1.5) == 0
        os.kill(daemon.pid, signal.SIGCONT)
        _rewrite(daemon, "warning", "info")
        os.kill(daemon.pid, signal.SIGHUP)
        assert manager.wait_for("RELOADING=1").startswith("RELOADING=1\nMONOTONIC_USEC=")
        assert manager.wait_for("READY=1").startswith("READY=1\nSTATUS=")
        assert '"event": "reloaded"' in daemon.log
        assert '"taken": ["log.level"]' in daemon.log
        _rewrite(daemon, '"info"', '"loud"')
        os.kill(daemon.pid, signal.SIGHUP)
        manager.wait_for("READY=1")
        assert "log.level: expected" in daemon.log
        assert daemon.status()["node"] == "node0"
        os.kill(daemon.pid, signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert daemon.wait() == 0


def _rewrite(daemon: LocalDaemon, old: str, new: str) -> None:
    path = daemon.folder / "refitd.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_loop_that_is_stuck_starves_the_watchdog(
    manager: Manager, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N3: the main loop alone turning is not enough: a job's loop that stands still ends the signs of life, and the
    daemon's health names it; when it goes on, or its job is left, they come again."""
    for name, value in environ(manager).items():
        monkeypatch.setenv(name, value)
    config = load(None, {}, {
        "node.name": "n0", "node.state_dir": str(tmp_path / "state"), "hook.socket": str(tmp_path / "hook.sock"),
    })  # fmt: skip
    now = [0.0]

    async def main() -> None:
        daemon = Daemon(config)
        daemon.metrics.pulse = Pulse(lambda: now[0])
        daemon.metrics.beat("job grpo")
        for second, alive in ((1.0, True), (STUCK_SECONDS - 1, True), (STUCK_SECONDS + 1, False)):
            now[0] = second
            daemon.watchdog()
            assert manager.pings(0.05) == alive
        assert daemon.observer.health() == f"job grpo has stood still for {STUCK_SECONDS + 1:.0f} s"
        daemon.metrics.beat("job grpo")
        daemon.watchdog()
        assert (manager.pings(0.05), daemon.observer.health()) == (1, "")

    asyncio.run(main())


def test_a_bad_configuration_is_status_78(manager: Manager) -> None:
    """RestartPreventExitStatus=78 rests on it; READY was never said."""
    daemon = LocalDaemon(config={"store.keepalive": 60.0}, environ=environ(manager))
    daemon.launch()
    assert daemon.wait() == 78
    assert manager.pings(0.1) == 0
    assert manager.heard == []
    daemon.stop()


@pytest.fixture
def listener(tmp_path: pathlib.Path) -> Iterator[socket.socket]:
    """The hook's socket as refitd.socket makes it: it outlives every daemon."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "hook.sock"))
        sock.listen(256)
        yield sock


def start(listener: socket.socket, folder: pathlib.Path, log: str) -> subprocess.Popen[bytes]:
    """A daemon that is handed the socket as descriptor 3, as systemd does it."""
    values = {
        "node.name": "n0", "node.state_dir": folder / "state", "hook.socket": folder / "hook.sock",
        "metrics.listen": "", "log.format": "json",
    }  # fmt: skip
    keys = " ".join(f"--set {key}={value}" for key, value in values.items())
    fd = listener.fileno()
    hand_over = (
        f"exec 3<&{fd}; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=hook exec {sys.executable} -m refitd.cli run {keys}"
    )
    with (folder / log).open("wb") as out:
        return subprocess.Popen(
            ["bash", "-c", hand_over], pass_fds=[fd], stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_that_connects_while_the_daemon_restarts_is_served(
    tmp_path: pathlib.Path, listener: socket.socket, number: signal.Signals
) -> None:
    """The socket outlives a daemon that is killed or stopped: whoever connects meanwhile waits in the queue."""
    path = str(tmp_path / "hook.sock")
    first = start(listener, tmp_path, "first")
    assert ask("status", path, timeout=SECONDS)["node"] == "n0"
    first.send_signal(number)
    first.wait(SECONDS)
    with connect_trainer("grpo", "run0", 0, 1, path) as trainer:
        second = start(listener, tmp_path, "second")
        try:
            trainer.register(WEIGHTS)
            deadline = time.monotonic() + SECONDS
            while not (ranks := _ranks(path)) and time.monotonic() < deadline:
                trainer.client.advance(time.monotonic() + 0.1)
            assert ranks == ["trainer/run0/0"], (tmp_path / "second").read_text()
        finally:
            second.terminate()
            assert second.wait(SECONDS) == 0
    assert pathlib.Path(path).is_socket()


def _ranks(path: str) -> list[str]:
    jobs = ask("status", path, timeout=SECONDS)["jobs"]
    return [rank["key"] for rank in jobs["grpo"]["ranks"]] if "grpo" in jobs else []


def test_systemd_hands_over_the_socket(tmp_path: pathlib.Path) -> None:
    """systemd-socket-activate starts the daemon for the first client, who is answered."""
    program = shutil.which("systemd-socket-activate")
    if program is None:
        pytest.fail("no systemd-socket-activate on PATH: apt-get install systemd")
    path = tmp_path / "hook.sock"
    config = tmp_path / "refitd.toml"
    config.write_text(
        f'[node]\nname = "n0"\nstate_dir = "{tmp_path}/state"\n[hook]\nsocket = "{path}"\n[metrics]\nlisten = ""\n'
    )
    command = [program, "--fdname=hook", "-E", "PATH", "-l", str(path)]
    daemon = subprocess.Popen(
        [*command, sys.executable, "-m", "refitd.cli", "run", "--config", str(config)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + SECONDS
        while not path.is_socket() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ask("status", str(path), timeout=SECONDS)["node"] == "n0"
    finally:
        daemon.terminate()
        assert daemon.wait(SECONDS) == 0
    assert path.is_socket()
