"""Hugging Face in memory: experts one by one, or fused in one tensor (transformers 5), or fused and transposed (NeMo
Automodel)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from refitd.errors import InputError, LayoutError
from refitd.layout.box import Box, Piece
from refitd.layout.fronts.cuts import dense_strides
from refitd.layout.fronts.placer import Axis, Placer, cut_of
from refitd.layout.layout import Fact, Layout
from refitd.layout.models import Catalogue, Kind
from refitd.layout.side import Side, SideBuilder


@dataclass(frozen=True)
class Form:
    """How experts are stored: names of the two fused tensors of a layer, and whether each expert's matrix is
    transposed.

    ``gate_up`` holds gate, then up, along the output axis: [E, 2I, H], or [E, H, 2I] when ``transposed``.
    """

    gate_up: str
    down: str
    transposed: bool


FUSED = Form("gate_up_proj", "down_proj", transposed=False)
AUTOMODEL = Form("gate_and_up_projs", "down_projs", transposed=True)


def hugging_face(catalogue: Catalogue, ranks: list[tuple[str, str, str]], form: Form | None = None) -> Side:
    """A side on which every rank (key, node, domain) has the whole model; ``form``: how its experts are fused, if at
    all."""
    builder = SideBuilder(ranks, catalogue.names)
    placer = Placer(builder)
    group = builder.group(range(len(ranks)))
    axis = Axis(1, np.zeros(len(ranks), dtype=np.int64))
    for kind in catalogue.kinds:
        names, numel, base, strides = _place(catalogue, kind, form if kind.row.experts else None)
        storage = placer.storages(names, [group] * len(names), len(ranks), kind.row.dtype, numel)
        pattern = placer.pattern(kind, axis, cut_of(kind, 1, kind.row.shape[0]), strides)
        each = kind.count // len(names)
        builder.add(kind.ids.ravel(), pattern, group, np.repeat(storage, each), np.tile(base, len(names)))
    builder.tied |= catalogue.tied
    return builder.build()


def _place(catalogue: Catalogue, kind: Kind, form: Form | None) -> tuple[list[str], int, list[int], tuple[int, ...]]:
    """Storages of a kind, elements of each, base of every tensor in one of them, strides."""
    shape, numel = kind.row.shape, kind.numel
    if form is None:
        return catalogue.names.take(kind.ids.ravel()), numel, [0], dense_strides(shape)
    down = kind.role == "expert_down"
    stacked = 1 if down or ("expert_gate", kind.mtp) not in catalogue.by_role else 2
    second = kind.role == "expert_up" and stacked == 2
    rows, columns = shape
    strides = (1, rows * stacked) if form.transposed else (columns, 1)
    start = (rows if form.transposed else numel) if second else 0
    base = [expert * numel * stacked + start for expert in range(kind.row.experts)]
    head = kind.prefix + kind.row.name.split("{}", maxsplit=1)[0]
    name = head + (form.down if down else form.gate_up)
    return [name.format(layer) for layer in kind.layers], numel * stacked * kind.row.experts, base, strides


def unfuse(
    layout: Layout,
    form: Form,
    gate: str = "gate_proj.weight",
    up: str = "up_proj.weight",
    down: str = "down_proj.weight",
) -> Layout:
    """A layout that speaks of fused expert tensors, in terms of the tensors of each expert.

    For layouts read off fused tensors (a DTensor of ``gate_up_proj`` [E, 2I, H], cut in any way): tensor
    ``….experts.<fused>`` becomes ``….experts.<e>.<gate, up or down>`` with shapes [I, H] and [H, I]. Storages stay.
    Raises LayoutError for a fused tensor that is not 3-D or whose output axis is odd.
    """
    tensors: dict[str, Fact] = {}
    pieces: list[Piece] = []
    bad: list[InputError] = []
    split: dict[str, _Fused] = {}
    for name, fact in layout.tensors.items():
        found = _fused(name, fact, form, gate, up, down)
        if isinstance(found, InputError):
            bad.append(found)
        elif found is None:
            tensors[name] = fact
        else:
            split[name] = found
            tensors |= dict(found.facts())
    if bad:
        raise LayoutError(bad)
    for piece in layout.pieces():
        pieces += split[piece.tensor].pieces(piece) if piece.tensor in split else [piece]
    return Layout.from_pieces(tensors, layout.storages, pieces, layout.keep, layout.tied)


def _fused(name: str, fact: Fact, form: Form, gate: str, up: str, down: str) -> _Fused | InputError | None:
    head, _, last = name.rpartition(".")
    if last not in (form.gate_up, form.down) or not head.endswith("experts"):
        return None
    parts = (gate, up) if last == form.gate_up else (down,)
    axis = 2 if form.transposed else 1
    if len(fact[0]) != 3 or fact[0][axis] % len(parts):
        expected = f"[experts, N, K] with axis {axis} a multiple of {len(parts)}"
        return InputError(f"tensor {name}: shape", expected, str(fact[0]))
    return _Fused(head, fact, parts, axis)


@dataclass(frozen=True)
class _Fused:
    """A fused tensor: ``parts`` follow each other along ``axis``."""

    head: str
    fact: Fact
    parts: tuple[str, ...]
    axis: int

    @property
    def size(self) -> int:
        """Rows of one part."""
        return self.fact[0][self.axis] // len(self.parts)

    @property
    def other(self) -> int:
        """The input axis."""
        return 3 - self.axis

    def facts(self) -> Iterator[tuple[str, Fact]]:
        """Name and fact of each expert's tensors."""
        for expert in range(self.fact[0][0]):
            for part in self.parts:
                yield f"{self.head}.{expert}.{part}", ((self.size, self.fact[0][self.other]), self.fact[1])

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """The piece, expert by expert and part by part."""
        (first, *_), (last, *_) = piece.box
        row_stride, column_stride = piece.strides[self.axis], piece.strides[self.other]
        low, high = piece.box.lo[self.axis], piece.box.hi[self.axis]
        columns = piece.box.lo[self.other], piece.box.hi[self.other]
        for expert in range(first, last):
            for number, part in enumerate(self.parts):
                start = number * self.size
                lo, hi = max(low, start), min(high, start + self.size)
                if lo < hi:
                    box = Box((lo - start, columns[0]), (hi - start, columns[1]))
                    offset = piece.offset + (expert - first) * piece.strides[0] + (lo - low) * row_stride
                    name = f"{self.head}.{expert}.{part}"
                    yield Piece(name, box, piece.storage, offset, (row_stride, column_stride))


__all__ = ["AUTOMODEL", "FUSED", "Form", "hugging_face", "unfuse"]
