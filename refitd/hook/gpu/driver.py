"""The few calls of CUDA's driver that sharing memory takes, each checked. Needs ``cuda-bindings``, as torch does.

Every call acts in the calling thread's context: `Driver.activate` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from refitd.errors import DeviceError


class Calls(Protocol):
    """What exporting and importing ask of a driver; tests have one that needs no GPU."""

    def address_range(self, address: int) -> tuple[int, int]: ...
    def ipc_handle(self, base: int) -> bytes: ...
    def open_ipc(self, handle: bytes) -> int: ...
    def close_ipc(self, base: int) -> None: ...
    def retain(self, address: int) -> int: ...
    def release(self, handle: int) -> None: ...
    def export_fd(self, handle: int) -> int: ...
    def import_fd(self, fd: int) -> int: ...
    def reserve(self, nbytes: int) -> int: ...
    def map(self, address: int, nbytes: int, handle: int) -> None: ...
    def allow(self, address: int, nbytes: int, writable: bool) -> None: ...
    def unmap(self, address: int, nbytes: int) -> None: ...
    def unreserve(self, address: int, nbytes: int) -> None: ...
    def synchronize(self) -> None: ...
    def wait_for(self, streams: Sequence[int]) -> None: ...
    def buffer_id(self, address: int) -> int: ...
    def activate(self) -> None: ...
    def uuid(self) -> str: ...
    def enable_peer(self, device: int | str) -> None: ...


class Driver:
    """CUDA's driver for one device. Raises DeviceError where there is none; so does every call that fails."""

    def __init__(self, device: int | str) -> None:
        """``device``: its number among those that this process may see, or its UUID."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError("import cuda.bindings", f"not installed: {error}") from error
        self._cuda = driver
        self._call("cuInit", 0)
        self.ordinal = device if isinstance(device, int) else self._ordinal_of(device)
        self._device = self._call("cuDeviceGet", self.ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.activate()

    def activate(self) -> None:
        """Make the device's primary context, the one that torch uses, the calling thread's."""
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Let go of the context, which lives on as long as torch holds it."""
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def wait_for(self, streams: Sequence[int]) -> None:
        """Return when what these streams of the device have been given so far is done, by an event on each."""
        events: list[Any] = []
        try:
            for stream in streams:
                events.append(self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
                self._call("cuEventRecord", events[-1], stream)
            for event in events:
                self._call("cuEventSynchronize", event)
        finally:
            for event in events:
                self._call("cuEventDestroy", event)

    def uuid(self) -> str:
        """As NVML writes it: ``GPU-`` and 32 hex digits in groups."""
        return _uuid(self._call("cuDeviceGetUuid", self._device))

    def enable_peer(self, device: int | str) -> None:
        """Let kernels here read the memory of another device; without it they die of an illegal address."""
        ordinal = device if isinstance(device, int) else self._ordinal_of(device)
        peer = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))
        try:
            self._call("cuCtxEnablePeerAccess", peer, 0)
        except DeviceError as error:
            if error.status != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    # -- blocks of cudaMalloc

    def address_range(self, address: int) -> tuple[int, int]:
        """Start and bytes of the allocation, or of the mapping, that ``address`` lies in."""
        base, nbytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def buffer_id(self, address: int) -> int:
        """A number that no other allocation of this process ever has, also where an address is used again."""
        attribute = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        return int(self._call("cuPointerGetAttribute", attribute, address))

    def ipc_handle(self, base: int) -> bytes:
        """64 bytes by which another process opens the whole block."""
        return bytes(self._call("cuIpcGetMemHandle", base).reserved)

    def open_ipc(self, handle: bytes) -> int:
        made = self._cuda.CUipcMemHandle()
        made.reserved = handle
        flags = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(self._call("cuIpcOpenMemHandle", made, flags))

    def close_ipc(self, base: int) -> None:
        self._call("cuIpcCloseMemHandle", base)

    # -- virtual memory management: expandable segments, engines' sleep modes

    def retain(self, address: int) -> int:
        """The physical allocation behind ``address``, to be released."""
        return int(self._call("cuMemRetainAllocationHandle", address))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """A descriptor of a physical allocation; the caller closes it."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type(), 0))

    def import_fd(self, fd: int) -> int:
        """The physical allocation behind a descriptor, which stays the caller's."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._fd_type()))

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int, writable: bool) -> None:
        """Let this device read, or read and write, what is mapped."""
        access, flags = self._cuda.CUmemAccessDesc(), self._cuda.CUmemAccess_flags
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def _ordinal_of(self, uuid: str) -> int:
        for ordinal in range(self._call("cuDeviceGetCount")):
            if _uuid(self._call("cuDeviceGetUuid", self._call("cuDeviceGet", ordinal))) == uuid:
                return ordinal
        raise DeviceError("cuDeviceGetUuid", f"no device {uuid} is visible here (CUDA_VISIBLE_DEVICES?)")

    def _fd_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            status, *results = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:  # the bindings found no libcuda, or one without this call
            raise DeviceError(name, f"no driver: {error}") from error
        if status.value:
            raise DeviceError(name, status.name)
        return results[0] if len(results) == 1 else tuple(results)


def _uuid(found: Any) -> str:
    digits = bytes(found.bytes).hex()
    return "GPU-" + "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
