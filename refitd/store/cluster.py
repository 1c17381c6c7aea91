"""A real etcd cluster of N nodes as children of this process, for tests, the demo's rigs and the chaos runs.

    with EtcdCluster(3) as etcd:                  # ready when it returns: a leader, and every node healthy
        store = open_store(etcd.url)              # etcd://127.0.0.1:p0,127.0.0.1:p1,127.0.0.1:p2
        etcd.kill(etcd.leader())                  # SIGKILL; leader() waits for the leader that the quorum has
        etcd.freeze(0); etcd.thaw(0)              # SIGSTOP, SIGCONT
        etcd.restart(1)                           # same data, same ports; waits until it is healthy
                                                  # close() ends the nodes and deletes their data (123 MB a node)

Nodes listen on free loopback ports and die with this process, also when it is killed. A node's data outlives kill()
and restart(), whose page cache survives SIGKILL, so writes are not synced unless ``fsync``. ``etcd.endpoints[i]`` is
node i's ``host:port``, ``etcd.pid(i)`` its process. In network namespaces pass ``hosts`` (a node's address each, which
this process must reach too) and ``prefixes`` (what goes before each node's command: ``("ip", "netns", "exec", "n0")``).
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from refitd.errors import StoreUnavailable
from refitd.store._child import Child
from refitd.store.spawn import Prefer, find_etcd, free_port, healthy, http_get, temporary_folder

_START = 30.0  # seconds until all nodes must be healthy
_TRIES = 3  # a free port may be taken between our look and etcd's bind
_POLL = 0.05


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of the servers; ``clients``: clients must show a certificate of the same authority (mutual TLS)."""

    ca: str
    cert: str
    key: str
    clients: bool = True

    def flags(self) -> dict[str, str]:
        """etcd's flags for its client side."""
        trusted = {"--client-cert-auth": "true", "--trusted-ca-file": self.ca} if self.clients else {}
        return {"--cert-file": self.cert, "--key-file": self.key} | trusted


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    host: str
    client: int
    peer: int
    plain: int  # /health and /metrics, without TLS

    @property
    def peer_url(self) -> str:
        return f"http://{self.host}:{self.peer}"


