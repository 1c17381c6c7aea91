"""A GPU for machines without one: device memory is a file that every process maps, kernels are torch on the CPU.

`install` puts it where refitd looks for CUDA. The file of an allocation is in ``$REFITD_FAKE_GPU``.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
from pathlib import Path

from refitd.errors import DeviceError
from refitd.mover.cuda.device import Device

UUID = "GPU-fake"  # of the first card; the others have their number behind it
_numbers = itertools.count(1)
_card = 0  # in use in this process
_mine: dict[int, tuple[int, int, mmap.mmap]] = {}  # address -> (nbytes, number, mapping)


def use(card):
    """Allocate on that card from here on."""
    global _card
    _card = card


def uuid_of(card):
    return f"{UUID}-{card}" if card else UUID


def allocate(nbytes):
    """Address of new memory that other processes can map."""
    number = os.getpid() << 20 | next(_numbers)
    path = Path(os.environ["REFITD_FAKE_GPU"]) / str(number)
    path.write_bytes(b"")
    os.truncate(path, nbytes)
    address, mapping = _map(path, nbytes)
    _mine[address] = nbytes, number, mapping
    return address


def free(address):
    _mine.pop(address)


def _map(path, nbytes):
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), nbytes)
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping)), mapping


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
        pass

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
        path = Path(os.environ["REFITD_FAKE_GPU"]) / str(int.from_bytes(handle, "little"))
        address, mapping = _map(path, path.stat().st_size)
        self.opened[address] = mapping
        return address

    def close_ipc(self, base):
        del self.opened[base]


def place_of(block):
    """As `refitd.hook.gpu.lend.place_of`, for memory of `allocate`."""
    inside = any(base <= block.address < base + nbytes for base, (nbytes, _n, _m) in _mine.items())
    return (_card, block.address) if inside else None


def open_device(uuid):
    return Device(FakeDriver(uuid), "cpu")


def install():
    """In this process, before its movers and clients are made."""
    from refitd.hook import engine, trainer
    from refitd.hook.gpu import lend
    from refitd.mover.cuda import device

    lend.Driver, lend.place_of = FakeDriver, place_of
    for module in (lend, trainer, engine):
        module.current_device = lambda: uuid_of(_card)
    device.open_device = open_device
