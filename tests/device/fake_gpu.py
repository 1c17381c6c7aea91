"""A GPU for machines without one: device memory is a file that every process maps, kernels are torch on the CPU.

`install` puts it where refitd looks for CUDA. The file of an allocation is in ``$REFITD_FAKE_GPU``: it takes room there
for as long as any process maps it, as on a card. While there is a file ``full``, nothing can be allocated for movers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
from pathlib import Path

import torch

from refitd.errors import DeviceError
from refitd.mover.cuda.device import Device, device_errors
from refitd.mover.device import bytes_at
from refitd.mover.kernels.table import samples
from refitd.mover.spent import Spent

UUID = "GPU-fake"  # of the first card; the others have their number behind it
CONTEXT_BYTES = 1 << 20
_numbers = itertools.count(1)
_card = 0  # in use in this process
_mine: dict[int, tuple[int, int, _Mapping]] = {}  # address -> (nbytes, number, mapping)
waited: list[object] = []  # in this process: "device", streams, and devices from which weights were staged
_freed: list[tuple[int, int]] = []  # (nbytes, address): allocators give the same address again
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping:
    """Of a file, from its start, at ``hint`` if that is free; ends with the last reference."""

    def __init__(self, path, nbytes, hint=0):
        self.nbytes = nbytes
        with path.open("r+b") as file:
            self.address = _libc.mmap(hint, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
        assert self.address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())

    def __del__(self):
        _libc.munmap(self.address, self.nbytes)


def use(card):
    """Allocate on that card from here on."""
    global _card
    _card = card


def uuid_of(card):
    return f"{UUID}-{card}" if card else UUID


def allocate(nbytes):
    """Address of new memory that other processes can map: that of the last freed of this size, if there is one."""
    number = os.getpid() << 20 | next(_numbers)
    path = Path(os.environ["REFITD_FAKE_GPU"]) / str(number)
    path.write_bytes(b"")
    os.truncate(path, nbytes)
    freed = next((one for one in reversed(_freed) if one[0] == nbytes), (nbytes, 0))
    if freed in _freed:
        _freed.remove(freed)
    mapping = _Mapping(path, nbytes, freed[1])
    _mine[mapping.address] = nbytes, number, mapping
    return mapping.address


def free(address):
    _freed.append((_mine.pop(address)[0], address))


def used():
    """Bytes of all allocations that some process maps."""
    folder = os.environ["REFITD_FAKE_GPU"]
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            found |= {line.split()[-1] for line in maps.read_text().splitlines() if folder in line}
    return sum(Path(name).stat().st_size for name in found)


def full():
    """The file that says that there is no room."""
    return Path(os.environ["REFITD_FAKE_GPU"]) / "full"


class FakeDriver:
    """One process's view of the card."""

    def __init__(self, device=0):
        if os.environ.get("REFITD_FAKE_GPU_FAILS"):
            raise DeviceError("cuInit", "CUDA_ERROR_NO_DEVICE")
        if os.environ.get("REFITD_FAKE_GPU_EXCLUSIVE") and "refitd.mover.forkserver" in sys.orig_argv:
            raise DeviceError("cuDevicePrimaryCtxRetain", "CUDA_ERROR_DEVICE_UNAVAILABLE")
        number = str(device).removeprefix(UUID).removeprefix("-") or "0"
        if not number.isdigit():
            raise DeviceError("cuDeviceGetUuid", f"no device {device}")
        self.ordinal, self.opened, self.peers = int(number), {}, set()

    def activate(self):
        pass

    def synchronize(self):
        waited.append("device")

    def wait_for(self, streams):
        waited.extend(streams)

    def uuid(self):
        return uuid_of(self.ordinal)

    def enable_peer(self, device):
        self.peers.add(device)

    def _find(self, address):
        for base, (nbytes, number, _mapping) in _mine.items():
            if base <= address < base + nbytes:
                return base, nbytes, number
        raise DeviceError("cuMemGetAddressRange", "CUDA_ERROR_INVALID_VALUE")

    def address_range(self, address):
        return self._find(address)[:2]

    def buffer_id(self, address):
        return self._find(address)[2]

    def retain(self, address):
        raise DeviceError("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE")

    def ipc_handle(self, base):
        return self._find(base)[2].to_bytes(64, "little")

    def open_ipc(self, handle):
        """Nobody's handle, and the handle of a process that has ended, are no handles."""
        number = int.from_bytes(handle, "little")
        path = Path(os.environ["REFITD_FAKE_GPU"]) / str(number)
        if len(path.name) > 20 or not path.exists() or not Path(f"/proc/{number >> 20}").exists():
            raise DeviceError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE")
        mapping = _Mapping(path, path.stat().st_size)
        self.opened[mapping.address] = mapping
        return mapping.address

    def close_ipc(self, base):
        del self.opened[base]


def place_of(block):
    """As `refitd.hook.gpu.lend.place_of`, for memory of `allocate`."""
    inside = any(base <= block.address < base + nbytes for base, (nbytes, _n, _m) in _mine.items())
    return (_card, block.address) if inside else None


def empty(nbytes):
    """As `refitd.hook.shadows.device_empty`."""
    return bytes_at(allocate(nbytes), nbytes, "cpu")


class FakeDevice(Device):
    """Full when the file says so."""

    def room(self, nbytes, what):
        with device_errors(what):
            _require_room()
        return super().room(nbytes, what)

    def prepare(self, table, kinds=0):
        with device_errors("prepare a launch"):
            _require_room()
        return super().prepare(table, kinds)

    def touch(self, tables):
        return FakeTouch(tables)


class FakeTouch:
    """Reads where the kernel would, and leaves word of it in the file ``touched``."""

    def __init__(self, tables):
        self._at = [place for table in tables if len(table.tiles) for place in samples(table).tolist()]

    def run(self):
        total = sum(ctypes.c_uint8.from_address(place).value for place in self._at)
        with (Path(os.environ["REFITD_FAKE_GPU"]) / "touched").open("a") as file:
            file.write(f"{len(self._at)} {total}\n")


def _require_room():
    if full().exists():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")


def open_device(uuid, spent=None):
    """A context takes room, for as long as its process lives."""
    with (spent or Spent()).on("context"):
        allocate(CONTEXT_BYTES)
        return FakeDevice(FakeDriver(uuid), "cpu")


def install():
    """In this process, before its movers and clients are made."""
    from refitd.hook import engine, shadows, trainer
    from refitd.hook.gpu import lend
    from refitd.mover.cuda import device

    lend.settle = waited.extend
    lend.Driver, lend.place_of, shadows.device_empty = FakeDriver, place_of, empty
    for module in (lend, trainer, engine):
        module.current_device = lambda: uuid_of(_card)
    device.open_device = open_device
