"""What front ends share: the cut of a kind, patterns made once, storages, instances of all layers in one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError, LayoutError
from refitd.layout.fronts import cuts
from refitd.layout.fronts.cuts import Runs
from refitd.layout.models import Kind, quant
from refitd.layout.side import Pattern, SideBuilder, StoragePattern

Ints = NDArray[np.int64]


class Axis(NamedTuple):
    """``parts`` coordinates, and the coordinate of every slot of the groups that use them."""

    parts: int
    coords: Ints


class Cut(NamedTuple):
    """Dimension ``dim`` of a kind, cut by ``runs``; ``key`` is equal for equal cuts; ``extent`` indices a
    coordinate."""

    key: Hashable
    dim: int
    runs: Runs
    extent: int


def label(kind: Kind) -> str:
    """How errors call a kind."""
    return f"tensor {kind.prefix}{kind.row.name}"


def cut_of(kind: Kind, parts: int, vocab: int) -> Cut:
    """How ``parts`` ranks cut a kind. ``vocab``: rows of a padded vocabulary. ``kv`` is cut as rows.

    Raises LayoutError naming the kind when the shares are not equal.
    """
    row = kind.row
    if row.scale:
        return scaled(kind, cut_of(weight_of(kind), parts, vocab))
    if row.cut == "full" or (parts == 1 and row.cut != "vocab"):
        return Cut("full", 0, cuts.full(row.shape[0], parts), row.shape[0])
    if row.cut == "vocab":
        return _vocab(kind, parts, vocab)
    if row.cut == "segments":
        runs = cuts.segments(label(kind), row.segments, parts)
        return Cut(("segments", row.segments, parts), 0, runs, row.shape[0] // parts)
    dim = 1 if row.cut == "columns" else 0
    return Cut((dim, parts), dim, cuts.even(label(kind), row.shape[dim], parts), row.shape[dim] // parts)


def weight_of(kind: Kind) -> Kind:
    """The weight that a scale belongs to."""
    row, (_, shape) = kind.row, kind.row.scale or (1, kind.row.shape)
    name = row.name.removesuffix(quant.SUFFIX)
    return replace(kind, row=row._replace(role=row.role.removesuffix("_scale"), name=name, shape=shape, scale=None))


def scaled(kind: Kind, cut: Cut) -> Cut:
    """The cut of a scale, from that of its weight. Raises LayoutError for every edge that cuts a block."""
    block, shape = kind.row.scale or (1, kind.row.shape)
    runs = cut.runs
    bad = [
        quant.cut_block(f"{label(weight_of(kind))} on TP rank {coord}", cut.dim, edge, block)
        for edges in (runs.lo, runs.hi)
        for coord, edge in zip(runs.coord.tolist(), edges.tolist(), strict=True)
        if edge % block and edge != shape[cut.dim]
    ]
    if bad:
        raise LayoutError(bad)
    shares = Runs(runs.coord, runs.lo // block, -(-runs.hi // block), -(-runs.at // block))
    return Cut((cut.key, block), cut.dim, shares, -(-cut.extent // block))


def _vocab(kind: Kind, parts: int, vocab: int) -> Cut:
    rows = kind.row.shape[0]
    if vocab % parts or vocab < rows:
        expected = f"a padded vocabulary of at least {rows} rows that {parts} ranks divide"
        raise LayoutError([InputError(label(kind), expected, str(vocab))])
    return Cut(("vocab", vocab, parts), 0, cuts.padded(rows, vocab, parts), vocab // parts)


def local_shape(kind: Kind, cut: Cut) -> tuple[int, ...]:
    """Shape of the kind's part on one coordinate."""
    shape = list(kind.row.shape)
    shape[cut.dim] = cut.extent
    return tuple(shape)


class Placer:
    """Lays kinds out in a builder, and keeps patterns: kinds of equal shape, cut and strides share one."""

    def __init__(self, builder: SideBuilder) -> None:
        self.builder = builder
        self._patterns: dict[Hashable, Pattern] = {}

    def pattern(self, kind: Kind, axis: Axis, cut: Cut, strides: tuple[int, ...]) -> Pattern:
        """The pattern of a kind over the slots of ``axis``."""
        row = kind.row
        key = (row.shape, row.dtype, id(axis.coords), axis.parts, cut.key, cut.dim, strides)
        return self._kept(key, lambda: cuts.pattern(row.shape, row.dtype, axis.coords, cut.runs, cut.dim, strides))

    def _kept(self, key: Hashable, make: Callable[[], Pattern]) -> Pattern:
        found = self._patterns.get(key)
        if found is None:
            found = self._patterns[key] = make()
        return found

    def storages(self, names: Sequence[str], groups: Sequence[int], slots: int, dtype: str, numel: int) -> Ints:
        """Storages of ``numel`` elements on every slot of their groups."""
        return self.builder.storage(names, groups, StoragePattern(dtype, np.full(slots, numel, dtype=np.int64)))


def volume(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count
