"""Storage tensors as plain bytes, whatever they are: torch (CPU, CUDA, DTensor) or NumPy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from refitd.errors import InputError
from refitd.layout.dtypes import ITEMSIZE

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Storages = Mapping[str, tuple[int, str]]
_NATIVE = frozenset(name for name in ITEMSIZE if hasattr(np, name))


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of one storage. ``address`` is 0 where the processor cannot reach them."""

    nbytes: int
    address: int
    held: Any  # what has them: a dense torch tensor of any shape and dtype, or a NumPy array, uint8 of shape (nbytes,)

    @property
    def flat(self) -> Any:
        """All of it as uint8 of shape (nbytes,): a NumPy array, or a torch tensor where the processor cannot reach it.

        Made when it is asked for: weights that are lent where they are need none, and it takes most of the time.
        """
        if isinstance(self.held, np.ndarray):
            return self.held
        flat = self.held.as_strided((self.held.numel(),), (1,)).view(_torch().uint8)
        return flat.numpy() if flat.is_cpu else flat

    def save(self, target: Bytes) -> None:
        """Copy the storage into ``target``, uint8 of shape (nbytes,)."""
        flat = self.flat
        if isinstance(flat, np.ndarray):
            target[:] = flat
        else:
            _torch().from_numpy(target).copy_(flat)

    def load(self, source: Bytes) -> None:
        """Copy ``source``, uint8 of shape (nbytes,), into the storage."""
        flat = self.flat
        if isinstance(flat, np.ndarray):
            flat[:] = source
        else:
            flat.copy_(_torch().from_numpy(source))


def blocks_of(tensors: Mapping[str, Any], storages: Storages) -> dict[str, Block]:
    """The block of every storage in ``storages`` (name -> (number of elements, dtype name)), in that order.

    ``tensors`` may have more names. Raises InputError naming the tensor that is missing, of another size or dtype, or
    not dense in memory.
    """
    blocks = {}
    for name, (numel, dtype) in storages.items():
        field = f"tensors[{name!r}]"
        if name not in tensors:
            raise InputError(field, f"{numel} elements of {dtype}", "nothing")
        blocks[name] = _block(field, tensors[name], numel, dtype)
    return blocks


def _block(field: str, value: Any, numel: int, dtype: str) -> Block:
    if isinstance(value, np.ndarray):
        return _numpy_block(field, value, numel, dtype)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        raise InputError(field, "a torch tensor or a NumPy array", type(value).__name__)
    local = value.to_local() if hasattr(value, "to_local") else value
    return _torch_block(field, local.detach(), numel, dtype)


def _torch_block(field: str, tensor: Any, numel: int, dtype: str) -> Block:
    _require(field, numel, dtype, tensor.numel(), str(tensor.dtype).removeprefix("torch."))
    if not tensor.is_contiguous():
        _require_dense(field, tuple(tensor.shape), tuple(tensor.stride()))
    address = tensor.data_ptr() if tensor.is_cpu and numel else 0
    return Block(numel * ITEMSIZE[dtype], address, tensor)


def _numpy_block(field: str, array: np.ndarray[Any, Any], numel: int, dtype: str) -> Block:
    given = dtype if _same_bits(array.dtype, dtype) else array.dtype.name
    _require(field, numel, dtype, array.size, given)
    _require_dense(field, array.shape, tuple(step // array.itemsize for step in array.strides))
    if not array.flags.writeable:
        raise InputError(field, "an array that may be written", "a read-only array")
    flat = np.lib.stride_tricks.as_strided(array, (numel,), (array.itemsize,)).view(np.uint8)
    return Block(flat.nbytes, flat.ctypes.data if numel else 0, flat)


def _same_bits(found: np.dtype[Any], dtype: str) -> bool:
    """NumPy has no bfloat16 or float8: an unsigned integer of that width stands for them."""
    return dtype not in _NATIVE and found.kind == "u" and found.itemsize == ITEMSIZE[dtype]


def _require(field: str, numel: int, dtype: str, found: int, found_dtype: str) -> None:
    if (numel, dtype) != (found, found_dtype):
        raise InputError(field, f"{numel} elements of {dtype}", f"{found} elements of {found_dtype}")


def _require_dense(field: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Every element of ``shape`` in a gapless range that starts at the first one, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 0:
            return
        if size > 1 and stride != expected:
            raise InputError(field, "a tensor without gaps", f"shape {shape}, strides {strides}")
        expected *= size


def _torch() -> Any:
    return sys.modules["torch"]
