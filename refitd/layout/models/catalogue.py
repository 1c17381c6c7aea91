"""A catalogue: every tensor of a model under its Hugging Face name, as kinds. Geometry of the model, not of any
layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError
from refitd.layout.names import Names

Ints = NDArray[np.int64]
Shape = tuple[int, ...]

CUTS = ("full", "rows", "columns", "vocab", "kv", "segments")


class Row(NamedTuple):
    """One line of a family's table: a tensor of a layer (or of the model), and how tensor parallelism cuts it.

    ``cut``: ``full`` (every rank has all of it), ``rows`` (dimension 0), ``columns`` (dimension 1), ``vocab`` (rows,
    padded), ``kv`` (rows, by kv heads), ``segments`` (each of the row ``segments`` by itself).
    """

    role: str
    name: str
    shape: Shape
    cut: str = "full"
    dtype: str = "bfloat16"
    segments: tuple[int, ...] = ()
    experts: int = 0
    buffer: bool = False
    scale: tuple[int, Shape] | None = None


@dataclass(frozen=True)
class Kind:
    """All tensors of one row: one a layer of ``layers`` and expert. The first has number ``first`` in the catalogue.

    Numbers run over layers, then experts. ``layers`` is empty for a tensor of the whole model; ``mtp`` marks the
    tensors of multi-token prediction.
    """

    row: Row
    prefix: str
    layers: tuple[int, ...]
    mtp: bool
    first: int

    @property
    def role(self) -> str:
        """The row's role."""
        return self.row.role

    @property
    def count(self) -> int:
        """Number of tensors."""
        return max(1, len(self.layers)) * max(1, self.row.experts)

    @property
    def numel(self) -> int:
        """Elements of one tensor."""
        numel = 1
        for size in self.row.shape:
            numel *= size
        return numel

    @property
    def ids(self) -> Ints:
        """Numbers of the tensors, (layers, experts); 1 for an axis that the kind does not have."""
        return self.first + np.arange(self.count).reshape(max(1, len(self.layers)), max(1, self.row.experts))


class Heads(NamedTuple):
    """Attention with separate q, k and v: number of query and kv heads, and rows of one head in each projection.

    ``gate``: q_proj carries an output gate. Its rows are, head by head, the query and then as many of the gate
    (transformers' ``Qwen3NextAttention`` and ``Qwen3_5MoeAttention``); ``q_rows`` counts both.
    """

    q: int
    kv: int
    q_rows: int
    kv_rows: int
    gate: bool = False


@dataclass(frozen=True)
class Catalogue:
    """All tensors of a model. ``layers``: decoder layers. ``tied``: alias -> name. ``experts``: routed experts a
    layer."""

    name: str
    layers: int
    vocab: int
    kinds: tuple[Kind, ...]
    heads: Heads | None = None
    experts: int = 0
    tied: dict[str, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> Names:
        """The names of all tensors, by number."""
        return Names.from_blocks([_block(kind) for kind in self.kinds])

    @cached_property
    def by_role(self) -> dict[tuple[str, bool], Kind]:
        """(role, mtp) -> kind."""
        return {(kind.role, kind.mtp): kind for kind in self.kinds}

    def kind(self, role: str, mtp: bool = False) -> Kind:
        """The kind of a role. Raises InputError when the model has none."""
        found = self.by_role.get((role, mtp))
        if found is None:
            raise InputError(f"role of {self.name}", f"one of {sorted({k.role for k in self.kinds})}", role)
        return found

    @property
    def params(self) -> int:
        """Elements of all parameters, buffers left out."""
        return sum(kind.count * kind.numel for kind in self.kinds if not kind.row.buffer)

    @property
    def buffer_elements(self) -> int:
        """Elements of all buffers."""
        return sum(kind.count * kind.numel for kind in self.kinds if kind.row.buffer)

    @property
    def tensors(self) -> int:
        """Number of tensors, buffers included."""
        return sum(kind.count for kind in self.kinds)


class Block(NamedTuple):
    """Rows under one prefix: ``layers`` fills its ``{}``; none for tensors of the whole model."""

    prefix: str
    layers: Sequence[int]
    rows: Sequence[Row]
    mtp: bool = False


def build(
    name: str,
    layers: int,
    vocab: int,
    blocks: Iterable[Block],
    heads: Heads | None = None,
    experts: int = 0,
    tied: dict[str, str] | None = None,
) -> Catalogue:
    """A catalogue from blocks of rows."""
    kinds: list[Kind] = []
    first = 0
    for block in blocks:
        for row in block.rows:
            kind = Kind(row, block.prefix, tuple(block.layers), block.mtp, first)
            first += kind.count
            kinds.append(kind)
    return Catalogue(name, layers, vocab, tuple(kinds), heads, experts, dict(tied or {}))


def _block(kind: Kind) -> tuple[str, list[Ints]]:
    layers = np.array(kind.layers, dtype=np.int64)
    experts = np.arange(max(1, kind.row.experts), dtype=np.int64)
    numbers = []
    if len(layers):
        numbers.append(np.repeat(layers, len(experts)))
    if kind.row.experts:
        numbers.append(np.tile(experts, max(1, len(layers))))
    return kind.prefix + kind.row.name, numbers
