"""The two models, who holds which part of them, and values that tell every place and every repeat apart."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from refitd.layout import Layout
from refitd.layout.box import Box, Piece

DTYPE = "bfloat16"
TRAINERS = ENGINES = 2
LARGE = {
    "256MiB": (1, 8192),
    "1GiB": (1, 32768),
    "16GB": (16, 30720),
    "48GB": (48, 30720),
}  # matrices of 16384 rows, and their columns
NAMES = ("small", "big", *LARGE)
_BLOCK_ELEMENTS = 1 << 23  # of a check: its temporaries stay small
_ODD = 2654435769


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor of a model: bfloat16, ``rows`` x ``cols``."""

    name: str
    rows: int
    cols: int


Model = tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a matrix: rows and columns from ``lo`` to below ``hi``, dense in a storage of its own."""

    matrix: Matrix
    lo: tuple[int, int]
    hi: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.hi[0] - self.lo[0], self.hi[1] - self.lo[1]

    def overlap(self, other: Shard) -> tuple[tuple[slice, slice], tuple[slice, slice]] | None:
        """The common part as an index into this shard and one into ``other``; None where there is none."""
        lo = max(self.lo[0], other.lo[0]), max(self.lo[1], other.lo[1])
        hi = min(self.hi[0], other.hi[0]), min(self.hi[1], other.hi[1])
        if lo[0] >= hi[0] or lo[1] >= hi[1]:
            return None
        return self.index(lo, hi), other.index(lo, hi)

    def index(self, lo: tuple[int, int], hi: tuple[int, int]) -> tuple[slice, slice]:
        """Where the part from ``lo`` to ``hi`` of the matrix is in this shard."""
        rows, cols = ((low - start, high - start) for start, low, high in zip(self.lo, lo, hi, strict=True))
        return slice(*rows), slice(*cols)


def model(name: str) -> Model:
    """``big``: one 8192 x 8192 matrix (134 MB). ``small``: 24 of mixed shapes (1 MB). Others, for devices: `LARGE`."""
    if name == "big":
        return (Matrix("weight", 8192, 8192),)
    if name in LARGE:
        count, cols = LARGE[name]
        return tuple(Matrix(f"weight{i}", 16384, cols) for i in range(count))
    shapes = {"attention": (192, 192), "up": (256, 96), "down": (96, 256), "norm": (192, 1)}
    return tuple(Matrix(f"layer{i}.{part}", *shape) for i in range(6) for part, shape in shapes.items())


def nbytes(model: Model) -> int:
    """Bytes of the whole model."""
    return sum(matrix.rows * matrix.cols * 2 for matrix in model)


def whole(matrix: Matrix) -> Shard:
    """All of a matrix."""
    return Shard(matrix, (0, 0), (matrix.rows, matrix.cols))


def trainer_shards(model: Model, rank: int) -> list[Shard]:
    """Trainers split the rows."""
    shards = []
    for matrix in model:
        lo, hi = _part(matrix.rows, rank, TRAINERS)
        shards.append(Shard(matrix, (lo, 0), (hi, matrix.cols)))
    return shards


def engine_shards(model: Model, rank: int) -> list[Shard]:
    """Engines split the columns; a single column is held by all of them."""
    shards = []
    for matrix in model:
        lo, hi = _part(matrix.cols, rank, ENGINES) if matrix.cols > 1 else (0, 1)
        shards.append(Shard(matrix, (0, lo), (matrix.rows, hi)))
    return shards


def _part(size: int, rank: int, world: int) -> tuple[int, int]:
    return size * rank // world, size * (rank + 1) // world


def layout(model: Model, shards: list[Shard]) -> Layout:
    """The rank's layout: one storage a matrix, row-major."""
    tensors = {matrix.name: ((matrix.rows, matrix.cols), DTYPE) for matrix in model}
    storages = {s.matrix.name: (s.shape[0] * s.shape[1], DTYPE) for s in shards}
    pieces = [Piece(s.matrix.name, Box(s.lo, s.hi), s.matrix.name, 0, (s.shape[1], 1)) for s in shards]
    return Layout.from_pieces(tensors, storages, pieces)


def fill(shard: Shard, step: int, out: Tensor) -> None:
    """Write the values of ``step`` into ``out``, bfloat16 of the shard's shape. They are any bits, NaN among them."""
    rows, cols = _seeds(shard, step, out.device)
    torch.bitwise_xor(rows[:, None], cols[None, :], out=out.view(torch.int16))


def exact(shard: Shard, step: int, found: Tensor) -> bool:
    """Whether ``found`` holds the values of ``step``, bit for bit."""
    rows, cols = _seeds(shard, step, found.device)
    bits, block = found.view(torch.int16), max(_BLOCK_ELEMENTS // shard.shape[1], 1)
    starts = range(0, shard.shape[0], block)
    return all(torch.equal(bits[i : i + block], rows[i : i + block, None] ^ cols[None, :]) for i in starts)


def _seeds(shard: Shard, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A number for each row and column, drawn from its place; every step changes those of the rows."""
    name = zlib.crc32(shard.matrix.name.encode())
    rows = _drawn(shard.lo[0], shard.hi[0], name + step * _ODD, device)
    return rows, _drawn(shard.lo[1], shard.hi[1], ~name, device)


def _drawn(lo: int, hi: int, seed: int, device: torch.device) -> Tensor:
    """The top bits of a multiplicative hash, made where they are needed: there may be half a billion of them."""
    places = torch.arange(lo, hi, dtype=torch.int64, device=device)
    return (((places + seed) * _ODD) >> 24).to(torch.int16)
