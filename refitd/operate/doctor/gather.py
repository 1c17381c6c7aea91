"""Looks at the node. Everything that may be missing or refused becomes a fact; only a bad configuration raises."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import resource
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd.config import Config
from refitd.daemon.devices import Devices, library_versions
from refitd.errors import ConfigError, PermissionDenied, StoreError
from refitd.operate.doctor.contact import reach
from refitd.operate.doctor.facts import Clock, Daemon, Facts, Gpus, Limits, Sharing, StoreFacts

if TYPE_CHECKING:
    from refitd.store import Store

_TIMEX = 256  # more than struct timex takes
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_NVIDIA = "0x10de"
_LIMIT_LINE = re.compile(r"Max (open files|locked memory) +(\S+)")

Ipc = Callable[[str], str]


def gather(
    config: Config, socket: str, ipc: Ipc, share: Callable[[], Sharing], nvml: Any = None, sysfs: Path = Path("/sys")
) -> Facts:
    """Facts of this node. ``ipc(uuid)`` tries a GPU (see `Gpus.ipc`), ``share()`` the host's memory."""
    daemon = reach(socket)
    return Facts(
        daemon=daemon,
        store=probe_store(config),
        gpus=look_at_gpus(ipc, nvml, sysfs),
        sharing=share(),
        clock=read_clock(),
        limits=read_limits(daemon),
        nics=read_nics(sysfs),
        rdma=any((sysfs / "class/infiniband").glob("*")),
        user=_user(),
        links=config.data.links,
    )


def look_at_gpus(ipc: Ipc, nvml: Any, sysfs: Path) -> Gpus:
    """Cards on the bus, what NVML makes of them, and whether processes can share their memory."""
    devices = Devices(nvml, sysfs)
    try:
        events = devices.refresh()
        present = tuple(sorted(devices.present.values(), key=lambda card: card.index))
        trouble = "; ".join(event.detail for event in events if not event.uuid)
        versions = library_versions()
        tried = {card.uuid: ipc(card.uuid) for card in present if versions["torch"]}
        return Gpus(count_cards(sysfs), devices.driver, trouble, present, versions, tried)
    finally:
        devices.close_quietly()


def count_cards(sysfs: Path) -> int:
    """NVIDIA's display and compute controllers (PCI class 03) on the bus."""
    count = 0
    for device in (sysfs / "bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            ours = (device / "vendor").read_text().strip() == _NVIDIA
            count += ours and (device / "class").read_text().startswith("0x03")
    return count


def probe_store(config: Config) -> StoreFacts:
    """One read from an ``etcd://`` store; nothing is asked of others, which are the daemon's own."""
    store, url = config.store, config.store.url
    if not url.startswith("etcd://"):
        return StoreFacts(url)
    from refitd.store import open_store

    try:
        opened = open_store(
            url, user=store.user, password_file=store.password_file, ca=store.ca, cert=store.cert, key=store.key,
            request_timeout=store.request_timeout,
        )  # fmt: skip
        with contextlib.closing(opened):
            _read_from(opened)  # the first one connects
            began = time.monotonic()
            _read_from(opened)
            return StoreFacts(url, seconds=time.monotonic() - began)
    except (StoreError, ConfigError) as error:
        return StoreFacts(url, type(error).__name__, str(error))


def _read_from(store: Store) -> None:
    with contextlib.suppress(PermissionDenied):  # its user may be allowed no more than its job's keys
        store.get("/refitd/doctor")


def read_clock() -> Clock:
    """What adjtimex(2) says; it changes nothing and needs no rights."""
    buffer = ctypes.create_string_buffer(_TIMEX)
    with contextlib.suppress(AttributeError, OSError):
        if ctypes.CDLL(None).adjtimex(buffer) >= 0:
            max_error, _estimated, status = struct.unpack_from("@qqi", buffer, 24)
            return Clock(not status & _UNSYNCHRONISED, max_error / 1e6)
    return Clock()


def read_limits(daemon: Daemon, proc: Path = Path("/proc")) -> Limits:
    """The daemon's soft limits where it runs and we may look, else our own; and the size of /dev/shm."""
    own = {"locked memory": resource.RLIMIT_MEMLOCK, "open files": resource.RLIMIT_NOFILE}
    found: Mapping[str, int | None] = {
        name: None if (soft := resource.getrlimit(number)[0]) == resource.RLIM_INFINITY else soft
        for name, number in own.items()
    }
    whose = "this process"
    if daemon.pid:
        with contextlib.suppress(OSError):
            found = parse_limits((proc / str(daemon.pid) / "limits").read_text())
            whose = "the daemon"
    return Limits(whose, found["locked memory"], found["open files"], _shm())


def parse_limits(text: str) -> dict[str, int | None]:
    """Soft limits of /proc/PID/limits by name; None: no limit."""
    return {name: None if soft == "unlimited" else int(soft) for name, soft in _LIMIT_LINE.findall(text)}


def _shm(path: str = "/dev/shm") -> int | None:  # noqa: S108 - looked at, not written to
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def read_nics(sysfs: Path) -> dict[str, float]:
    """Bytes a second of each RDMA port that is active, else of each hardware network interface that is up."""
    rdma = {
        f"{port.parent.parent.name}/{port.name}": _gigabits(_read(port / "rate")) * 1e9 / 8
        for port in (sysfs / "class/infiniband").glob("*/ports/*")
        if "ACTIVE" in _read(port / "state")
    }
    plain = {
        nic.name: max(0.0, _number(_read(nic / "speed"))) * 1e6 / 8
        for nic in (sysfs / "class/net").glob("*")
        if (nic / "device").exists() and _read(nic / "operstate") == "up"
    }
    return rdma or plain


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gigabits(text: str) -> float:
    """Of ``400 Gb/sec (4X NDR)``."""
    return _number(text.partition(" ")[0])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
