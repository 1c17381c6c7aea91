"""A whole model in flat buffers, as a side: nothing is shared, and most tensors lie on one rank."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from refitd.layout.fronts.cuts import dense_strides
from refitd.layout.fronts.flat import Rules, run_boxes
from refitd.layout.models import Catalogue
from refitd.layout.side import Pattern, Side, SideBuilder, StoragePattern

Ints = NDArray[np.int64]
_Facts = list[tuple[tuple[int, ...], str]]


def flat_side(catalogue: Catalogue, ranks: list[tuple[str, str, str]], rules: Rules) -> Side:
    """All tensors of a model in one buffer for each dtype, cut over all ranks (key, node, domain).

    ``rules.bucket`` must be 0: one bucket. The storage of a dtype is called ``flat.<dtype>``.
    """
    builder = SideBuilder(ranks, catalogue.names)
    facts = [(kind.row.shape, kind.row.dtype) for kind in catalogue.kinds]
    kind_of = np.repeat(np.arange(len(facts)), [kind.count for kind in catalogue.kinds])
    everyone = builder.group(range(len(ranks)))
    own = np.array([builder.group([rank]) for rank in range(len(ranks))], dtype=np.int64)
    for dtype in sorted({dtype for _, dtype in facts}):
        ids = np.flatnonzero(np.array([fact[1] == dtype for fact in facts])[kind_of])
        sizes = np.array([kind.numel for kind in catalogue.kinds], dtype=np.int64)[kind_of[ids]]
        start, share = _starts(sizes, len(ranks), rules)
        numel = np.full(len(ranks), share, dtype=np.int64)
        (storage,) = builder.storage([f"flat.{dtype}"], everyone, StoragePattern(dtype, numel))
        _Flat(builder, facts, own, int(storage), share).add(ids, kind_of[ids], start, sizes)
    return builder.build()


def _starts(sizes: Ints, parts: int, rules: Rules) -> tuple[Ints, int]:
    """Where each tensor starts, and the elements of one rank."""
    ordered = sizes[::-1] if rules.reverse else sizes
    room = -(-ordered // rules.align) * rules.align
    start = np.cumsum(room) - room
    pad = math.lcm(rules.pad, parts)
    total = -(-int(start[-1] + ordered[-1]) // pad) * pad
    return (start[::-1] if rules.reverse else start), total // parts


class _Flat:
    """Adds the tensors of one buffer."""

    def __init__(self, builder: SideBuilder, facts: _Facts, own: Ints, storage: int, share: int) -> None:
        self.builder, self.facts, self.own, self.storage, self.share = builder, facts, own, storage, share
        self._patterns: dict[tuple[object, ...], Pattern] = {}

    def add(self, ids: Ints, kind: Ints, start: Ints, sizes: Ints) -> None:
        """Tensors ``ids`` of these kinds, at ``start`` of the buffer."""
        first, last = start // self.share, (start + sizes - 1) // self.share
        for number in np.unique(kind).tolist():
            inside = np.flatnonzero((kind == number) & (first == last))
            if len(inside):
                shape, dtype = self.facts[number]
                pattern = self._pattern(shape, dtype, 0, math.prod(shape))
                base = start[inside] - first[inside] * self.share
                self._put(ids[inside], pattern, self.own[first[inside]], base)
        for i in np.flatnonzero(first != last).tolist():
            for rank in range(int(first[i]), int(last[i]) + 1):
                self._part(int(ids[i]), self.facts[int(kind[i])], int(start[i]), int(sizes[i]), rank)

    def _part(self, tensor: int, fact: tuple[tuple[int, ...], str], start: int, size: int, rank: int) -> None:
        begin, end = max(rank * self.share - start, 0), min((rank + 1) * self.share - start, size)
        pattern = self._pattern(*fact, begin, end)
        base = np.array([start + begin - rank * self.share])
        self._put(np.array([tensor]), pattern, self.own[rank : rank + 1], base)

    def _put(self, ids: Ints, pattern: Pattern, groups: Ints, base: Ints) -> None:
        self.builder.add(ids, pattern, groups, np.full(len(ids), self.storage, dtype=np.int64), base)

    def _pattern(self, shape: tuple[int, ...], dtype: str, begin: int, end: int) -> Pattern:
        """Elements [begin, end) of a tensor, dense, on the only slot."""
        key = (shape, dtype, begin, end)
        if key not in self._patterns:
            parts = run_boxes(shape, begin, end)
            boxes = np.array([box for box, _ in parts], dtype=np.int64)
            offset = np.array([at - begin for _, at in parts], dtype=np.int64)
            count = len(parts)
            strides = np.tile(np.array(dense_strides(shape), dtype=np.int64), (count, 1))
            slot, box = np.zeros(count, dtype=np.int64), np.arange(count, dtype=np.int64)
            self._patterns[key] = Pattern(shape, dtype, 1, boxes, slot, box, offset, strides)
        return self._patterns[key]
