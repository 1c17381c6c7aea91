"""Buckets between mounted memory and the buffers that NCCL sends from and receives into.

A buffer holds one step of one edge. Memory on the device is moved by kernels, which sum what they move; they run on
streams of their own, and nobody waits for them but who needs their sums. Memory of the host goes by way of it, at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.cuda.device import Device, device_errors
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.device import bytes_at
from refitd.mover.kernels import Launch, Table, bucket_checksum, gather, reread, scatter
from refitd.mover.memory import Memory
from refitd.mover.nccl import streams
from refitd.mover.nccl.batches import SLOTS, Batch
from refitd.mover.round import Edge, Round
from refitd.plan.execute import Bytes
from refitd.plan.program import Bucket, Program

KEPT_LAUNCHES = 1024
STAGING_BYTES = 1 << 30  # a lane's buffers of one direction; but one bucket fits in any case
SPARE = 8  # such a part of the memory that is free when the lane is built
Places = Mapping[int, int]


class Sums:
    """Checksums by bucket id of work that was started: the host's are there at once, a device's when it is done."""

    def __init__(self, known: Mapping[int, int], event: Any = None, launch: Launch | None = None, side: Any = None):
        self._known, self.event, self._launch, self._side = known, event, launch, side

    def done(self) -> bool:
        """Whether the memory that was read and written may be let go of."""
        return self.event is None or bool(self.event.query())

    def settle(self) -> None:
        """Wait until it is `done`: kernels always end."""
        if self.event is not None:
            self.event.synchronize()

    def values(self) -> Mapping[int, int]:
        """Raises DeviceError."""
        if self._launch is None:
            return self._known
        with device_errors("read sums"), self._side.active():
            return {**self._known, **self._launch.checksums()}


class _Side:
    """A stream of the device, or nothing at all where the device is the host."""

    def __init__(self, device: Device, use: str) -> None:
        self.stream: Any = None
        self._device, self._use = device.name, use
        if device.name != "cpu":
            with device_errors("make a stream"):
                self.stream = streams.take(device.name, use)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        if self.stream is None:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        """An event after all that was started here so far."""
        return None if self.stream is None else self.stream.record_event()

    def after(self, other: _Side) -> None:
        """What is started here from now on comes after what was started there so far."""
        if self.stream is not None:
            self.stream.wait_stream(other.stream)

    def close(self) -> None:
        """The stream serves another lane from here on."""
        if self.stream is not None:
            streams.give(self._device, self._use, self.stream)


class Staging:
    """Used by one thread, whose device is active."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots: dict[tuple[Edge, int], Any] = {}
        self._kept: dict[tuple[object, ...], tuple[Launch, Program, DeviceMemory]] = {}
        sides = self._sides = [_Side(device, use) for use in ("pack", "unpack", "read")]
        self._packing, self._unpacking, self._reading = sides

    def slot(self, edge: Edge, step: int, nbytes: int) -> int:
        """Address of the edge's buffer for ``step``, of at least ``nbytes``. Raises DeviceError."""
        key = edge, step % SLOTS
        if key not in self._slots or self._slots[key].numel() < nbytes:
            self._slots.pop(key, None)
            self._slots[key] = self._device.room(max(nbytes, 1), "staging for a bucket")
            if (cleared := self._copied()) is not None:
                cleared.synchronize()  # kernels and NCCL have streams of their own
        return int(self._slots[key].data_ptr())

    def close(self) -> None:
        """Let go of all device memory, now: whoever still knows us is no reason to keep it. All work is done."""
        self._slots.clear()
        self._kept.clear()
        while self._sides:
            self._sides.pop().close()

    def spare(self) -> int:
        """Bytes that buffers of one direction may take here at most: others live on the device, too."""
        if self._device.name == "cpu":
            return STAGING_BYTES
        import torch

        with device_errors("ask for free memory"):
            free, _total = torch.cuda.mem_get_info(self._device.name)
        return min(STAGING_BYTES, int(free) // SPARE)

    def pack(self, round_: Round, batch: Batch, memory: Memory, places: Places) -> Sums:
        """Start to gather ``batch``, cast, into ``places``. Who calls keeps the memory pinned until it is done."""
        if isinstance(memory, DeviceMemory):
            return self._start("gather", round_.program, batch.buckets, memory, places, self._packing)
        found = {}
        for bucket in batch.buckets:
            packed = memory.pack(round_.program, bucket)
            self._tensor(places[bucket.id], bucket).copy_(_host(packed))
            found[bucket.id] = bucket_checksum(round_.program, bucket, packed)
        return Sums(found, self._copied())

    def _copied(self) -> Any:
        """An event after what the thread's usual stream does: copies from the host, and zeros."""
        if self._device.name == "cpu":
            return None
        import torch

        return torch.cuda.current_stream().record_event()

    def places(self, round_: Round, batch: Batch, memory: Memory) -> dict[int, int]:
        """Where NCCL may put the payloads as they are; none where they have to be unpacked (or read again after)."""
        found = {bucket.id: self.place(round_, bucket, memory) for bucket in batch.buckets}
        return found if all(found.values()) else {}

    def place(self, round_: Round, bucket: Bucket, memory: Memory) -> int:
        """As `places`, of one bucket; 0 for none."""
        span = round_.program.dense_spans.get(bucket.id)
        plain = round_.options.verify != "reread" and not round_.skips(bucket)
        if not isinstance(memory, DeviceMemory) or span is None or not plain:
            return 0
        ref = round_.program.storages[span[0]]
        return memory.addresses[ref.name] + span[1] * ITEMSIZE[ref.dtype]

    def unpack(
        self, round_: Round, batch: Batch, memory: Memory, places: Places, in_place: bool
    ) -> tuple[Sums, Sums | None]:
        """Start to scatter what has landed in ``places``, unless it lies in place already.

        Returns the sums of what came and, where the round wants it read again, of what then lies in memory.
        """
        known = {
            bucket.id: bucket_checksum(round_.program, bucket, self._tensor(places[bucket.id], bucket).cpu().numpy())
            for bucket in batch.buckets
            if round_.skips(bucket)
        }
        buckets = [bucket for bucket in batch.buckets if bucket.id not in known]
        if not isinstance(memory, DeviceMemory):
            return Sums({**known, **self._by_host(round_, buckets, places)}), None
        if not buckets:
            return Sums(known), None
        how = "reread" if in_place else "scatter"
        sums = self._start(how, round_.program, buckets, memory, places, self._unpacking, known)
        if in_place or round_.options.verify != "reread":
            return sums, None
        return sums, self._start("reread", round_.program, buckets, memory, places, self._unpacking, known)

    def _by_host(self, round_: Round, buckets: Sequence[Bucket], places: Places) -> dict[int, int]:
        found = {}
        for bucket in buckets:
            packed: Bytes = self._tensor(places[bucket.id], bucket).cpu().numpy()
            round_.write(bucket, packed)
            found[bucket.id] = bucket_checksum(round_.program, bucket, packed)
        return found

    def _start(
        self, what: str, program: Program, buckets: Sequence[Bucket], memory: DeviceMemory, places: Places, side: _Side,
        known: Mapping[int, int] | None = None,
    ) -> Sums:  # fmt: skip
        """Prepared once for a batch, as long as program, memory and buffer stay what they are."""
        key = what, *((bucket.id, places[bucket.id]) for bucket in buckets), id(program), id(memory)
        with side.active(), device_errors(f"{what} of a step"):
            side.after(self._reading)  # which may still be at the sums of the launch's last run
            if key not in self._kept:
                self._kept = {known: kept for known, kept in self._kept.items() if not kept[2].closed}
                if len(self._kept) >= KEPT_LAUNCHES:
                    self._kept.clear()
                launch = self._device.prepare(_table(what, program, buckets, memory, places))
                self._kept[key] = launch, program, memory
            launch = self._kept[key][0]
            launch.run()
            return Sums(known or {}, side.mark(), launch, self._reading)

    def _tensor(self, address: int, bucket: Bucket) -> Any:
        return bytes_at(address, bucket.nbytes, self._device.name)


def _table(what: str, program: Program, buckets: Sequence[Bucket], memory: DeviceMemory, places: Places) -> Table:
    """In the packed form of the CPU: what is dense in the destination is dense on the wire."""
    wire = {bucket.id: places[bucket.id] for bucket in buckets}
    if what == "gather":
        return gather(program, buckets, memory.addresses, wire, dense=True)
    if what == "scatter":
        return scatter(program, buckets, wire, memory.addresses, dense=True)
    return reread(program, buckets, memory.addresses)


def _host(packed: Bytes) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(packed))
