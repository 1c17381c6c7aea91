"""Memory on a GPU that a mover has mounted: addresses instead of arrays, let go of while nobody is at work on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd.errors import ProtocolError, TransportError
from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.cuda.device import Device, device_errors
from refitd.mover.device import bytes_at
from refitd.mover.kernels import Table, gather, scatter
from refitd.mover.memory import Memory
from refitd.plan.execute import Bytes
from refitd.plan.program import Bucket, Program, StorageRef


class DeviceMemory(Memory):
    """The memory of rank ``key`` on ``device``: ``addresses`` by storage name, valid while it is `pinned`."""

    on_device = True

    def __init__(
        self,
        key: str,
        device: Device,
        addresses: Mapping[str, int],
        sizes: Mapping[str, int],
        guard: tuple[NDArray[np.uint64], int],
        writable: bool,
        unmap: Callable[[], None],
    ) -> None:
        """``guard`` is the control page and the index of the loan word; ``unmap`` ends the mapping."""
        super().__init__(key, {}, {}, *guard, writable)
        self.device, self.addresses, self._sizes = device, addresses, sizes
        self._unmap, self._cond = unmap, threading.Condition()
        self._users, self._closed = 0, False

    @property
    def closed(self) -> bool:
        """Whether it is mapped no more, or is about to be."""
        return self._closed

    def pin(self) -> bool:
        """Keep it mapped until `unpin`; False where it is mapped no more."""
        with self._cond:
            self._users += not self._closed
            return not self._closed

    def unpin(self) -> None:
        with self._cond:
            self._users -= 1
            if self._closed:  # nobody else waits for that
                self._cond.notify_all()

    @contextlib.contextmanager
    def pinned(self, bucket: Bucket) -> Iterator[None]:
        """It stays mapped meanwhile. Raises TransportError by the bucket's edge where it is mapped no more."""
        if not self.pin():
            raise TransportError((bucket.src, bucket.dst), f"memory of {self.key} is mapped no more")
        try:
            yield
        finally:
            self.unpin()

    def close(self) -> None:
        """Unmap, as soon as nobody is at work on it; harmless when repeated. Raises DeviceError.

        The loan word stays what it is now, after all that was read: its page, and the descriptor of that, go as well.
        """
        with self._cond:
            closed, self._closed = self._closed, True
            self._cond.wait_for(lambda: self._users == 0)
        if not closed:
            self._page = self._page.copy()
            self.device.activate()
            self._unmap()

    def check(self, storages: Sequence[StorageRef]) -> None:
        """Raises ProtocolError where one of ``storages`` is not mounted with that size."""
        for ref in storages:
            wanted, found = ref.numel * ITEMSIZE[ref.dtype], self._sizes.get(ref.name, 0)
            if wanted != found:
                raise ProtocolError(f"storage {ref.name} of {self.key}", f"{wanted} bytes", f"{found} on its device")

    # -- by way of the host, for edges of which only one end is on a device

    def pack(self, program: Program, bucket: Bucket, out: Bytes | None = None) -> Bytes:
        """As `refitd.plan.execute.pack`: gathered and cast on the device, then copied to the host."""
        packed = np.empty(bucket.nbytes, np.uint8) if out is None else out[: bucket.nbytes]
        with self._staging(bucket) as wire:
            self._launch(gather(program, [bucket], self.addresses, {bucket.id: wire.data_ptr()}, dense=True))
            _host(packed).copy_(wire)
        return packed

    def pack_blocks(self, program: Program, bucket: Bucket) -> Generator[Bytes]:
        """The bucket in one block."""
        yield self.pack(program, bucket)

    def unpack(self, program: Program, bucket: Bucket, packed: Bytes) -> None:
        """As `refitd.plan.execute.unpack`: copied to the device, then scattered. It is there on return."""
        with self._staging(bucket) as wire:
            wire.copy_(_host(packed[: bucket.nbytes]))
            self._launch(scatter(program, [bucket], {bucket.id: wire.data_ptr()}, self.addresses, dense=True))
            self.device.driver.synchronize()

    def dense(self, program: Program, bucket: Bucket) -> Bytes | None:
        """Nothing that a processor could write lies anywhere here."""
        del program, bucket
        return None

    @contextlib.contextmanager
    def _staging(self, bucket: Bucket) -> Iterator[Any]:
        self.device.activate()
        by_host = f"bucket {bucket.id} by way of the host"
        with self.pinned(bucket), device_errors(by_host):
            yield self.device.room(bucket.nbytes, by_host)

    def _launch(self, table: Table) -> None:
        self.device.prepare(table).run(sums=False)


def _host(array: Bytes) -> Any:
    return bytes_at(array.ctypes.data, array.nbytes, "cpu")
