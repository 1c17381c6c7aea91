"""What the kernel does, by torch: a call a row, for devices without Triton, and to hold the kernel to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.device import bytes_at
from refitd.mover.kernels.checksum import GOLDEN, MIX_1, MIX_2, WORD
from refitd.mover.kernels.table import Kind, Table

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 20  # words that are summed at a time
_CARRIED = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}
_WIDTH = {Kind.WIDE: 8, Kind.BYTES_8: 8, Kind.BYTES_4: 4, Kind.BYTES_2: 2, Kind.BYTES_1: 1}


def run_torch(table: Table, device: Any, sums: torch.Tensor | None) -> None:
    """Do every row of ``table`` on ``device``; add checksums to ``sums`` (int64, one a slot) where it is given."""
    import torch

    cast = table.dtypes[0] != table.dtypes[1]
    for src, src0, src1, dst, dst0, dst1, rows, cols, number, first, seed, slot in table.rows.tolist():
        kind = Kind(number)
        names = table.dtypes if cast else (_CARRIED[_WIDTH.get(kind, ITEMSIZE[table.dtypes[1]])],) * 2
        if kind is Kind.WIDE:  # its columns are units
            cols *= WORD // ITEMSIZE[names[1]] if cast else 2
        source, destination = (getattr(torch, name) for name in names)
        values = _view(src, (rows, cols), (src0, src1), source, device).to(destination)
        if table.store:
            _view(dst, (rows, cols), (dst0, dst1), destination, device).copy_(values)
        if sums is not None:
            sums[slot] += _sum(values.contiguous(), first, seed)


def _view(
    address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype, device: Any
) -> torch.Tensor:
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    flat = bytes_at(address, last + dtype.itemsize, device).view(dtype) if last % dtype.itemsize == 0 else None
    assert flat is not None, "table.py lets no such row through"
    return flat.as_strided(shape, tuple(stride // dtype.itemsize for stride in strides))


def _sum(values: torch.Tensor, first: int, seed: int) -> torch.Tensor:
    """The sum over the words of ``values`` (contiguous), numbered from ``first``, as int64."""
    import torch

    flat = values.reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % WORD)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for at in range(0, len(words), _BLOCK):
        block = words[at : at + _BLOCK]
        numbers = torch.arange(first + at + 1, first + at + 1 + len(block), device=values.device)
        total += _mix(block ^ (numbers * _signed(GOLDEN) + seed)).sum()
    return total


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(MIX_1)
    words = (words ^ _shifted(words, 27)) * _signed(MIX_2)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted right with zeros coming in; torch has no shift of unsigned numbers."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