class EtcdCluster:
    """``n`` etcd nodes; the module says how to use them. ``flags``: more of etcd's own, for every node.

    ``heartbeat``, ``election``: etcd's own times, seconds. Raises ConfigError without an etcd program,
    StoreUnavailable when the cluster does not come up.
    """

    def __init__(
        self,
        n: int = 3,
        *,
        prefer: Prefer = "path",
        fsync: bool = False,
        heartbeat: float = 0.1,
        election: float = 1.0,
        tls: Tls | None = None,
        flags: Sequence[str] = (),
        hosts: Sequence[str] = (),
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        self._program = find_etcd(prefer)
        times = {"--heartbeat-interval": f"{heartbeat * 1000:.0f}", "--election-timeout": f"{election * 1000:.0f}"}
        self._tls = tls
        self._flags = [*_flat((times | (tls.flags() if tls else {})).items()), *flags]
        self._flags += [] if fsync else ["--unsafe-no-fsync"]
        self._hosts = list(hosts) or ["127.0.0.1"] * n
        self._prefixes = [list(prefix) for prefix in prefixes] or [[] for _ in range(n)]
        self.folder = temporary_folder("refitd-cluster-", "n*")
        self._nodes: list[_Node] = []
        self._children: list[Child] = []
        try:
            self._start(n)
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> list[str]:
        """``host:port`` of each node's client side."""
        return [f"{node.host}:{node.client}" for node in self._nodes]

    @property
    def url(self) -> str:
        """What open_store takes: all endpoints."""
        return f"etcd://{','.join(self.endpoints)}"

    def pid(self, i: int) -> int:
        """Process id of node ``i``."""
        return self._children[i].pid

    def running(self, i: int) -> bool:
        """Whether the process of node ``i`` is alive (a frozen one is)."""
        return self._children[i].running

    def kill(self, i: int) -> None:
        """SIGKILL node ``i``, frozen or not; it has ended when this returns."""
        self._children[i].kill()

    def freeze(self, i: int) -> None:
        """SIGSTOP node ``i``: its sockets stay open and nothing answers."""
        self._children[i].freeze()

    def thaw(self, i: int) -> None:
        """SIGCONT node ``i``."""
        self._children[i].thaw()

    def restart(self, i: int, wait: bool = True) -> None:
        """Start node ``i`` again (killed first where it runs) on its data.

        Raises StoreUnavailable when it does not become healthy; pass ``wait=False`` where there is no quorum yet.
        """
        self.kill(i)
        self._children[i] = self._launch(i)
        if wait:
            self.wait_healthy([i])

    def leader(self, seconds: float = 15.0) -> int:
        """The node that leads with a quorum, waiting for an election. Raises StoreUnavailable after ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for i in range(len(self._nodes)):
                if self._leads(i):
                    return i
            time.sleep(_POLL)
        raise StoreUnavailable(f"no etcd of {', '.join(self.endpoints)} led within {seconds:g} s")

    def healthy(self, i: int) -> bool:
        """Whether node ``i`` answers, and has a quorum."""
        return self.running(i) and healthy(self._nodes[i].host, self._nodes[i].plain)

    def wait_healthy(self, nodes: Iterable[int] | None = None, seconds: float = _START) -> None:
        """Wait for nodes (None: all) to be healthy. Raises StoreUnavailable with the start of the log."""
        deadline = time.monotonic() + seconds
        for i in range(len(self._nodes)) if nodes is None else nodes:
            while not self.healthy(i):
                if time.monotonic() > deadline or not self.running(i):
                    raise StoreUnavailable(f"etcd {self.endpoints[i]} did not become healthy: {self._log_start(i)}")
                time.sleep(_POLL)

    def close(self) -> None:
        """End all nodes and delete their data; may be called twice."""
        for child in self._children:
            child.send(signal.SIGKILL)
        for child in self._children:
            child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, n: int) -> None:
        for attempt in range(_TRIES):
            self._nodes = [_Node(f"n{i}", self._hosts[i], free_port(), free_port(), free_port()) for i in range(n)]
            self._children = [self._launch(i) for i in range(n)]
            try:
                self.wait_healthy()
                return
            except StoreUnavailable:
                if attempt == _TRIES - 1:
                    raise
            for i in range(n):
                self.kill(i)
                shutil.rmtree(self.folder / self._nodes[i].name, ignore_errors=True)

    def _launch(self, i: int) -> Child:
        node, scheme = self._nodes[i], "https" if self._tls else "http"
        client = f"{scheme}://{node.host}:{node.client}"
        flags = {
            "--name": node.name,
            "--data-dir": str(self.folder / node.name),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": node.peer_url,
            "--initial-advertise-peer-urls": node.peer_url,
            "--initial-cluster": ",".join(f"{peer.name}={peer.peer_url}" for peer in self._nodes),
            "--initial-cluster-token": self.folder.name,
            "--listen-metrics-urls": f"http://{node.host}:{node.plain}",
            "--logger": "zap",
            "--log-level": "error",
        }
        command = [*self._prefixes[i], str(self._program), *_flat(flags.items()), *self._flags]
        return Child(command, self.folder / f"{node.name}.log")

    def _leads(self, i: int) -> bool:
        """A leader that was cut off still says that it leads; it is not healthy."""
        if not self.running(i):
            return False
        metrics = http_get(self._nodes[i].host, self._nodes[i].plain, "/metrics", 0.5)
        return b"\netcd_server_is_leader 1\n" in metrics and self.healthy(i)

    def _log_start(self, i: int) -> str:
        log = self.folder / f"{self._nodes[i].name}.log"
        return log.read_text(errors="replace")[:500] if log.exists() else "no log"


def _flat(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """``--flag=value`` for each: etcd's switches take no other form."""
    return [f"{flag}={value}" for flag, value in pairs]
