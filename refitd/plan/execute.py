"""Carry out buckets on flat NumPy arrays: pack, unpack, copy. Shared by every transport on the CPU and by `reshard`.

Arrays are one-dimensional, one a storage, in `array_dtype` of the storage's dtype (bfloat16 as uint16, float8 as
uint8). A view that would leave its array raises ValueError from NumPy itself before a byte is touched.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd.layout.dtypes import ITEMSIZE
from refitd.plan.cast import cast
from refitd.plan.program import Bucket, Program

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Bytes = NDArray[np.uint8]

_BLOCK_BYTES = 1 << 20  # gathered and hashed in the cache; smaller ones pay for more hand-overs of the interpreter
_NUMPY = {"bfloat16": "uint16", "bool": "uint8"}


def array_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that carries the bits of ``dtype``."""
    return np.dtype("uint8" if dtype.startswith("float8") else _NUMPY.get(dtype, dtype))


def flat_array(memory: Any, dtype: str) -> Array:
    """A flat array over any buffer (memoryview, mmap, bytes), read-only where the buffer is; no copy."""
    return np.frombuffer(memory, dtype=array_dtype(dtype))


def pack(program: Program, bucket: Bucket, sources: Arrays, out: Bytes | None = None) -> Bytes:
    """Gather a bucket into ``nbytes`` contiguous bytes in the destination's dtype.

    ``sources`` maps storage names of ``bucket.src`` to flat arrays; ``out`` (uint8, nbytes) is made where not given.
    """
    packed = np.empty(bucket.nbytes, np.uint8) if out is None else out[: bucket.nbytes]
    source, destination = program.dtypes_of(bucket)
    elements = packed.view(array_dtype(destination))
    staged = elements if source == destination else np.empty(elements.size, array_dtype(source))
    for _size in _gather(program, bucket, sources, staged):
        if source != destination:
            cast(staged, source, elements, destination)
    return packed


def pack_blocks(program: Program, bucket: Bucket, sources: Arrays) -> Generator[Bytes]:
    """The bytes of `pack` in order, in blocks that stay in the cache; each is valid until the next is asked for."""
    source, destination = program.dtypes_of(bucket)
    staged = np.empty(_BLOCK_BYTES // ITEMSIZE[source], array_dtype(source))
    elements = staged if source == destination else np.empty(staged.size, array_dtype(destination))
    for size in _gather(program, bucket, sources, staged):
        if source != destination:
            cast(staged[:size], source, elements[:size], destination)
        yield elements[:size].view(np.uint8)


def unpack(program: Program, bucket: Bucket, packed: Bytes, destinations: Arrays) -> None:
    """Scatter a packed bucket. ``destinations`` maps storage names of ``bucket.dst`` to writable flat arrays."""
    dtype = array_dtype(program.dtypes_of(bucket)[1])
    elements = np.frombuffer(packed, dtype, bucket.nbytes // dtype.itemsize)
    position = 0
    for _src, dst, rows, cols in _moves(program, bucket):
        block = elements[position : position + rows * cols]
        _view(destinations, dst, rows, cols)[...] = block.reshape(rows, cols)
        position += rows * cols


def copy(program: Program, bucket: Bucket, sources: Arrays, destinations: Arrays) -> None:
    """Move a bucket straight from source arrays to destination arrays; no temporary where the dtypes are equal."""
    source, destination = program.dtypes_of(bucket)
    if source != destination:
        unpack(program, bucket, pack(program, bucket, sources), destinations)
        return
    for src, dst, rows, cols in _moves(program, bucket):
        _view(destinations, dst, rows, cols)[...] = _view(sources, src, rows, cols)


def dense(program: Program, bucket: Bucket, destinations: Arrays) -> Bytes | None:
    """The destination's bytes of a bucket where they lie there exactly as in its packed form; None elsewhere.

    The view is writable where the array is.
    """
    span = program.dense_spans.get(bucket.id)
    if span is None:
        return None
    storage, first, elements = span
    return destinations[program.storages[storage].name][first : first + elements].view(np.uint8)


_End = tuple[str, int, int, int, int]


def _moves(program: Program, bucket: Bucket) -> Iterator[tuple[_End, _End, int, int]]:
    """Both ends of each move as (storage name, byte offset, byte strides of row and column, itemsize), rows, cols."""
    storages = program.storages
    for s, so, s0, s1, d, do, d0, d1, rows, cols in program.moves_of(bucket).tolist():
        n, m = ITEMSIZE[storages[s].dtype], ITEMSIZE[storages[d].dtype]
        yield (storages[s].name, so * n, s0 * n, s1 * n, n), (storages[d].name, do * m, d0 * m, d1 * m, m), rows, cols


def _view(arrays: Arrays, end: _End, rows: int, cols: int) -> Array:
    name, offset, stride0, stride1, itemsize = end
    array = arrays[name]
    if stride1 == itemsize and rows == 1:
        return np.ndarray((1, cols), array.dtype, array, offset)
    return np.ndarray((rows, cols), array.dtype, array, offset, (stride0, stride1))


def _gather(program: Program, bucket: Bucket, sources: Arrays, out: Array) -> Iterator[int]:
    """Fill ``out`` from its front with what the bucket moves; yields its fill whenever no more fits, and at the end."""
    filled = 0
    for view in _pieces(program, bucket, sources, out.size):
        while len(view):
            fitting = view[: (out.size - filled) // view.shape[1]]
            out[filled : filled + fitting.size].reshape(fitting.shape)[...] = fitting
            filled += fitting.size
            view = view[len(fitting) :]
            if len(view):
                yield filled
                filled = 0
    yield filled


def _pieces(program: Program, bucket: Bucket, sources: Arrays, widest: int) -> Iterator[Array]:
    """The source view [rows, columns] of each move; rows of more than ``widest`` elements are cut."""
    for src, _dst, rows, cols in _moves(program, bucket):
        view = _view(sources, src, rows, cols)
        if cols <= widest:
            yield view
        else:
            yield from (row[None, first : first + widest] for row in view for first in range(0, cols, widest))
