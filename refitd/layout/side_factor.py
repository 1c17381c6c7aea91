"""From the layouts of all ranks to a factored `Side`. No loop over tensors: rows are compared as integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError, LayoutError
from refitd.layout.box import Ints
from refitd.layout.layout import Fact, Layout
from refitd.layout.names import Names
from refitd.layout.side import Pattern, Side, StoragePattern
from refitd.layout.tables import Tables, tables_of


def side_from_layouts(layouts: Mapping[str, Layout], places: Mapping[str, tuple[str, str]]) -> Side:
    """The side of these ranks, in the order of ``layouts``. ``places``: rank key -> (node, domain).

    Only the numbers of ranks follow that order: all else is made in the order of their keys, so that a plan is the
    same for every order.

    `Side.layout` gives every layout back. Ranks that share one `Layout` object, or whose digests
    are known and equal, cost nothing. Raises InputError when a
    rank has no place, LayoutError when two ranks contradict each other about a tensor or an alias.
    """
    lost = [key for key in layouts if key not in places]
    if lost:
        raise InputError("places", "a node and domain for every rank", f"none for {', '.join(lost[:5])}")
    tables = tables_of(dict(sorted(layouts.items())))
    factor = _Factor(tables)
    instances, bare = factor.instances(), factor.bare()
    storage_pattern, storage_group = factor.storages()
    order = {key: number for number, key in enumerate(layouts)}
    rank = [order[key] for key in sorted(layouts)]
    groups = tuple(tuple(rank[member] for member in group) for group in factor.groups)
    tied_on = {alias: frozenset(rank[member] for member in on) for alias, on in tables.tied_on.items()}
    keeps = tuple(keep for _, keep in sorted(zip(rank, tables.keeps, strict=True))) if tables.keeps else ()
    return Side(
        tuple(layouts), tuple(places[key][0] for key in layouts), tuple(places[key][1] for key in layouts),
        groups, tuple(factor.patterns), Names.from_strings(tables.tensors),
        tuple(name for name, _, _ in tables.storages), tuple(factor.storage_patterns), storage_pattern, storage_group,
        instances, tables.tied, tables.keep, keeps, bare, tied_on,
    )  # fmt: skip


class _Blocks(NamedTuple):
    """Consecutive runs of equal keys in sorted rows: where each starts, and its length."""

    start: Ints
    size: Ints


class _Factor:
    """Groups and patterns, each made once."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.groups: dict[tuple[int, ...], int] = {}
        self.patterns: list[Pattern] = []
        self.storage_patterns: list[StoragePattern] = []
        self._pattern_ids: dict[tuple[object, ...], int] = {}
        self._ranks: list[tuple[int, ...]] = tables.ranks

    def _group(self, layouts: Sequence[int]) -> tuple[int, Ints]:
        """The group of all ranks of some unique layouts, in rank order; and which layout each slot has."""
        pairs = sorted((rank, layout) for layout in layouts for rank in self._ranks[layout])
        key = tuple(rank for rank, _ in pairs)
        return self.groups.setdefault(key, len(self.groups)), np.array([layout for _, layout in pairs], dtype=np.int64)

    def instances(self) -> Ints:
        """Rows (tensor, pattern, group, storage, base)."""
        rows = self.tables.rows
        rows = rows[np.lexsort((rows[:, 4], rows[:, 3], rows[:, 2], rows[:, 1], rows[:, 0]))]
        blocks = _blocks(rows[:, 0], rows[:, 1])
        base = np.minimum.reduceat(rows[:, 3], blocks.start) if len(rows) else rows[:, 3]
        body = rows[:, 2:].copy()
        body[:, 1] -= np.repeat(base, blocks.size)
        first, label = _classes(body, blocks)
        made = [
            self._class(body[at : at + size]) for at, size in zip(blocks.start[first], blocks.size[first], strict=True)
        ]
        pairs = np.array(made, dtype=np.int64).reshape(-1, 2)[label]
        return np.concatenate([rows[blocks.start, :1], pairs, rows[blocks.start, 1:2], base[:, None]], axis=1)

    def _class(self, body: Ints) -> tuple[int, int]:
        """Pattern and group of rows (unique layout, offset, geometry)."""
        group, layout_of_slot = self._group(np.unique(body[:, 0]).tolist())
        slot, row = np.nonzero(layout_of_slot[:, None] == body[None, :, 0])
        return self._pattern(len(layout_of_slot), slot, body[row, 1], body[row, 2]), group

    def _pattern(self, slots: int, slot: Ints, offset: Ints, geometry: Ints) -> int:
        used, at = np.unique(geometry, return_inverse=True)
        shapes = [self.tables.geometries[i] for i in used.tolist()]
        table = np.stack([g.table for g in shapes])
        boxes, box = np.unique(table[:, :2].reshape(len(table), -1), axis=0, return_inverse=True)
        return self._kept(shapes[0].fact, slots, slot, offset, (boxes, box.ravel()[at]), table[at, 2])

    def _kept(self, fact: Fact, slots: int, slot: Ints, offset: Ints, boxes: tuple[Ints, Ints], strides: Ints) -> int:
        key = (fact, slots, *(a.tobytes() for a in (slot, offset, *boxes, strides)))
        number = self._pattern_ids.setdefault(key, len(self.patterns))
        if number == len(self.patterns):
            table = boxes[0].reshape(len(boxes[0]), 2, len(fact[0]))
            self.patterns.append(Pattern(*fact, slots, table, slot, boxes[1], offset, strides))
        return number

    def bare(self) -> Ints:
        """Rows (tensor, pattern, group) of tensors that ranks know and hold nothing of."""
        rows = self.tables.bare
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        blocks = _blocks(rows[:, 0])
        first, label = _classes(rows[:, 1:], blocks)
        groups = [
            self._group(rows[at : at + size, 1].tolist())
            for at, size in zip(blocks.start[first].tolist(), blocks.size[first].tolist(), strict=True)
        ]
        tensors = rows[blocks.start, 0] if len(rows) else rows[:, 0]
        made = [
            (tensor, self._empty(self.tables.facts[tensor], len(groups[c][1])), groups[c][0])
            for tensor, c in zip(tensors.tolist(), label.tolist(), strict=True)
        ]
        return np.array(made, dtype=np.int64).reshape(-1, 3)

    def _empty(self, fact: Fact, slots: int) -> int:
        none, dims = np.empty(0, dtype=np.int64), len(fact[0])
        boxes = np.empty((0, 2 * dims), dtype=np.int64)
        return self._kept(fact, slots, none, none, (boxes, none), np.empty((0, dims), dtype=np.int64))

    def storages(self) -> tuple[Ints, Ints]:
        """Pattern and group of every storage."""
        ids: dict[tuple[str, bytes], int] = {}
        patterns, groups = [], []
        rows = self.tables.storage_rows
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        blocks = _blocks(rows[:, 0])
        for at, size in zip(blocks.start.tolist(), blocks.size.tolist(), strict=True):
            part = rows[at : at + size]
            group, layout_of_slot = self._group(part[:, 1].tolist())
            numel = part[np.searchsorted(part[:, 1], layout_of_slot), 2]
            dtype = self.tables.storages[int(part[0, 0])][1]
            number = ids.setdefault((dtype, numel.tobytes()), len(ids))
            if number == len(self.storage_patterns):
                self.storage_patterns.append(StoragePattern(dtype, numel))
            patterns.append(number)
            groups.append(group)
        return np.array(patterns, dtype=np.int64), np.array(groups, dtype=np.int64)


