"""The node daemons: started, asked, signalled and restarted."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from refitd.hook.admin import ask
from refitd.store.spawn import spawn_etcd

TRAINER_NODES = ("a", "b")
ENGINE_NODES = ("c", "d")
NODES = TRAINER_NODES + ENGINE_NODES

# Runs in the child before the daemon: the kernel shall kill it when the driver ends.
LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
_CONFIG = """\
[node]
name = "{name}"
state_dir = "{folder}"
[store]
url = "{store}"
[hook]
socket = "{socket}"
[metrics]
listen = "127.0.0.1:0"
[data]
{data}
secret_file = "{secret}"
[log]
level = "info"
format = "json"
"""


class Wiring(Protocol):
    """What connects daemons: the store, and the network that each of them lives in."""

    def store(self, node: str) -> str:
        """The store's URL as the node's daemon sees it."""

    def data(self, node: str) -> dict[str, str | int]:
        """Keys of the node's ``[data]`` section: its address."""

    def enter(self, node: str) -> Sequence[str]:
        """What comes before the daemon's command."""

    def close(self) -> None:
        """End the store."""


class Loopback:
    """Everything on 127.0.0.1, and an etcd of our own."""

    def __init__(self) -> None:
        self._etcd = spawn_etcd(prefer="distro")

    def store(self, node: str) -> str:
        del node
        return self._etcd.url

    def data(self, node: str) -> dict[str, str | int]:
        del node
        return {"host": "127.0.0.1", "port": 0}

    def enter(self, node: str) -> Sequence[str]:
        del node
        return ()

    def close(self) -> None:
        self._etcd.stop()


@dataclass
class Daemon:
    """One ``refitd run`` process. ``down`` says that it is dead or stopped on purpose."""

    name: str
    folder: Path
    enter: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    down: bool = False

    @property
    def socket(self) -> Path:
        return self.folder / "hook.sock"

    @property
    def log(self) -> Path:
        return self.folder / "daemon.log"

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def start(self, failpoints: Path | None) -> None:
        """Start it (again), with the configuration that it had. Call it in the main thread: it dies with that."""
        environ = dict(os.environ)
        if failpoints is not None:
            environ["REFITD_FAILPOINTS"] = str(failpoints)
        launch = [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid())]
        command = [sys.executable, "-m", "refitd.cli", "run", "--config", str(self.folder / "refitd.toml")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*launch, *self.enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        self.down = False

    def exited(self) -> int | None:
        """Its exit status, None while it runs."""
        return self.process.poll() if self.process else None

    def answers(self) -> bool:
        """Whether its hook's socket takes connections."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1)
            return sock.connect_ex(str(self.socket)) == 0

    def status(self) -> dict[str, Any]:
        """What ``refitd status`` shows. Raises DaemonUnavailable where it does not answer."""
        return ask("status", str(self.socket), timeout=2)


@dataclass
class Cluster:
    """A daemon for each node, under one folder, and what connects them."""

    folder: Path
    wiring: Wiring
    failpoints: Path | None
    daemons: dict[str, Daemon] = field(default_factory=dict)

    @classmethod
    def start(
        cls, folder: Path, failpoints: Path | None, wiring: Wiring | None = None, nodes: Sequence[str] = NODES
    ) -> Cluster:
        """Start everything; daemons come up on their own time (`Daemon.answers`). Raises StoreUnavailable."""
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16))
        cluster = cls(folder, wiring or Loopback(), failpoints)
        for name in nodes:
            cluster.daemons[name] = cluster._prepare(name, secret)
            cluster.daemons[name].start(failpoints)
        return cluster

    def _prepare(self, name: str, secret: Path) -> Daemon:
        daemon = Daemon(name, self.folder / name, self.wiring.enter(name))
        daemon.folder.mkdir()
        data = "\n".join(f"{key} = {json.dumps(value)}" for key, value in self.wiring.data(name).items())
        text = _CONFIG.format(
            name=name, folder=daemon.folder, store=self.wiring.store(name), socket=daemon.socket, secret=secret,
            data=data,
        )  # fmt: skip
        (daemon.folder / "refitd.toml").write_text(text)
        return daemon

    def stop(self) -> None:
        """Kill every daemon (its movers die with it) and end the store."""
        for daemon in self.daemons.values():
            if daemon.process is not None:
                for pid in [daemon.pid, *descendants(daemon.pid)]:
                    kill(pid, signal.SIGKILL)
                daemon.process.wait()
        self.wiring.close()


def movers(daemon: Daemon) -> list[int]:
    """Pids of a daemon's movers: the children of its fork server."""
    return sorted(mover for server in _children(daemon.pid) for mover in _children(server))


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def kill(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False where there is no such process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
