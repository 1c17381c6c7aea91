"""Weights in fp8 with a scale for each block, as plain tensors of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from refitd.errors import InputError, LayoutError
from refitd.layout.models.catalogue import Block, Catalogue, Row, build
from refitd.layout.side import Pattern, Side

SUFFIX = "_scale_inv"
BLOCK = 128
_FP8 = "float8_e4m3fn"


def quantised(catalogue: Catalogue, roles: Collection[str], dtype: str = _FP8, block: int = BLOCK) -> Catalogue:
    """The catalogue with the weights of ``roles`` in ``dtype`` and their scales: fp32, one for ``block`` x ``block``.

    The scale of ``name.weight`` is ``name.weight_scale_inv`` with role ``<role>_scale`` and is cut where the weight is.
    Raises InputError on a role that the model does not have.
    """
    for role in roles:
        catalogue.kind(role)
    blocks = [
        Block(k.prefix, k.layers, list(_rows(k.row, k.role in roles, dtype, block)), k.mtp) for k in catalogue.kinds
    ]
    return build(
        catalogue.name, catalogue.layers, catalogue.vocab, blocks, catalogue.heads, catalogue.experts, catalogue.tied
    )


def _rows(row: Row, wanted: bool, dtype: str, block: int) -> Iterator[Row]:
    if not wanted:
        yield row
        return
    yield row._replace(dtype=dtype)
    shape = tuple(-(-size // block) for size in row.shape)
    yield Row(
        f"{row.role}_scale", row.name + SUFFIX, shape, row.cut, "float32", row.segments, row.experts,
        scale=(block, row.shape),
    )  # fmt: skip


def check_blocks(side: Side, block: int = BLOCK) -> None:
    """Raise LayoutError for every kind of fp8 weight with a scale whose shard edges cut a block of the scale.

    A weight has one when the side has a tensor of its name with ``_scale_inv``. Each error names tensor, rank, edge and
    block.
    """
    bad = []
    _, first = np.unique(side.instances[:, 1], return_index=True)
    for row in side.instances[first].tolist():
        pattern = side.patterns[row[1]]
        if pattern.dtype.startswith("float8") and side.tensors.find(side.tensors[row[0]] + SUFFIX) >= 0:
            bad += list(_cut_blocks(side, row, pattern, block))
    if bad:
        raise LayoutError(bad)


def _cut_blocks(side: Side, row: list[int], pattern: Pattern, block: int) -> Iterator[InputError]:
    tensor, _, group = row[:3]
    for dim, size in enumerate(pattern.shape):
        edges = pattern.boxes[:, :, dim]
        wrong = (edges % block != 0) & (edges != size)
        for box, end in zip(*np.nonzero(wrong), strict=True):
            slots = pattern.slot[pattern.box == box]
            rank = side.ranks[side.groups[group][int(slots[0])]]
            yield cut_block(f"tensor {side.tensors[tensor]} of {rank}", dim, int(edges[box, end]), block)
            break


def cut_block(field: str, dim: int, edge: int, block: int) -> InputError:
    """The error for a shard edge inside a block of the scale."""
    number = edge // block
    expected = f"shard edges of dimension {dim} at multiples of {block}, the block of its scale"
    got = f"edge {edge} inside block {number} ({number * block} to {(number + 1) * block})"
    return InputError(field, expected, got)
