"""The GPUs of one mover, and the memory on them that it has mounted. CUDA is touched when the first of it is."""

from __future__ import annotations

import mmap
import os
import selectors
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from refitd.errors import CommunicatorError, DeviceError, InputError, ProtocolError
from refitd.hook.gpu.lend import own_addresses
from refitd.hook.memfd import check_memory
from refitd.hook.messages import DEVICE
from refitd.hook.page import PAGE_BYTES
from refitd.mover.cuda.device import Device, open_device
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.cuda.warm import warm
from refitd.mover.nccl import opening
from refitd.mover.nccl.library import Library
from refitd.mover.spent import Spent
from refitd.mover.thread import MoverThread
from refitd.plan.program import Program

_WORDS = PAGE_BYTES // 8


class Devices:
    """Made for the mover of rank ``key``; ``open_`` finds a device by its UUID. ``spent``: on what, until now.

    A ``guest`` is in the process of its client.
    """

    def __init__(self, key: str, open_: Callable[[str, Spent], Device] | None = None, guest: bool = False) -> None:
        self._key, self._open, self._guest = key, open_ or open_device, guest
        self.spent = Spent()
        self._devices: dict[str, Device] = {}
        self._own: Device | None = None  # where this rank's weights are, and its kernels run
        self._lock = threading.Lock()
        self._owners = Owners()
        self._library: Library | None = None

    def mount(self, message: Mapping[str, Any], fds: Sequence[int]) -> DeviceMemory:
        """Map what a ``mount`` message with ``device`` describes. ``fds`` end with the owner's pidfd and its page.

        Memory of this very process (``own``), which no driver would map again, is used where it is. ``fds`` stay the
        caller's. When the owner dies, it is unmapped at once. Raises ProtocolError, DeviceError.
        """
        DEVICE.check("device", message["device"])
        key, index, device = message["memory"], message["word_index"], message["device"]
        if len(fds) < 2 or not 0 <= index < _WORDS:
            raise ProtocolError("word_index", f"a control page and a word from 0 to {_WORDS - 1}", str(index))
        check_memory(fds[-1], PAGE_BYTES, "control page")
        page = np.frombuffer(mmap.mmap(fds[-1], PAGE_BYTES, prot=mmap.PROT_READ), np.uint64)
        on = self._device_for(key, device["uuid"])
        on.activate()
        if self._guest and message.get("own"):
            addresses, unmap = own_addresses(device), on.driver.synchronize
        else:
            with self.spent.on("mount"):
                addresses = on.imports.open(key, device, fds[:-2], message["writable"])

            def unmap() -> None:
                on.imports.close(key)

        sizes = {storage["name"]: storage["nbytes"] for storage in device["storages"]}
        memory = DeviceMemory(key, on, addresses, sizes, (page, index), message["writable"], unmap)
        self._owners.watch(key, fds[-2], memory.close)
        return memory

    def forget(self, key: str) -> None:
        """The memory of ``key`` was unmounted: its owner's death is of no interest any more."""
        self._owners.forget(key)

    def warm(self, uuid: str, program: Program, done: Callable[[], None]) -> None:
        """In a thread, start the device and compile what ``program`` will need; then call ``done``, in any case.

        A device that does not start says so again, and to the daemon, when memory on it is mounted.
        """

        def run() -> None:
            try:
                device = self._device(uuid)
                with self.spent.on("kernels"):
                    warm(device, program)
            except (DeviceError, InputError) as error:
                print(f"mover {self._key}: kernels are not ready: {error}", file=sys.stderr)  # noqa: T201
            finally:
                done()

        MoverThread(run, f"warm {uuid}").start()

    def nccl(self, uuid: str | None, host: str) -> tuple[Device, Library]:
        """This rank's device, and NCCL for it (``host``: see `Nccl`). Raises DeviceError, CommunicatorError.

        A guest says nothing of hosts: NCCL would take it from the whole process, and for the client's own work too.
        """
        if uuid is None:
            raise CommunicatorError("load NCCL", f"{self._key} has no device")
        device = self._device(uuid)
        device.activate()
        with self._lock:
            if self._library is None:
                with self.spent.on("nccl"):
                    self._library = opening.open_library("" if self._guest else host)
            return device, self._library

    def _device_for(self, key: str, uuid: str) -> Device:
        """Where memory on ``uuid`` is mapped: by this rank's own device, which may be another card of the host."""
        there = self._own if self._own is not None and key != self._key else self._device(uuid)
        if key == self._key:
            self._own = there
        elif there.uuid != uuid:
            there.reach(uuid)
        return there

    def _device(self, uuid: str) -> Device:
        with self._lock:
            if uuid not in self._devices:
                device = self._open(uuid, self.spent)
                if self._guest:
                    device.step_aside()
                self._devices[uuid] = device
            return self._devices[uuid]

    def close(self) -> None:
        """Watch nobody any more."""
        self._owners.close()


class Owners:
    """Watches the processes whose memory is mapped; a thread begins with the first and ends with `close`."""

    def __init__(self) -> None:
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._watched: dict[str, int] = {}
        self._wake = -1

    def watch(self, key: str, pidfd: int, died: Callable[[], None]) -> None:
        """Call ``died`` in a thread of ours once the process behind ``pidfd`` (duplicated) has ended."""
        self.forget(key)
        with self._lock:
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._selector.register(self._wake, selectors.EVENT_READ)
                MoverThread(self._run, "owners").start()
            self._watched[key] = copy = os.dup(pidfd)
            self._selector.register(copy, selectors.EVENT_READ, (key, died))
            os.eventfd_write(self._wake, 1)

    def forget(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def close(self) -> None:
        """Forget all of them, and end the thread; harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            for key in list(self._watched):
                self._drop(key)
            self._closed = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            else:
                self._selector.close()

    def _drop(self, key: str) -> None:
        if (pidfd := self._watched.pop(key, None)) is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def _run(self) -> None:
        while not self._closed:
            for found, _events in self._selector.select():
                if found.data is None:
                    os.eventfd_read(self._wake)
                    continue
                key, died = found.data
                with self._lock:
                    current = self._watched.get(key) == found.fd
                    if current:
                        self._drop(key)
                if current:
                    died()
        self._selector.close()
        os.close(self._wake)
