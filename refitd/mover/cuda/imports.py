"""Maps what `refitd.hook.gpu.export` describes, and lets go of it when its owner is gone.

A mapping pins the owner's memory: while it lasts, a dead owner's memory is not free for the process that replaces it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refitd.errors import ProtocolError
from refitd.hook.gpu.driver import Calls
from refitd.hook.gpu.export import IPC, VMM

_HANDLE = re.compile("[0-9a-f]{128}")


class Imports:
    """All imports of a mover by owner. May be used from any thread whose CUDA context is active."""

    def __init__(self, driver: Calls) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._open: dict[str, list[Callable[[], None]]] = {}  # owner -> what closes its blocks
        self._ipc: dict[str, list[int]] = {}  # handle -> [address, users]: a context may open a handle only once

    def open(
        self, owner: str, message: Mapping[str, Any], fds: Sequence[int] = (), writable: bool = False
    ) -> dict[str, int]:
        """Map ``message`` and return the address of each storage. ``fds`` stay the caller's.

        What ``owner`` had before is closed. Without ``writable``, memory that allows it (``vmm``) is mapped for reading
        only. Raises ProtocolError for a message that makes no sense, DeviceError where the driver refuses; then
        nothing stays mapped.
        """
        _check(message, len(fds))
        self.close(owner)
        with self._lock:
            closers = self._open[owner] = []
            try:
                starts = [self._map(block, fds, writable, closers) for block in message["blocks"]]
            except BaseException:
                self._undo(owner)
                raise
        return {storage["name"]: starts[storage["block"]] + storage["offset"] for storage in message["storages"]}

    def close(self, owner: str) -> None:
        """Unmap everything of ``owner``, once the work that may touch it is done. Raises DeviceError."""
        with self._lock:
            if self._open.get(owner):
                self._driver.synchronize()
            self._undo(owner)

    def close_all(self) -> None:
        for owner in list(self._open):
            self.close(owner)

    def __len__(self) -> int:
        """Blocks that are mapped, by owners."""
        return sum(len(closers) for closers in self._open.values())

    def _undo(self, owner: str) -> None:
        for close in reversed(self._open.pop(owner, [])):
            close()

    def _map(
        self, block: Mapping[str, Any], fds: Sequence[int], writable: bool, closers: list[Callable[[], None]]
    ) -> int:
        if block["kind"] == IPC:
            return self._open_ipc(block["handle"], closers)
        return self._map_segments(block["segments"], fds[block["fd"] :], writable, closers)

    def _open_ipc(self, handle: str, closers: list[Callable[[], None]]) -> int:
        if handle not in self._ipc:
            self._ipc[handle] = [self._driver.open_ipc(bytes.fromhex(handle)), 0]
        self._ipc[handle][1] += 1
        closers.append(lambda: self._close_ipc(handle))
        return self._ipc[handle][0]

    def _close_ipc(self, handle: str) -> None:
        self._ipc[handle][1] -= 1
        if self._ipc[handle][1] == 0:
            self._driver.close_ipc(self._ipc.pop(handle)[0])

    def _map_segments(
        self, segments: Sequence[int], fds: Sequence[int], writable: bool, closers: list[Callable[[], None]]
    ) -> int:
        driver, total = self._driver, sum(segments)
        start = driver.reserve(total)
        mapped = 0

        def close() -> None:
            if mapped:
                driver.unmap(start, mapped)
            driver.unreserve(start, total)

        closers.append(close)
        for fd, nbytes in zip(fds, segments, strict=False):
            handle = driver.import_fd(fd)
            try:
                driver.map(start + mapped, nbytes, handle)
            finally:
                driver.release(handle)
            mapped += nbytes
        driver.allow(start, total, writable)
        return start


def _check(message: Mapping[str, Any], fds: int) -> None:
    sizes = [_block_bytes(block, fds) for block in message["blocks"]]
    for storage in message["storages"]:
        if not 0 <= storage["block"] < len(sizes):
            raise ProtocolError(
                f"storage {storage['name']} block", f"an index below {len(sizes)}", str(storage["block"])
            )
        end = storage["offset"] + storage["nbytes"]
        if min(storage["offset"], storage["nbytes"]) < 0 or end > sizes[storage["block"]]:
            raise ProtocolError(f"storage {storage['name']}", f"at most {sizes[storage['block']]} bytes", str(end))


def _block_bytes(block: Mapping[str, Any], fds: int) -> int:
    if block["kind"] == IPC and _HANDLE.fullmatch(block["handle"]):
        return int(block["nbytes"])
    if block["kind"] == VMM and block["segments"] and 0 <= block["fd"] <= fds - len(block["segments"]):
        return sum(block["segments"])
    raise ProtocolError("block", "an IPC handle of 64 bytes, or segments with a descriptor each", repr(block)[:80])
