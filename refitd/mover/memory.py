"""Memory that a mover has mounted: one rank's storages as flat arrays, and the loan word that says they may be read."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd.errors import ProtocolError
from refitd.hook.memfd import check_memory
from refitd.hook.page import PAGE_BYTES
from refitd.layout.dtypes import ITEMSIZE
from refitd.plan import execute
from refitd.plan.execute import Array, Bytes, flat_array
from refitd.plan.program import Bucket, Program, StorageRef

_WORDS = PAGE_BYTES // 8
Place = tuple[int, int, int, int, str, bool]  # device, inode, offset, nbytes, dtype, writable


class Memory:
    """The mounted memory of rank ``key``. Mappings end with the last reference to this object and its arrays.

    ``arrays`` maps storage names to flat arrays, read-only unless ``writable``; ``places`` says what they map.
    """

    def __init__(
        self,
        key: str,
        arrays: dict[str, Array],
        dtypes: dict[str, str],
        page: NDArray[np.uint64],
        word_index: int,
        writable: bool,
        places: Mapping[str, Place] = MappingProxyType({}),
    ) -> None:
        self.key, self.arrays, self.writable, self.places = key, arrays, writable, places
        self._dtypes, self._page, self._word_index = dtypes, page, word_index
        self.checked: Program | None = None  # what it was last found to have all storages of

    on_device = False

    @property
    def word(self) -> int:
        """The loan word as it is now."""
        return int(self._page[self._word_index])

    def check(self, storages: Sequence[StorageRef]) -> None:
        """Raises ProtocolError where one of ``storages`` is not mounted with that dtype and size."""
        for ref in storages:
            array = self.arrays.get(ref.name)
            if array is None:
                raise ProtocolError(f"memory {self.key}", f"storage {ref.name}", "no such storage")
            if (got := (self._dtypes[ref.name], array.size)) != (ref.dtype, ref.numel):
                raise ProtocolError(f"storage {ref.name} of {self.key}", str((ref.dtype, ref.numel)), str(got))

    def pack(self, program: Program, bucket: Bucket, out: Bytes | None = None) -> Bytes:
        """As `refitd.plan.execute.pack`, from here."""
        return execute.pack(program, bucket, self.arrays, out)

    def pack_blocks(self, program: Program, bucket: Bucket) -> Generator[Bytes]:
        """As `refitd.plan.execute.pack_blocks`, from here."""
        return execute.pack_blocks(program, bucket, self.arrays)

    def unpack(self, program: Program, bucket: Bucket, packed: Bytes) -> None:
        """As `refitd.plan.execute.unpack`, into here."""
        execute.unpack(program, bucket, packed, self.arrays)

    def dense(self, program: Program, bucket: Bucket) -> Bytes | None:
        """As `refitd.plan.execute.dense`, here."""
        return execute.dense(program, bucket, self.arrays)

    def close(self) -> None:
        """The mapping of host memory ends with its last reference."""


def mount(message: dict[str, Any], fds: Sequence[int], present: Memory | None = None) -> Memory:
    """Map what a ``mount`` message describes. ``fds`` stay the caller's. Raises ProtocolError.

    What ``present`` maps of the same files in the same way is taken over: page by page, a new mapping costs more time
    than the copy of the bytes.
    """
    key, writable, index = message["memory"], message["writable"], message["word_index"]
    if not fds or not 0 <= index < _WORDS:
        raise ProtocolError("word_index", f"a control page and a word from 0 to {_WORDS - 1}", str(index))
    check_memory(fds[-1], PAGE_BYTES, "control page")
    page = np.frombuffer(mmap.mmap(fds[-1], PAGE_BYTES, prot=mmap.PROT_READ), np.uint64)
    arrays: dict[str, Array] = {}
    dtypes: dict[str, str] = {}
    places: dict[str, Place] = {}
    for storage in message["storages"]:
        name, fd = storage["name"], storage["fd"]
        if not 0 <= fd < len(fds) - 1:
            raise ProtocolError(f"storage {name} fd", f"an index below {len(fds) - 1}", str(fd))
        dtypes[name] = storage["dtype"]
        places[name] = _place(fds[fd], storage["offset"], storage["nbytes"], storage["dtype"], writable)
        if present is not None and present.places.get(name) == places[name]:
            arrays[name] = present.arrays[name]
        else:
            arrays[name] = _map(name, fds[fd], storage["offset"], storage["nbytes"], storage["dtype"], writable)
    return Memory(key, arrays, dtypes, page, index, writable, places)


def _place(fd: int, offset: int, nbytes: int, dtype: str, writable: bool) -> Place:
    """An inode's number names no other file for as long as the mapping of it lives."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, offset, nbytes, dtype, writable


def _map(name: str, fd: int, offset: int, nbytes: int, dtype: str, writable: bool) -> Array:
    if dtype not in ITEMSIZE or nbytes % ITEMSIZE[dtype] or offset % ITEMSIZE[dtype]:
        raise ProtocolError(
            f"storage {name}", "whole aligned elements of a known dtype", f"{nbytes} at {offset} {dtype}"
        )
    if nbytes == 0:
        return flat_array(b"", dtype)
    check_memory(fd, offset + nbytes, f"storage {name}")
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, offset + nbytes - start, flags=mmap.MAP_SHARED, prot=prot, offset=start)
    return flat_array(memoryview(mapping)[offset - start :], dtype)


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the hard limit has: each mapping holds one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
