"""Values for layouts: distinct numbers in every tensor, storages filled by pieces, and what a destination must hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from refitd.layout import Layout, Piece, Side
from refitd.layout.models import Block, Catalogue, Heads, Row, build

Array = NDArray[np.generic]
_PLAIN = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}
PADDING = 0x7F


def array_dtype(dtype: str) -> np.dtype[np.generic]:
    """The NumPy dtype of the bits of a dtype."""
    return np.dtype(_PLAIN.get(dtype, dtype))


def values_of(layouts: Iterable[Layout]) -> dict[str, Array]:
    """Distinct values for every tensor that some layout knows (as far as its dtype has so many)."""
    values: dict[str, Array] = {}
    for layout in layouts:
        for name, (shape, dtype) in layout.tensors.items():
            if name not in values:
                start = 1 + 7919 * len(values)
                count = int(np.prod(shape, dtype=np.int64))
                numbers = (start + np.arange(count, dtype=np.int64) * 40503) % (1 << 31)
                values[name] = numbers.astype(array_dtype(dtype)).reshape(shape)
    return values


def view(storage: Array, piece: Piece) -> Array:
    """The elements of a piece in its flat storage."""
    strides = tuple(stride * storage.itemsize for stride in piece.strides)
    return as_strided(storage[piece.offset :], piece.box.shape, strides)


def part(values: Mapping[str, Array], piece: Piece) -> Array:
    """The elements of a piece in its logical tensor."""
    return values[piece.tensor][tuple(slice(a, b) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))]


def filled(layout: Layout, values: Mapping[str, Array], padding: int = PADDING) -> dict[str, Array]:
    """The storages of a rank that holds ``values``; elements of no piece have ``padding``."""
    arrays = {name: np.full(numel, padding, array_dtype(dtype)) for name, (numel, dtype) in layout.storages.items()}
    for piece in layout.pieces():
        view(arrays[piece.storage], piece)[...] = part(values, piece)
    return arrays


def layouts_of(side: Side) -> dict[str, Layout]:
    """All layouts of a side, checked."""
    found = {key: side.layout(key) for key in side.ranks}
    for layout in found.values():
        layout.check()
    return found


def small(*rows: Row, heads: Heads | None = None, experts: int = 0, layers: int = 1, vocab: int = 0) -> Catalogue:
    """A catalogue with these rows in each of its layers."""
    return build("small", layers, vocab, [Block("model.layers.{}.", range(layers), rows)], heads, experts)
