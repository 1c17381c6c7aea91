"""Describe a process's device memory so that a mover can map it, without torch's reference counts.

Memory of cudaMalloc goes by 64-byte IPC handles of whole blocks, virtual memory (torch's expandable segments) by one
descriptor a physical segment; which of the two is found out by asking. Nothing is copied, and nothing is kept alive.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from refitd.errors import DeviceError
from refitd.hook.gpu.driver import Calls

IPC, VMM, NONE = "ipc", "vmm", "none"


class Extent(NamedTuple):
    """Device memory of one storage."""

    address: int
    nbytes: int


class Probe(NamedTuple):
    """How memory can be shared (``ipc``, ``vmm`` or ``none``), and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """``message`` is plain JSON: ``blocks`` ({kind ipc, id, handle, nbytes} or {kind vmm, id, fd, segments}) and
    ``storages`` ({name, block, offset, nbytes}). A block's ``id`` names no other memory of this process, ever.
    ``fds`` are the caller's to send and to close. ``refused`` has the storages
    that no other process can map, with the reason: they need staging. ``starts``: where each block begins.
    """

    message: dict[str, Any]
    fds: list[int]
    refused: dict[str, str]
    starts: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def probe(driver: Calls, address: int) -> Probe:
    """Ask how the memory at ``address`` can be shared. Leaves nothing behind."""
    try:
        handle = driver.retain(address)
    except DeviceError:
        return _probe_ipc(driver, address)
    try:
        os.close(driver.export_fd(handle))
    except DeviceError as error:
        return Probe(NONE, f"virtual memory made without a shareable handle ({error.status})")
    finally:
        driver.release(handle)
    return Probe(VMM, "virtual memory, by descriptor")


def _probe_ipc(driver: Calls, address: int) -> Probe:
    try:
        driver.ipc_handle(driver.address_range(address)[0])
    except DeviceError as error:
        return Probe(NONE, f"neither an IPC handle ({error.status}) nor virtual memory")
    return Probe(IPC, "a block of cudaMalloc, by IPC handle")


def export(driver: Calls, extents: Mapping[str, Extent]) -> DeviceExport:
    """Describe ``extents`` (storage name -> memory). A block that holds several storages is described once."""
    made = DeviceExport({"blocks": [], "storages": []}, [], {})
    blocks: dict[int, int] = {}  # start of a block -> its index
    paths: dict[int, Probe] = {}  # start of an allocation -> how it is shared
    try:
        for name, extent in sorted(extents.items(), key=lambda item: item[1].address):
            base = driver.address_range(extent.address)[0]
            path = paths.setdefault(base, probe(driver, extent.address)) if base not in paths else paths[base]
            if path.path == NONE:
                made.refused[name] = path.reason
                continue
            add = _add_ipc if path.path == IPC else _add_vmm
            index, start = add(driver, made, blocks, extent)
            made.message["storages"].append(
                {"name": name, "block": index, "offset": extent.address - start, "nbytes": extent.nbytes}
            )
    except BaseException:
        made.close()
        raise
    return made


def identity(driver: Calls, address: int) -> str:
    """Names the allocation at ``address``; where the driver cannot tell, a name that never comes again."""
    try:
        return str(driver.buffer_id(address))
    except DeviceError:
        return uuid.uuid4().hex


def _add_ipc(driver: Calls, made: DeviceExport, blocks: dict[int, int], extent: Extent) -> tuple[int, int]:
    base, nbytes = driver.address_range(extent.address)
    if base not in blocks:
        blocks[base] = len(made.message["blocks"])
        handle = driver.ipc_handle(base).hex()
        made.starts.append(base)
        made.message["blocks"].append({"kind": IPC, "id": identity(driver, base), "handle": handle, "nbytes": nbytes})
    return blocks[base], base


def _add_vmm(driver: Calls, made: DeviceExport, blocks: dict[int, int], extent: Extent) -> tuple[int, int]:
    """Segments follow each other in a block; extents come by address, so one that goes on from the last extends it."""
    base = driver.address_range(extent.address)[0]
    start, end = _last_block(made, blocks)
    if not start <= base <= end or start == end:
        start = end = base
        blocks[base] = len(made.message["blocks"])
        made.starts.append(base)
        made.message["blocks"].append({"kind": VMM, "id": "", "fd": len(made.fds), "segments": []})
    block = made.message["blocks"][blocks[start]]
    segments = block["segments"]
    while end < extent.address + extent.nbytes:
        at, nbytes = driver.address_range(end)
        if at != end:
            raise DeviceError("cuMemGetAddressRange", f"a segment at {end:#x} that begins at {at:#x}")
        handle = driver.retain(end)
        try:
            made.fds.append(driver.export_fd(handle))
        finally:
            driver.release(handle)
        block["id"] += f" {identity(driver, end)}"
        segments.append(nbytes)
        end += nbytes
    return blocks[start], start


def _last_block(made: DeviceExport, blocks: Mapping[int, int]) -> tuple[int, int]:
    """Where the block that was described last begins and ends, if it can still grow: (0, 0) if not."""
    if not made.message["blocks"] or made.message["blocks"][-1]["kind"] != VMM:
        return 0, 0
    start = next(base for base, index in blocks.items() if index == len(made.message["blocks"]) - 1)
    return start, start + sum(made.message["blocks"][-1]["segments"])
