"""Casts between dtypes on bit-carrying NumPy arrays, as torch casts contiguous CPU tensors (round to nearest even).

torch does it where torch is installed. Without torch the same bits come from integer arithmetic; only the payload of a
NaN may then differ from what torch's build for this processor writes.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_BLOCK = 1 << 16  # elements; the temporaries of a block stay in the cache


def cast(source: Array, source_dtype: str, out: Array, out_dtype: str) -> None:
    """Write ``source`` (contiguous, flat) into ``out`` (contiguous, flat, same size) as the other dtype."""
    if _has_torch():
        _cast_torch(source, source_dtype, out, out_dtype)
    else:
        cast_numpy(source, source_dtype, out, out_dtype)


@cache
def _has_torch() -> bool:
    return find_spec("torch") is not None


def _cast_torch(source: Array, source_dtype: str, out: Array, out_dtype: str) -> None:
    import torch

    def tensor(array: Array, dtype: str) -> torch.Tensor:
        return torch.from_numpy(array).view(getattr(torch, dtype))

    tensor(out, out_dtype).copy_(tensor(source, source_dtype))


def cast_numpy(source: Array, source_dtype: str, out: Array, out_dtype: str) -> None:
    """`cast` without torch."""
    for start in range(0, source.size, _BLOCK):
        _cast_block(source[start : start + _BLOCK], source_dtype, out[start : start + _BLOCK], out_dtype)


def _cast_block(source: Array, source_dtype: str, out: Array, out_dtype: str) -> None:
    if out_dtype == "bfloat16":
        out[...] = _to_bfloat16(source)
    elif source_dtype == "bfloat16":
        out.view(np.uint32)[...] = source.astype(np.uint32) << np.uint32(16)
    else:
        with np.errstate(all="ignore"):
            out[...] = source


def _to_bfloat16(source: Array) -> NDArray[np.uint16]:
    bits = source.view(np.uint32)
    lowest = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (lowest + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(source)] = 0xFFFF
    return rounded
