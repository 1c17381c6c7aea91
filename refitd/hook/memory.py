"""Weights in memory that a mover can map: arenas backed by memfds, and staging for weights that live elsewhere."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from refitd.errors import DaemonUnavailable, InputError
from refitd.hook.blocks import Block, Bytes
from refitd.hook.gpu.export import DeviceExport
from refitd.hook.gpu.lend import Lender
from refitd.hook.memfd import create_memory, map_shared
from refitd.hook.shadow import align
from refitd.layout.dtypes import ITEMSIZE

_POOL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Region:
    address: int
    nbytes: int
    fd: int


class _Registry:
    """Live arenas by address. A region leaves when its arena and every tensor in it are gone."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # finalizers run inside any allocation, also one made under the lock
        self._regions: list[_Region] = []

    def add(self, region: _Region, owner: mmap.mmap) -> None:
        with self._lock:
            bisect.insort(self._regions, region, key=lambda known: known.address)
        weakref.finalize(owner, self._remove, region).atexit = False

    def _remove(self, region: _Region) -> None:
        with self._lock:
            self._regions.remove(region)
        os.close(region.fd)

    def find(self, address: int, nbytes: int) -> _Region | None:
        with self._lock:
            at = bisect.bisect_right(self._regions, address, key=lambda known: known.address) - 1
            region = self._regions[at] if at >= 0 else None
        inside = region is not None and address + nbytes <= region.address + region.nbytes
        return region if inside else None


_registry = _Registry()


class SharedArena:
    """``nbytes`` of zeroed memory in one memfd, handed out front to back and never taken back.

    Tensors and arrays keep the memory alive; the arena object itself may go first.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.fd = create_memory("refitd-arena", self.nbytes)
        try:
            self._map = map_shared(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._used = 0
        _registry.add(_Region(self.bytes.ctypes.data, self.nbytes, self.fd), self._map)

    @property
    def free(self) -> int:
        """Bytes that are left for a 64-byte aligned block."""
        return max(self.nbytes - align(self._used), 0)

    def array(self, shape: Sequence[int], dtype: str) -> np.ndarray[Any, Any]:
        """A NumPy array of ``shape`` in the arena. Raises InputError where it does not fit."""
        return self._take(prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(tuple(shape))

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A torch tensor of ``shape`` and ``dtype`` (torch dtype or its name). Raises InputError."""
        import torch

        name = str(dtype).removeprefix("torch.")
        if name not in ITEMSIZE:
            raise InputError("dtype", "a dtype of torch that refitd moves", name)
        block = self._take(prod(shape) * ITEMSIZE[name])
        return torch.from_numpy(block).view(getattr(torch, name)).reshape(tuple(shape))

    def _take(self, nbytes: int) -> Bytes:
        if nbytes > self.free:
            raise InputError("shape", f"at most {self.free} bytes", f"{nbytes} bytes")
        start = align(self._used)
        self._used = start + nbytes
        return self.bytes[start : self._used]


_pool_lock = threading.Lock()
_pool: list[SharedArena] = []


def shared_empty(shape: Sequence[int], dtype: Any) -> Any:
    """A torch tensor (zeros) that a mover reads or writes in place; small ones share arenas of 64 MiB."""
    nbytes = prod(shape) * ITEMSIZE.get(str(dtype).removeprefix("torch."), 8)
    with _pool_lock:
        if not _pool or _pool[0].free < nbytes:
            _pool[:] = [SharedArena(max(nbytes, _POOL_BYTES))]
        return _pool[0].empty(shape, dtype)


@dataclass(frozen=True, slots=True)
class Export:
    """Blocks as a message carries them. ``fds`` are borrowed: open as long as the memory lives.

    ``staged`` are (block, bytes in the staging arena) of what lies outside of every arena; ``live`` says whether
    anything is lent where it is. ``device``: all of it is on a GPU, and there is nothing else.
    """

    memory: list[dict[str, Any]]
    fds: list[int]
    staged: list[tuple[Block, Bytes]]
    live: bool
    arena: SharedArena | None
    device: DeviceExport | None = None

    def fields(self) -> dict[str, Any]:
        """What a message says of it."""
        return {"memory": self.memory} if self.device is None else {"memory": [], "device": self.device.message}

    def close(self) -> None:
        """Close the descriptors of device memory, which would keep it alive; nothing can be sent any more."""
        if self.device is not None:
            self.device.close()


class Staging:
    """An arena of one client for blocks outside of every arena; made anew when the blocks outgrow it."""

    def __init__(self) -> None:
        self._arena: SharedArena | None = None
        self._lender = Lender()

    def discard(self) -> None:
        """Never use the present arena again: somebody may still write to it."""
        self._arena = None

    def export(self, blocks: Mapping[str, Block], streams: Sequence[Any] = ()) -> Export:
        """Describe ``blocks`` (storage name -> block); nothing is copied yet.

        Waits for ``streams``, else for all of the GPU that has them. Raises InputError for streams of another.
        """
        device = self._lender.lend(blocks, streams)
        if device is not None:
            return Export([], device.fds, [], True, None, device)
        found = {name: _find(block) for name, block in blocks.items()}
        places, total = _places({name: blocks[name].nbytes for name, region in found.items() if region is None})
        arena = self._arena_of(total) if places else None
        memory, fds, staged = [], _FdTable(), []
        for name, block in blocks.items():
            region = found[name]
            if region is not None:
                memory.append(_entry(name, fds.index(region.fd), block.address - region.address, block.nbytes))
                continue
            assert arena is not None
            start = places[name]
            memory.append(_entry(name, fds.index(arena.fd), start, block.nbytes))
            staged.append((block, arena.bytes[start : start + block.nbytes]))
        return Export(memory, fds.fds, staged, len(staged) < len(blocks), arena)

    @contextlib.contextmanager
    def registered(
        self, blocks: Mapping[str, Block], arena: SharedArena | None = None
    ) -> Iterator[tuple[Mapping[str, Any], Sequence[int]]]:
        """``blocks`` as ``register`` says of memory that is lent with it, and their descriptors, valid inside.

        ``arena`` has what of them is staged. Raises DaemonUnavailable where other memory would be described for them,
        as a GPU's driver does not share it at this moment: nothing was copied there, and it would be read as theirs.
        """
        export = self.export(blocks)
        try:
            if export.staged and export.arena is not arena:
                raise DaemonUnavailable("the memory that is lent with the registration cannot be shared at present")
            yield {"shadow": {"device": None, **export.fields()}}, export.fds
        finally:
            export.close()

    def _arena_of(self, nbytes: int) -> SharedArena:
        if self._arena is None or self._arena.nbytes < nbytes:
            self._arena = SharedArena(nbytes)
        return self._arena


class _FdTable:
    def __init__(self) -> None:
        self.fds: list[int] = []
        self._index: dict[int, int] = {}

    def index(self, fd: int) -> int:
        if fd not in self._index:
            self._index[fd] = len(self.fds)
            self.fds.append(fd)
        return self._index[fd]


def _find(block: Block) -> _Region | None:
    return _registry.find(block.address, block.nbytes) if block.address else None


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    places, end = {}, 0
    for name, nbytes in sizes.items():
        places[name] = align(end)
        end = places[name] + nbytes
    return places, end


def _entry(name: str, fd: int, offset: int, nbytes: int) -> dict[str, Any]:
    return {"name": name, "fd": fd, "offset": offset, "nbytes": nbytes}