def _blocks(*keys: Ints) -> _Blocks:
    fresh = np.ones(len(keys[0]), dtype=bool)
    fresh[1:] = False
    for key in keys:
        fresh[1:] |= key[1:] != key[:-1]
    start = np.flatnonzero(fresh)
    return _Blocks(start, np.diff(np.append(start, len(fresh))))


def _classes(body: Ints, blocks: _Blocks) -> tuple[Ints, Ints]:
    """Blocks of equal rows: the first of each class, and the class of each block. Classes are in the order in which
    they begin, for the hash depends on how layouts are numbered: who has equal ones as one object numbers fewer.

    Blocks are found by a hash of their rows and then compared, so a collision cannot pass.
    """
    if not len(body):
        return blocks.start, blocks.start
    place = np.arange(len(body)) - np.repeat(blocks.start, blocks.size)
    mixed = _mix(place.astype(np.uint64))
    for column in body.T:
        mixed = _mix(mixed + column.astype(np.uint64))
    sums = np.add.reduceat(mixed, blocks.start) + blocks.size.astype(np.uint64)
    _, first, label = np.unique(sums, return_index=True, return_inverse=True)
    twin = blocks.start[first[label]]
    same_size = blocks.size == blocks.size[first[label]]
    if not same_size.all() or (body != body[np.repeat(twin, blocks.size) + place]).any():
        raise LayoutError([InputError("layouts", "rows with distinct hashes", "a collision")])
    order = np.argsort(first)
    return first[order], np.argsort(order)[label]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 step."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
