"""Boxes and pieces of tensor-parallel engines: column and row cuts, and fused storages (qkv, gate_up, w13)."""

from __future__ import annotations

from refitd.layout.box import Box, Piece, whole

__all__ = ["column_parallel", "dense", "dense_strides", "fused", "fused_elements", "replicated", "row_parallel"]


def column_parallel(shape: tuple[int, ...], rank: int, world: int) -> Box:
    """Rows (dimension 0) of a weight or bias on ``rank`` of ``world``: equal shares rounded up, the last ones short."""
    return _cut(shape, 0, rank, world)


def row_parallel(shape: tuple[int, ...], rank: int, world: int) -> Box:
    """Columns (dimension 1) of a weight on ``rank`` of ``world``."""
    return _cut(shape, 1, rank, world)


def replicated(shape: tuple[int, ...]) -> Box:
    """The whole tensor."""
    return whole(tuple(shape))


def _cut(shape: tuple[int, ...], dim: int, rank: int, world: int) -> Box:
    size = -(-shape[dim] // world)
    lo, hi = [0] * len(shape), list(shape)
    lo[dim], hi[dim] = min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])
    return Box(tuple(lo), tuple(hi))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def dense(tensor: str, box: Box, storage: str, offset: int = 0) -> Piece:
    """A box stored contiguously from ``offset``."""
    return Piece(tensor, box, storage, offset, dense_strides(box.shape))


def fused(storage: str, *parts: tuple[str, Box], offset: int = 0) -> list[Piece]:
    """Boxes stacked row upon row in one storage: ``fused("qkv", ("q", box_q), ("k", box_k), ("v", box_v))``."""
    pieces = []
    for tensor, box in parts:
        pieces.append(dense(tensor, box, storage, offset))
        offset += box.volume
    return pieces


def fused_elements(*boxes: Box) -> int:
    """Elements of a storage that holds these boxes one after the other."""
    return sum(box.volume for box in boxes)
