"""The network between nodes and etcd, with switches: namespaces where the machine allows them, else proxies.

A cut goes one way: what ``source`` sends does not reach ``target``, and neither end is told.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Protocol

from refitd.demo.chaos.proxy import Gates, Proxies, Whose
from refitd.demo.chaos.schedule import NODES
from refitd.demo.cluster import LAUNCH
from refitd.store.cluster import EtcdCluster

MEMBERS = ("n0", "n1", "n2")
_NET = "10.77.0"
_BRIDGE = "chaos0"
_NOWHERE = "02:00:00:00:00:ff"  # a neighbour with this address hears nothing
_HOSTS = {**{node: 1 + i for i, node in enumerate(NODES)}, **{member: 11 + i for i, member in enumerate(MEMBERS)}}
_SANDBOX = "REFITD_CHAOS_SANDBOX"


class Network(Protocol):
    """A `refitd.demo.cluster.Wiring` that can be cut."""

    name: str
    etcd: EtcdCluster

    def store(self, node: str) -> str: ...
    def data(self, node: str) -> dict[str, str | int]: ...
    def enter(self, node: str) -> Sequence[str]: ...
    def close(self) -> None: ...

    def cut(self, source: str, target: str) -> None:
        """Nothing that ``source`` sends arrives at ``target`` (nodes and etcd members) until `heal`."""

    def heal(self, source: str, target: str) -> None:
        """The cut ends, where there is one."""

    def can_cut(self, source: str, target: str) -> bool:
        """Whether this network has a switch there."""


def sandbox_command() -> list[str] | None:
    """What runs a command in a network of its own: as root, or in a user namespace; None where neither is allowed."""
    if not shutil.which("ip") or not shutil.which("nsenter"):
        return None
    for command in (["unshare", "-n"], ["unshare", "-Urn"]):
        probe = [*command, "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
        try:
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return command
        except OSError:
            return None
    return None


def sandboxed(environ: dict[str, str]) -> dict[str, str]:
    """The environment of a process that runs under `sandbox_command`."""
    return environ | {_SANDBOX: "1"}


def open_network(whose: Whose) -> Network:
    """Namespaces in a sandbox, else proxies; ``whose``: the node of a rank key. Raises StoreUnavailable."""
    return Namespaces() if os.environ.get(_SANDBOX) else ProxyNetwork(whose)


class Namespaces:
    """A network namespace for each node and etcd member, joined by a bridge in ours."""

    name = "network namespaces"

    def __init__(self) -> None:
        _ip("link", "set", "lo", "up")
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{_NET}.254/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        self._holders = {host: self._namespace(host) for host in _HOSTS}
        self._cuts: set[tuple[str, str]] = set()
        hosts, prefixes = [_address(m) for m in MEMBERS], [self.enter(m) for m in MEMBERS]
        self.etcd = EtcdCluster(len(MEMBERS), fsync=True, hosts=hosts, prefixes=prefixes)

    def _namespace(self, host: str) -> subprocess.Popen[bytes]:
        launch = [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid())]
        hold = "echo; exec sleep infinity"
        holder = subprocess.Popen([*launch, "unshare", "-n", "sh", "-c", hold], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()  # the namespace is there
        link, number, pid = f"chaos-{host}", _HOSTS[host], str(holder.pid)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("link", "set", link, "master", _BRIDGE, "up")
        inside = ("nsenter", "-t", pid, "-n")
        _ip("addr", "add", f"{_NET}.{number}/24", "dev", "eth0", inside=inside)
        for device in ("eth0", "lo"):
            _ip("link", "set", device, "up", inside=inside)
        return holder

    def store(self, node: str) -> str:
        del node
        return self.etcd.url

    def data(self, node: str) -> dict[str, str | int]:
        return {"host": _address(node), "port": 0}

    def enter(self, node: str) -> Sequence[str]:
        return ("nsenter", "-t", str(self._holders[node].pid), "-n")

    def cut(self, source: str, target: str) -> None:
        """The source believes the target at an address that nobody has."""
        _ip(
            "neigh", "replace", _address(target), "lladdr", _NOWHERE, "nud", "permanent", "dev", "eth0",
            inside=self.enter(source),
        )  # fmt: skip
        self._cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        if (source, target) in self._cuts:
            self._cuts.discard((source, target))
            _ip("neigh", "del", _address(target), "dev", "eth0", inside=self.enter(source))

    def can_cut(self, source: str, target: str) -> bool:
        return source != target

    def close(self) -> None:
        self.etcd.close()
        for holder in self._holders.values():
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        _ip("link", "del", _BRIDGE)


def _address(host: str) -> str:
    return f"{_NET}.{_HOSTS[host]}"


def _ip(*arguments: str, inside: Iterable[str] = ()) -> None:
    subprocess.run([*inside, "ip", *arguments], check=True, stdout=subprocess.DEVNULL)


class ProxyNetwork:
    """Loopback, with a proxy of each node before every etcd member and one before every data port."""

    name = "proxies"

    def __init__(self, whose: Whose) -> None:
        self.etcd = EtcdCluster(len(MEMBERS), fsync=True)
        self._gates = Gates()
        self._proxies = Proxies(self._gates, whose)
        endpoints = [(member, *_split(end)) for member, end in zip(MEMBERS, self.etcd.endpoints, strict=True)]
        self._store = {node: [self._proxies.to_member(node, *end) for end in endpoints] for node in NODES}
        self._data = {node: self._proxies.to_node(node) for node in NODES}

    def store(self, node: str) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self._store[node])

    def data(self, node: str) -> dict[str, str | int]:
        front, behind = self._data[node]
        return {"host": "127.0.0.1", "port": behind, "advertise": f"127.0.0.1:{front}"}

    def enter(self, node: str) -> Sequence[str]:
        del node
        return ()

    def cut(self, source: str, target: str) -> None:
        self._gates.shut(source, target)

    def heal(self, source: str, target: str) -> None:
        self._gates.open(source, target)

    def can_cut(self, source: str, target: str) -> bool:
        return source != target and (source in NODES or target in NODES)

    def close(self) -> None:
        self._proxies.close()
        self.etcd.close()


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
