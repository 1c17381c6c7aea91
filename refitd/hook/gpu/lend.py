"""Weights that lie on one GPU, described where they are instead of copied to the host.

A rank's weights go this way where all of them are on one device whose driver can share them; else they are staged on
the host, and the reason is logged once. CUDA's bindings are imported only for tensors on CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from refitd.errors import DeviceError, InputError
from refitd.hook.blocks import Block
from refitd.hook.gpu.driver import Calls, Driver
from refitd.hook.gpu.export import IPC, DeviceExport, Extent, export

log = logging.getLogger("refitd.hook")


def place_of(block: Block) -> tuple[int, int] | None:
    """(number of the device, address) of a block on CUDA; None elsewhere."""
    if not getattr(block.held, "is_cuda", False):
        return None
    return block.held.device.index, block.held.data_ptr()


def current_device() -> str | None:
    """UUID of the device that this process's torch works on; None where it has not begun to."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        return Driver(torch.cuda.current_device()).uuid()
    except DeviceError as error:
        log.warning("the device of this process is unknown: %s", error)
        return None


def settle(ordinals: Iterable[int]) -> None:
    """Wait for all that was begun on these devices."""
    for ordinal in ordinals:
        sys.modules["torch"].cuda.synchronize(ordinal)


def _handle(stream: Any, ordinal: int) -> int:
    """The driver's name of one of torch's streams."""
    device = getattr(stream, "device", None)
    if not hasattr(stream, "cuda_stream") or getattr(device, "index", None) != ordinal:
        raise InputError("streams", f"torch.cuda.Stream of device {ordinal}", f"{type(stream).__name__} of {device}")
    return int(stream.cuda_stream)


class Lender:
    """Describes one client's weights. What it described stays valid until the memory behind it is freed."""

    def __init__(self) -> None:
        self.starts: Mapping[str, int] = {}  # of the memory described last: id of a block -> address
        self._drivers: dict[int, Calls] = {}
        self._known: tuple[object, Mapping[int, int], DeviceExport] | None = None
        self._warned = ""
        with _lock:
            _lenders.add(self)

    def lend(self, blocks: Mapping[str, Block], streams: Sequence[Any] = ()) -> DeviceExport | None:
        """Wait for ``streams``, else for all of the device, which may still write ``blocks``, and describe them.

        None: stage them; then every device that has some was waited for. The caller closes the descriptors. Memory is
        described anew only where it is not the same as the last time. Raises InputError for streams that are not the
        device's.
        """
        places = {name: place_of(block) for name, block in blocks.items() if block.nbytes}
        found = {name: place for name, place in places.items() if place is not None}
        if not found:
            return None
        ordinals = {ordinal for ordinal, _address in found.values()}
        if len(found) < len(places) or len(ordinals) > 1:
            self._stage("they are not all on one device", ordinals)
            return None
        extents = {name: Extent(address, blocks[name].nbytes) for name, (_ordinal, address) in found.items()}
        handles = [_handle(stream, next(iter(ordinals))) for stream in streams]
        try:
            with _on(next(iter(ordinals))) as ordinal:
                return self._lend(ordinal, extents, handles)
        except DeviceError as error:
            self._stage(str(error), ordinals)
            return None

    def _lend(self, ordinal: int, extents: Mapping[str, Extent], streams: Sequence[int]) -> DeviceExport | None:
        driver = self._driver(ordinal)
        driver.activate()
        if streams:
            driver.wait_for(streams)
        else:
            driver.synchronize()
        key = ordinal, tuple(extents.items())
        if self._known is not None and self._known[0] == key and _unchanged(driver, self._known[1]):
            return self._known[2]
        made = export(driver, extents)
        if made.refused:
            made.close()
            self._stage(next(iter(made.refused.values())), {ordinal})
            return None
        made.message["uuid"] = driver.uuid()
        self.starts = {block["id"]: start for block, start in zip(made.message["blocks"], made.starts, strict=True)}
        self._known = None if made.fds else (key, _witnesses(driver, made, extents), made)
        return made

    def _driver(self, ordinal: int) -> Calls:
        if ordinal not in self._drivers:
            self._drivers[ordinal] = Driver(ordinal)
        return self._drivers[ordinal]

    def _stage(self, reason: str, ordinals: Iterable[int]) -> None:
        """They will be copied on one stream, whichever wrote them."""
        settle(ordinals)
        self.starts = {}
        if reason != self._warned:
            self._warned = reason
            log.warning("weights on a GPU are staged on the host: %s", reason)


_lock = threading.Lock()
_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()


def own_addresses(message: Mapping[str, Any]) -> dict[str, int]:
    """The address of each storage of a ``message`` that a lender of this process made. Raises DeviceError.

    Only of what was described last: the owner of anything older may have freed it since.
    """
    with _lock:
        lenders = list(_lenders)
    starts = {name: start for lender in lenders for name, start in lender.starts.items()}
    missing = [block["id"] for block in message["blocks"] if block["id"] not in starts]
    if missing:
        raise DeviceError("look up own memory", f"block {missing[0]} is not lent by this process (any more)")
    begins = [starts[block["id"]] for block in message["blocks"]]
    return {storage["name"]: begins[storage["block"]] + storage["offset"] for storage in message["storages"]}


def _witnesses(driver: Calls, made: DeviceExport, extents: Mapping[str, Extent]) -> dict[int, int]:
    """An address in each block, with what the driver calls the allocation there; empty where it cannot tell."""
    assert all(block["kind"] == IPC for block in made.message["blocks"])
    addresses = {storage["block"]: extents[storage["name"]].address for storage in made.message["storages"]}
    try:
        return {address: driver.buffer_id(address) for address in addresses.values()}
    except DeviceError:
        return {}


def _unchanged(driver: Calls, witnesses: Mapping[int, int]) -> bool:
    try:
        return bool(witnesses) and all(driver.buffer_id(address) == name for address, name in witnesses.items())
    except DeviceError:
        return False


@contextlib.contextmanager
def _on(ordinal: int) -> Iterator[int]:
    """The caller's current device is what it was, afterwards."""
    torch: Any = sys.modules.get("torch")
    before = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else ordinal
    try:
        yield ordinal
    finally:
        if before != ordinal:
            torch.cuda.set_device(before)
