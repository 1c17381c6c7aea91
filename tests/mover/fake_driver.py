"""A driver with a card of its own: blocks, segments and mappings as numbers, shared by every process it plays."""

from __future__ import annotations

import os

from refitd.errors import DeviceError

SEGMENT = 1 << 21


class FakeCard:
    """Memory at addresses, of kind ``ipc``, ``vmm``, ``private`` (virtual, without handles) or ``pool``."""

    def __init__(self):
        self.allocations = {}  # base -> (nbytes, kind)
        self.next = 1 << 32
        self.exports = {}  # inode of the descriptor's file -> base

    def allocate(self, nbytes, kind="ipc"):
        """The address; virtual memory is made of segments that follow each other."""
        base = self.next
        step = SEGMENT if kind in ("vmm", "private") else nbytes
        for at in range(base, base + nbytes, step):
            self.allocations[at] = (step, kind)
        self.next = base + nbytes + (SEGMENT << 1)
        return base


class FakeDriver:
    """One process's view. ``live`` counts mappings, reservations and handles that it holds."""

    def __init__(self, card):
        self.card, self.live, self.calls, self.fail_at = card, {}, [], None

    def _note(self, call, *facts):
        self.calls.append((call, *facts))
        if self.fail_at == call:
            raise DeviceError(call, "CUDA_ERROR_OUT_OF_MEMORY")

    def _find(self, address):
        for base, (nbytes, kind) in self.card.allocations.items():
            if base <= address < base + nbytes:
                return base, nbytes, kind
        raise DeviceError("cuMemGetAddressRange", "CUDA_ERROR_INVALID_VALUE")

    def address_range(self, address):
        return self._find(address)[:2]

    def buffer_id(self, address):
        return self._find(address)[0]

    def ipc_handle(self, base):
        if self._find(base)[2] != "ipc":
            raise DeviceError("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE")
        return base.to_bytes(64, "little")

    def open_ipc(self, handle):
        self._note("open", handle)
        base = int.from_bytes(handle, "little")
        assert ("ipc", base) not in self.live, "a context may open a handle only once"
        self.live["ipc", base] = 1
        return base | 1 << 48

    def close_ipc(self, base):
        self._note("close")
        del self.live["ipc", base & ~(1 << 48)]

    def retain(self, address):
        base, _nbytes, kind = self._find(address)
        if kind not in ("vmm", "private"):
            raise DeviceError("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE")
        self.live["handle", base] = self.live.get(("handle", base), 0) + 1
        return base

    def release(self, handle):
        self.live["handle", handle] -= 1
        if not self.live["handle", handle]:
            del self.live["handle", handle]

    def export_fd(self, handle):
        if self._find(handle)[2] == "private":
            raise DeviceError("cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED")
        fd = os.memfd_create("segment")
        self.card.exports[os.fstat(fd).st_ino] = handle
        return fd

    def import_fd(self, fd):
        handle = self.card.exports[os.fstat(fd).st_ino]
        self.live["handle", handle] = self.live.get(("handle", handle), 0) + 1
        return handle

    def reserve(self, nbytes):
        self._note("reserve", nbytes)
        self.live["reserved", 1 << 50] = nbytes
        return 1 << 50

    def map(self, address, nbytes, handle):
        self._note("map", address, nbytes, handle)
        self.live["mapped", address] = nbytes

    def allow(self, address, nbytes, writable):
        self._note("allow", address, nbytes, writable)

    def unmap(self, address, nbytes):
        self._note("unmap", address, nbytes)
        for key in [key for key in self.live if key[0] == "mapped" and address <= key[1] < address + nbytes]:
            del self.live[key]

    def unreserve(self, address, nbytes):
        del self.live["reserved", address]

    def synchronize(self):
        self._note("synchronize")
