"""What a rank has verified already: boxes by tensor, as columns: a rank of a large model has tens of thousands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

import numpy as np

from refitd.errors import InputError
from refitd.layout import Box, codec
from refitd.layout.box import Bools, Ints, difference
from refitd.layout.build import MAX_DIMS
from refitd.layout.names import Names
from refitd.plan.ranksets import product

_KIND = "held"


class Held:
    """Disjoint boxes by the destination's tensor name. Immutable; overlapping input is made disjoint.

    ``names``: of T tensors that something is held of, by template and numbers; ``dims`` (T,). Of N boxes: ``tensor``
    (N,), in ascending order; ``lo``, ``hi`` (N, `MAX_DIMS`), where dimensions that the tensor lacks have lo 0, hi 1.
    """

    def __init__(self, boxes: Mapping[str, Iterable[Box]] | None = None) -> None:
        parts = {name: list(found) for name, found in (boxes or {}).items()}
        names = Names.from_strings(parts)
        rows = [_row(i, box) for i, found in enumerate(parts.values()) for box in found]
        table = np.array(rows, np.int64).reshape(len(rows), 2 + 2 * MAX_DIMS)
        dims = np.zeros(len(parts), np.int64)
        dims[table[:, 0]] = table[:, 1]
        self._set(names, dims, table[:, 0], *np.split(table[:, 2:], 2, axis=1))

    @classmethod
    def from_columns(cls, names: Names, dims: Ints, tensor: Ints, lo: Ints, hi: Ints) -> Held:
        """From columns in any order (see the class); ``lo``, ``hi`` may have fewer columns than `MAX_DIMS`, and there
        may be names that nothing is held of."""
        held = cls.__new__(cls)
        spare = ((0, 0), (0, MAX_DIMS - lo.shape[1]))
        held._set(names, dims, tensor, np.pad(lo, spare), np.pad(hi, spare, constant_values=1))
        return held

    def _set(self, names: Names, dims: Ints, tensor: Ints, lo: Ints, hi: Ints) -> None:
        real = (lo < hi).all(axis=1)
        tensor, lo, hi = tensor[real], lo[real], hi[real]
        used = np.unique(tensor)
        canonical = _canonical(names, used)
        number = np.empty(len(names), np.int64)
        number[used[canonical[1]]] = np.arange(len(used))
        self.names, self.dims = canonical[0], dims[used[canonical[1]]]
        self.tensor, self.lo, self.hi = _disjoint(*_ordered(number[tensor], lo, hi))

    def union(self, other: Held) -> Held:
        """What either holds."""
        names, *at = self.names.joined(other.names)
        dims = np.zeros(len(names), np.int64)
        for where, each in zip(at, (self, other), strict=True):
            dims[where] = each.dims
        tensor = np.concatenate([where[each.tensor] for where, each in zip(at, (self, other), strict=True)])
        lo, hi = np.concatenate([self.lo, other.lo]), np.concatenate([self.hi, other.hi])
        return Held.from_columns(names, dims, tensor, lo, hi)

    @cached_property
    def boxes(self) -> Mapping[str, tuple[Box, ...]]:
        """Boxes by name, sorted. Meant for few: it makes an object of each."""
        found: dict[str, list[Box]] = {name: [] for name in self.names}
        dims = self.dims.tolist()
        for tensor, lo, hi in zip(self.tensor.tolist(), self.lo.tolist(), self.hi.tolist(), strict=True):
            found[self.names[tensor]].append(Box(tuple(lo[: dims[tensor]]), tuple(hi[: dims[tensor]])))
        return MappingProxyType({name: tuple(sorted(found[name])) for name in sorted(found)})

    @property
    def elements(self) -> int:
        """Number of elements held."""
        return int(product(self.hi - self.lo).sum())

    def to_bytes(self) -> bytes:
        """Bytes without pickle; `from_bytes` reads them."""
        wide = int(self.dims.max(initial=0))
        table = np.concatenate([self.tensor[:, None], self.lo[:, :wide], self.hi[:, :wide]], axis=1)
        heads = np.stack([self.names.codes, self.dims], axis=1)
        templates = [list(template) for template in self.names.templates]
        return codec.encode(_KIND, {"templates": templates, "wide": wide}, {"tensors": heads, "boxes": table})

    @classmethod
    def from_bytes(cls, data: bytes) -> Held:
        """Read `to_bytes`. Raises InputError on garbage."""
        header, arrays = codec.decode(_KIND, data)
        wide = header.get("wide")
        if not isinstance(wide, int) or not codec.is_int(wide, MAX_DIMS):
            raise InputError("held wide", f"a number of dimensions up to {MAX_DIMS}", repr(wide)[:80])
        heads, boxes = (_column(arrays, name, width) for name, width in (("tensors", 2), ("boxes", 1 + 2 * wide)))
        codec.require_range("held dims", heads[:, 1], wide + 1)
        codec.require_range("held boxes, tensor", boxes[:, 0], len(heads))
        codec.require_range("held boxes", boxes, codec.MAX_INT + 1)
        names = Names.from_records(header.get("templates"), heads[:, 0])
        lo, hi = boxes[:, 1 : 1 + wide], boxes[:, 1 + wide :]
        spare = np.arange(wide) >= heads[:, 1][boxes[:, 0]][:, None]
        wrong = (lo >= hi) | (spare & ((lo != 0) | (hi != 1)))
        if wrong.any():
            at = int(wrong.any(axis=1).argmax())
            field = f"held {names[int(boxes[at, 0])]}"
            raise InputError(field, "boxes that hold something", f"{lo[at].tolist()} to {hi[at].tolist()}")
        return cls.from_columns(names, heads[:, 1], boxes[:, 0], lo, hi)

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the boxes."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Held({len(self.names)} tensors, {self.elements} elements)"


def _row(tensor: int, box: Box) -> tuple[int, ...]:
    spare = MAX_DIMS - len(box.lo)
    return (tensor, len(box.lo), *box.lo, *(0,) * spare, *box.hi, *(1,) * spare)


def _column(arrays: Mapping[str, Ints], name: str, width: int) -> Ints:
    table = arrays.get(name)
    if table is None or table.shape[1:] != (width,):
        raise InputError(f"held {name}", f"rows of {width}", "none" if table is None else str(table.shape))
    return table


def _canonical(names: Names, used: Ints) -> tuple[Names, Ints]:
    """The used names with only their own templates, in one order whatever order they were given in; and that order."""
    codes = names.codes[used]
    kinds = np.unique(codes >> names.SHIFT)
    listed = sorted((names.templates[kind], kind) for kind in kinds.tolist())
    place = np.zeros(len(names.templates) + 1, np.int64)
    place[[kind for _, kind in listed]] = np.arange(len(listed))
    codes = (place[codes >> names.SHIFT] << names.SHIFT) | (codes & ((1 << names.SHIFT) - 1))
    order = np.argsort(codes, kind="stable")
    return Names([template for template, _ in listed], codes[order]), order


def _ordered(tensor: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Boxes by tensor, lo and hi, each once."""
    wide = max(1, int((hi != 1).any(axis=0).nonzero()[0].max(initial=0)) + 1)
    keys = (*hi[:, :wide].T[::-1], *lo[:, :wide].T[::-1], tensor)
    order = np.lexsort(keys)
    table = np.stack(keys, axis=1)[order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (table[1:] != table[:-1]).any(axis=1)
    order = order[fresh]
    return tensor[order], lo[order], hi[order]


def _disjoint(tensor: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """The same elements in disjoint boxes. Tensors whose boxes follow each other along one dimension are so already."""
    crowded = _crowded(tensor, lo, hi)
    if not len(crowded):
        return tensor, lo, hi
    loose = np.isin(tensor, crowded)
    parts: list[tuple[int, Box]] = []
    for number in crowded.tolist():
        mine = tensor == number
        apart: list[Box] = []
        for low, high in zip(lo[mine].tolist(), hi[mine].tolist(), strict=True):
            apart += difference(Box(tuple(low), tuple(high)), apart)
        parts += [(number, box) for box in apart]
    lows, highs = (np.array([box[k] for _, box in parts], np.int64).reshape(-1, MAX_DIMS) for k in (0, 1))
    numbers = np.array([number for number, _ in parts], np.int64)
    return _ordered(
        np.concatenate([tensor[~loose], numbers]),
        np.concatenate([lo[~loose], lows]),
        np.concatenate([hi[~loose], highs]),
    )


def _crowded(tensor: Ints, lo: Ints, hi: Ints) -> Ints:
    """Tensors with boxes that may overlap."""
    count = np.bincount(tensor)
    open_: Bools = count > 1
    for d in range(MAX_DIMS):
        mine = np.flatnonzero(open_[tensor])
        if not len(mine):
            break
        mine = mine[np.lexsort((lo[mine, d], tensor[mine]))]
        same = tensor[mine][1:] == tensor[mine][:-1]
        bad = same & (lo[mine, d][1:] < hi[mine, d][:-1])
        still = np.zeros(len(count), dtype=bool)
        still[tensor[mine][1:][bad]] = True
        open_ &= still
    return np.flatnonzero(open_)
