"""What a doctor knows of a node, as plain data. Sizes in bytes, rates in bytes a second, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from refitd.daemon.devices import Device

NO_DAEMON, FORBIDDEN, SILENT, REFUSED, ANSWERS = "none", "forbidden", "silent", "refused", "answers"


@dataclass(frozen=True, slots=True)
class Gpus:
    """``cards``: NVIDIA's devices on the PCI bus; ``trouble``: what NVML says where it does not start.

    ``ipc``: by UUID, why one process could not map another's memory, empty where it could; a card that was not tried
    is not in it. ``versions``: of torch and nccl, "" for what is not installed.
    """

    cards: int = 0
    driver: str = ""
    trouble: str = ""
    present: tuple[Device, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ipc: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sharing:
    """A child read memory that we had lent it by descriptor: why not (empty: it did), and how fast."""

    trouble: str = ""
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon at ``socket``, as far as we reach it. ``contact``: one of the words above; ``detail``: why.

    ``pid``: as we see it, 0 where it is in a PID namespace that we do not see into. ``mode``, ``owner``, ``group``: of
    the socket's file. ``strangers``: namespaces (``ipc``, ``pid``, ``user``) that differ from ours. ``status``: its
    answer to ``status``.
    """

    socket: str
    contact: str = NO_DAEMON
    detail: str = ""
    pid: int = 0
    mode: int = 0
    owner: str = ""
    group: str = ""
    strangers: tuple[str, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """``kind``: the error's class where it does not answer, else empty; ``seconds``: of one read."""

    url: str
    kind: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Clock:
    """``synchronised``: by the kernel's word, None where it says nothing; ``error``: its own bound."""

    synchronised: bool | None = None
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of ``whose`` process; None: no limit. ``shm``: bytes of /dev/shm, None where there is none."""

    whose: str = "this process"
    memlock: int | None = None
    nofile: int | None = None
    shm: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything. ``nics``: rate of each network device that is up, 0 where it does not say; RDMA's if there is any."""

    daemon: Daemon
    store: StoreFacts
    gpus: Gpus = field(default_factory=Gpus)
    sharing: Sharing = field(default_factory=Sharing)
    clock: Clock = field(default_factory=Clock)
    limits: Limits = field(default_factory=Limits)
    nics: Mapping[str, float] = field(default_factory=dict)
    rdma: bool = False
    user: str = ""
    links: str = "auto"

    def ranks(self) -> list[Mapping[str, Any]]:
        """Clients of the daemon, as its status has them."""
        return [rank for job in self.daemon.status.get("jobs", {}).values() for rank in job["ranks"]]
