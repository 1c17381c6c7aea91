"""The GPUs of this node as NVML sees them. A missing driver or a lost GPU is an event, never an exception.

`Devices.refresh` blocks for some milliseconds: call it from a thread, every few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

NO_DRIVER, LOST, FOUND = "no driver", "lost", "found"
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_FABRIC_COMPLETED = 3
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. ``fabric`` is ``cluster/clique`` where it is part of an NVLink domain wider than its host, else None.

    ``nics`` are the RDMA devices, else the network interfaces, that share most of the GPU's way to the processor.
    """

    uuid: str
    index: int
    name: str
    pci: str
    memory_bytes: int
    compute_mode: str
    nvlinks: int
    fabric: str | None
    nics: tuple[str, ...]

    @property
    def sharable(self) -> bool:
        """Whether a mover can have a context of its own beside the trainer's."""
        return self.compute_mode == "default"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something that changed: ``kind`` is ``no driver``, ``lost`` or ``found``; ``uuid`` is empty for the driver."""

    kind: str
    uuid: str
    detail: str


class Devices:
    """What is there now, by UUID. ``nvml`` is the module ``pynvml`` or something like it; ``sysfs`` is ``/sys``."""

    def __init__(self, nvml: Any = None, sysfs: Path = Path("/sys")) -> None:
        self._nvml, self._sysfs = nvml if nvml is not None else _pynvml(), sysfs
        self._ready = False
        self._told_missing = False
        self.driver = ""
        self.present: Mapping[str, Device] = {}

    def refresh(self) -> list[DeviceEvent]:
        """Look again; what has changed since the last time."""
        found, troubles = self._look()
        events = [DeviceEvent(LOST, uuid, troubles.get(uuid, "gone")) for uuid in self.present.keys() - found.keys()]
        events += [DeviceEvent(FOUND, uuid, found[uuid].name) for uuid in found.keys() - self.present.keys()]
        missing = troubles.get("")
        if missing and not self._told_missing:
            events.append(DeviceEvent(NO_DRIVER, "", missing))
        self._told_missing = bool(missing)
        self.present = found
        return sorted(events, key=lambda event: (event.kind, event.uuid))

    def free_bytes(self, uuid: str) -> int | None:
        """Memory that nobody uses; None where the GPU does not answer."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        if self._ready:
            self._ready = False
            self._nvml.nvmlShutdown()

    # -- NVML

    def _look(self) -> tuple[dict[str, Device], dict[str, str]]:
        """Devices by UUID, and what went wrong: by UUID, or under "" for the driver."""
        nvml, troubles = self._nvml, dict[str, str]()
        try:
            self._start()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self.close_quietly()
            return {}, {"": str(error)}
        known = {device.index: device.uuid for device in self.present.values()}
        found: dict[str, Device] = {}
        for index in range(count):
            try:
                device = self._device(index)
            except nvml.NVMLError as error:
                if index in known:
                    troubles[known[index]] = str(error)
            else:
                found[device.uuid] = device
        return found, troubles

    def close_quietly(self) -> None:
        """Forget a driver that does not answer, so that the next look starts it afresh."""
        try:
            self.close()
        except self._nvml.NVMLError:
            return

    def _start(self) -> None:
        if not self._ready:
            self._nvml.nvmlInit()
            self._ready = True
            self.driver = _text(self._nvml.nvmlSystemGetDriverVersion())

    def _device(self, index: int) -> Device:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        return Device(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            pci=pci,
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            compute_mode=self._compute_mode(handle),
            nvlinks=self._nvlinks(handle),
            fabric=self._fabric(handle),
            nics=nearest_nics(pci, self._sysfs),
        )

    def _compute_mode(self, handle: Any) -> str:
        mode = self._optional(lambda: self._nvml.nvmlDeviceGetComputeMode(handle), 0)
        return _COMPUTE_MODES.get(mode, f"mode {mode}")

    def _nvlinks(self, handle: Any) -> int:
        """Links that are up."""
        states = (
            self._optional(lambda link=link: self._nvml.nvmlDeviceGetNvLinkState(handle, link), 0)
            for link in range(self._nvml.NVML_NVLINK_MAX_LINKS)
        )
        return sum(state == 1 for state in states)

    def _fabric(self, handle: Any) -> str | None:
        """Only of a fabric that spans hosts: inside one host the cluster's UUID is zero."""
        info = self._nvml.c_nvmlGpuFabricInfoV_t()
        if self._optional(lambda: self._nvml.nvmlDeviceGetGpuFabricInfoV(handle, self._nvml.byref(info)), None) is None:
            return None
        cluster = bytes(info.clusterUuid).hex()
        joined = info.state == _FABRIC_COMPLETED and info.status == 0 and cluster.strip("0")
        return f"{cluster}/{info.cliqueId}" if joined else None

    def _optional(self, ask: Any, otherwise: Any) -> Any:
        """What a card need not support; a lost one still raises."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_INVALID_ARGUMENT,
                               self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):  # fmt: skip
                return otherwise
            raise


def nearest_nics(pci: str, sysfs: Path) -> tuple[str, ...]:
    """Names of the NICs that share the longest path of PCI bridges with the device at ``pci``, in order.

    RDMA devices where there are any, else network interfaces that are hardware.
    """
    ours = (sysfs / "bus/pci/devices" / _sysfs_address(pci)).resolve().parts
    for kind in ("infiniband", "net"):
        found = {nic.name: (nic / "device").resolve().parts for nic in (sysfs / "class" / kind).glob("*")
                 if (nic / "device").exists()}  # fmt: skip
        if found:
            shared = {name: _common(ours, path) for name, path in found.items()}
            best = max(shared.values())
            return tuple(sorted(name for name, length in shared.items() if length == best))
    return ()


def _sysfs_address(pci: str) -> str:
    """NVML writes eight digits of domain, sysfs four."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def library_versions() -> dict[str, str]:
    """Installed versions of what both ends of a communicator must agree on; "" for what is not installed."""
    nccl = next(filter(None, map(_version, _NCCL_PACKAGES)), "")
    return {"torch": _version("torch"), "nccl": nccl, "nccl4py": _version("nccl4py")}


def driver_version() -> str:
    """Of NVIDIA's kernel driver; "" where there is none."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def nccl_conflict(versions: Mapping[str, str]) -> str | None:
    """Why ranks (key -> NCCL version) cannot share a communicator: NCCL refuses any mix. None where they can."""
    first: dict[str, str] = {}
    for rank, version in sorted(versions.items()):
        first.setdefault(version, rank)
    if len(first) < 2:
        return None
    return "NCCL versions differ: " + ", ".join(f"{version or 'none'} on {rank}" for version, rank in first.items())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pynvml() -> Any:
    import pynvml

    return pynvml
