"""Sides made from random geometry, and an oracle that gathers whole tensors and slices them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from refitd.layout import Box, Layout, Piece
from refitd.layout.tp import dense, dense_strides
from refitd.plan import Rank

Whole = Mapping[str, torch.Tensor]


def distinct(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors in which every element of the whole model has its own value."""
    at, result = 1, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        result[name] = torch.arange(at, at + size, dtype=torch.float64).reshape(shape).to(dtype)
        at += size
    return result


def facts(whole: Whole, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), dtype) for name, tensor in whole.items()}


def simple(whole: Whole, boxes: Mapping[str, Sequence[Box]], dtype: str = "float32") -> Layout:
    """A layout with one dense storage for each box: ``name.0``, ``name.1``, …"""
    pieces = [dense(name, box, f"{name}.{i}") for name, parts in boxes.items() for i, box in enumerate(parts)]
    storages = {piece.storage: (piece.box.volume, dtype) for piece in pieces}
    return Layout.from_pieces(facts(whole, dtype), storages, pieces)


def view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    return flat.as_strided(piece.box.shape, piece.strides, piece.offset)


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]


def fill(layout: Layout, whole: Whole, background: float = 0.0) -> dict[str, torch.Tensor]:
    """Storages of a rank that holds ``whole``; elements without a piece are ``background``."""
    flats = {n: torch.full((numel,), background, dtype=getattr(torch, d)) for n, (numel, d) in layout.storages.items()}
    for piece in layout.pieces():
        view(flats[piece.storage], piece).copy_(cut(whole[piece.tensor], piece.box))
    return flats


def ranks(prefix: str, layouts: Sequence[Layout], nodes: Sequence[str]) -> list[Rank]:
    return [Rank(f"{prefix}/{i}", node, node, lay) for i, (lay, node) in enumerate(zip(layouts, nodes, strict=True))]


def cast_whole(whole: Whole, dtype: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in whole.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


__all__ = [
    "bits",
    "cast_whole",
    "cut",
    "dense",
    "dense_strides",
    "distinct",
    "facts",
    "fill",
    "ranks",
    "simple",
    "view",
]
