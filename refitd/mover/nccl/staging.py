"""Buckets between mounted memory and the buffers that NCCL sends from and receives into.

A slot holds one bucket of one edge. Each edge has two, so that one is on the wire while the other is packed or
unpacked. Memory on the device is moved by kernels, which sum what they move; memory of the host goes by way of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refitd.errors import TransportError
from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.cuda.device import Device, device_errors
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.device import bytes_at
from refitd.mover.kernels import Launch, Table, bucket_checksum, gather, reread, scatter
from refitd.mover.memory import Memory
from refitd.mover.round import Edge, Round
from refitd.plan.execute import Bytes
from refitd.plan.program import Bucket, Program

SLOTS = 2
KEPT_LAUNCHES = 4096


class Staging:
    """Used by one thread, whose device is active."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots: dict[tuple[Edge, int], Any] = {}
        self._kept: dict[tuple[object, ...], tuple[Launch, Program, DeviceMemory]] = {}

    def slot(self, edge: Edge, step: int, nbytes: int) -> int:
        """Address of the edge's buffer for ``step``, of at least ``nbytes``. Raises DeviceError."""
        key = edge, step % SLOTS
        if key not in self._slots or self._slots[key].numel() < nbytes:
            self._slots.pop(key, None)
            self._slots[key] = self._device.room(max(nbytes, 1), "staging for a bucket")
        return int(self._slots[key].data_ptr())

    def close(self) -> None:
        """Let go of all device memory, now: whoever still knows us is no reason to keep it."""
        self._slots.clear()
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        """Device memory in buffers."""
        return sum(int(buffer.numel()) for buffer in self._slots.values())

    def pack(self, round_: Round, bucket: Bucket, memory: Memory, address: int) -> int:
        """Gather ``bucket``, cast, into the slot at ``address``; its checksum. It is there on return."""
        if not isinstance(memory, DeviceMemory):
            packed = memory.pack(round_.program, bucket)
            self._tensor(address, bucket).copy_(_host(packed))
            return bucket_checksum(round_.program, bucket, packed)
        with memory.pinned(bucket):
            return self._run("gather", round_.program, bucket, memory, address)

    def place(self, round_: Round, bucket: Bucket, memory: Memory) -> int:
        """Where NCCL may put the payload as it is; 0 where it has to be unpacked (or read again afterwards)."""
        span = round_.program.dense_spans.get(bucket.id)
        plain = round_.options.verify != "reread" and not round_.skips(bucket)
        if not isinstance(memory, DeviceMemory) or span is None or not plain:
            return 0
        ref = round_.program.storages[span[0]]
        return memory.addresses[ref.name] + span[1] * ITEMSIZE[ref.dtype]

    def unpack(self, round_: Round, bucket: Bucket, memory: Memory, address: int, in_place: bool) -> int:
        """Scatter what has landed at ``address``, unless it lies in place already; the checksum of what came."""
        if round_.skips(bucket):
            return bucket_checksum(round_.program, bucket, self._tensor(address, bucket).cpu().numpy())
        if not isinstance(memory, DeviceMemory):
            packed: Bytes = self._tensor(address, bucket).cpu().numpy()
            round_.write(bucket, packed)
            return bucket_checksum(round_.program, bucket, packed)
        with memory.pinned(bucket):
            if in_place:
                return self._run("reread", round_.program, bucket, memory, address)
            found = self._run("scatter", round_.program, bucket, memory, address)
            if round_.options.verify == "reread":
                again = self._run("reread", round_.program, bucket, memory, address)
                if again != found:
                    raise TransportError((bucket.src, bucket.dst), f"bucket {bucket.id} reads back differently")
            return found

    def _run(self, what: str, program: Program, bucket: Bucket, memory: DeviceMemory, address: int) -> int:
        """Prepared once for a bucket, as long as program, memory and slot stay what they are."""
        key = what, bucket.id, address, id(program), id(memory)
        if key not in self._kept:
            self._kept = {known: kept for known, kept in self._kept.items() if not kept[2].closed}
            if len(self._kept) >= KEPT_LAUNCHES:
                self._kept.clear()
            launch = self._device.prepare(_table(what, program, bucket, memory, address))
            self._kept[key] = launch, program, memory
        launch = self._kept[key][0]
        with device_errors(f"{what} bucket {bucket.id}"):
            launch.run()
            return launch.checksums()[bucket.id]

    def _tensor(self, address: int, bucket: Bucket) -> Any:
        return bytes_at(address, bucket.nbytes, self._device.name)


def _table(what: str, program: Program, bucket: Bucket, memory: DeviceMemory, address: int) -> Table:
    """In the packed form of the CPU: what is dense in the destination is dense on the wire."""
    wire = {bucket.id: address}
    if what == "gather":
        return gather(program, [bucket], memory.addresses, wire, dense=True)
    if what == "scatter":
        return scatter(program, [bucket], wire, memory.addresses, dense=True)
    return reread(program, [bucket], memory.addresses)


def _host(packed: Bytes) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(packed))
