"""What a rank has verified already: boxes by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

import numpy as np

from refitd.errors import InputError
from refitd.layout import Box, codec
from refitd.layout.box import difference
from refitd.layout.build import MAX_DIMS

_KIND = "held"


class Held:
    """Disjoint boxes by the destination's tensor name. Immutable; overlapping input is made disjoint."""

    def __init__(self, boxes: Mapping[str, Iterable[Box]] | None = None) -> None:
        table = {name: _disjoint(parts) for name, parts in sorted((boxes or {}).items())}
        self.boxes: Mapping[str, tuple[Box, ...]] = MappingProxyType({name: b for name, b in table.items() if b})

    def union(self, other: Held) -> Held:
        """What either holds."""
        names = self.boxes.keys() | other.boxes.keys()
        return Held({name: (*self.boxes.get(name, ()), *other.boxes.get(name, ())) for name in names})

    @property
    def elements(self) -> int:
        """Number of elements held."""
        return sum(box.volume for parts in self.boxes.values() for box in parts)

    def to_bytes(self) -> bytes:
        """Bytes without pickle; `from_bytes` reads them."""
        dims = [len(parts[0].lo) for parts in self.boxes.values()]
        rows = [(i, *_row(box)) for i, parts in enumerate(self.boxes.values()) for box in parts]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 1 + 2 * MAX_DIMS)
        return codec.encode(_KIND, {"tensors": list(self.boxes), "dims": dims}, {"boxes": table})

    @classmethod
    def from_bytes(cls, data: bytes) -> Held:
        """Read `to_bytes`. Raises InputError on garbage."""
        header, arrays = codec.decode(_KIND, data)
        names, dims = codec.strings("held tensors", header.get("tensors")), header.get("dims")
        if not isinstance(dims, list) or len(dims) != len(names) or not all(codec.is_int(d, MAX_DIMS) for d in dims):
            raise InputError("held dims", f"{len(names)} numbers of dimensions", repr(dims)[:80])
        table = arrays.get("boxes")
        if table is None or table.shape[1:] != (1 + 2 * MAX_DIMS,):
            raise InputError("held boxes", f"rows of {1 + 2 * MAX_DIMS}", "none" if table is None else str(table.shape))
        codec.require_range("held boxes, tensor", table[:, 0], len(names))
        codec.require_range("held boxes", table, codec.MAX_INT + 1)
        boxes: dict[str, list[Box]] = {name: [] for name in names}
        for tensor, *edges in table.tolist():
            lo, hi = edges[: dims[tensor]], edges[MAX_DIMS : MAX_DIMS + dims[tensor]]
            if any(a >= b for a, b in zip(lo, hi, strict=True)):
                raise InputError(f"held {names[tensor]}", "boxes that hold something", f"{lo} to {hi}")
            boxes[names[tensor]].append(Box(tuple(lo), tuple(hi)))
        return cls(boxes)

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the boxes."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.boxes == other.boxes

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Held({len(self.boxes)} tensors, {self.elements} elements)"


def _row(box: Box) -> tuple[int, ...]:
    spare = (0,) * (MAX_DIMS - len(box.lo))
    return (*box.lo, *spare, *box.hi, *spare)


def _disjoint(boxes: Iterable[Box]) -> tuple[Box, ...]:
    result: list[Box] = []
    for box in sorted(set(boxes)):
        if box.volume:
            result += difference(box, result)
    return tuple(sorted(result))
