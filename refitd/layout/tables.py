"""The layouts of a side as integer rows over common numbers for tensors, storages and geometries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from refitd.errors import InputError, LayoutError
from refitd.layout.box import Ints
from refitd.layout.layout import Fact, Layout

StorageKey = tuple[str, str, tuple[str, ...]]  # name, dtype, keep patterns of its ranks


class Geometry(NamedTuple):
    """A box of a tensor with strides: its fact, and ``table`` (3, D): lo, hi, strides."""

    fact: Fact
    table: Ints


class Tables(NamedTuple):
    """Unique layouts by number; ``ranks`` of each; columns over all of them.

    ``rows`` (N, 5): tensor, storage, layout, offset, geometry. ``bare`` (K, 2): tensor, layout. ``storage_rows`` (S,
    3): storage, layout, elements. ``tensors`` and ``facts`` by tensor number.
    """

    ranks: list[tuple[int, ...]]
    tensors: list[str]
    facts: list[Fact]
    storages: list[StorageKey]
    geometries: list[Geometry]
    rows: Ints
    bare: Ints
    storage_rows: Ints
    tied: dict[str, str]
    tied_on: dict[str, frozenset[int]]
    keep: tuple[str, ...]
    keeps: tuple[tuple[str, ...], ...]


def tables_of(layouts: Mapping[str, Layout]) -> Tables:
    """Raises LayoutError with every contradiction between ranks."""
    keys = list(layouts)
    numbers: dict[object, int] = {}
    unique: list[Layout] = []
    ranks: list[list[int]] = []
    for rank, layout in enumerate(layouts.values()):
        known = layout.__dict__.get("digest", id(layout))  # a digest costs more than it saves here, unless it is there
        number = numbers.setdefault(known, len(unique))
        if number == len(unique):
            unique.append(layout)
            ranks.append([])
        ranks[number].append(rank)
    return _Reader(keys, unique, ranks).tables()


class _Reader:
    def __init__(self, keys: list[str], unique: list[Layout], ranks: list[list[int]]) -> None:
        self.keys, self.unique, self.ranks = keys, unique, ranks
        self._tensors: dict[str, int] = {}
        self._facts: list[tuple[Fact, str]] = []
        self._storages: dict[StorageKey, int] = {}
        self._geometries: dict[tuple[Fact, bytes], int] = {}
        self._known: dict[tuple[str, ...], tuple[Ints, Mapping[str, Fact]]] = {}
        self._bad: list[InputError] = []

    def tables(self) -> Tables:
        """Everything, or the contradictions."""
        parts = [self._read(number, layout) for number, layout in enumerate(self.unique)]
        tied, tied_on = self._tied()
        if self._bad:
            raise LayoutError(self._bad)
        rows, bare, storages = (np.concatenate([_none(width), *column]) for width, column in zip(
            (5, 2, 3), zip(*parts, strict=True), strict=True))  # fmt: skip
        keep, keeps = self._keeps()
        return Tables(
            [tuple(ranks) for ranks in self.ranks], list(self._tensors), [fact for fact, _ in self._facts],
            list(self._storages), [self._geometry(*key) for key in self._geometries], rows, bare, storages,
            tied, tied_on, keep, keeps,
        )  # fmt: skip

    def _read(self, number: int, layout: Layout) -> tuple[Ints, Ints, Ints]:
        tensors = self._tensor_numbers(number, layout)
        storages = np.array(
            [self._storages.setdefault((name, dtype, layout.keep), len(self._storages))
             for name, (_, dtype) in layout.storages.items()], dtype=np.int64)  # fmt: skip
        geometry = np.array([self._geometry_number(layout, i) for i in range(len(layout.patterns))], dtype=np.int64)
        tensor, storage, offset, pattern = layout.instances.T
        mine = np.full(len(tensor), number, dtype=np.int64)
        rows = np.stack([tensors[tensor], storages[storage], mine, offset, geometry[pattern]], axis=1)
        held = np.zeros(len(tensors), dtype=bool)
        held[tensor] = True
        bare = np.stack([tensors[~held], np.full(int((~held).sum()), number, dtype=np.int64)], axis=1)
        numel = np.array([count for count, _ in layout.storages.values()], dtype=np.int64)
        return rows, bare, np.stack([storages, np.full(len(storages), number, dtype=np.int64), numel], axis=1)

    def _tensor_numbers(self, number: int, layout: Layout) -> Ints:
        key = self.keys[self.ranks[number][0]]
        found, facts = self._known.get(layout.tensor_names, (None, {}))
        if found is not None and facts == layout.tensors:
            return found
        if found is None:
            found = np.array([self._tensors.setdefault(n, len(self._tensors)) for n in layout.tensors], dtype=np.int64)
            self._known[layout.tensor_names] = found, layout.tensors
        for tensor, (name, fact) in zip(found.tolist(), layout.tensors.items(), strict=True):
            if tensor == len(self._facts):
                self._facts.append((fact, key))
            elif self._facts[tensor][0] != fact:
                expected, first = self._facts[tensor]
                self._bad.append(
                    InputError(f"tensor {name}", f"{_text(expected)} as {first} reports", f"{_text(fact)} from {key}")
                )
        return found

    def _geometry_number(self, layout: Layout, pattern: int) -> int:
        fact = layout.facts[int(layout.pattern_fact[pattern])]
        table = np.ascontiguousarray(layout.patterns[pattern, :, : len(fact[0])])
        return self._geometries.setdefault((fact, table.tobytes()), len(self._geometries))

    @staticmethod
    def _geometry(fact: Fact, table: bytes) -> Geometry:
        return Geometry(fact, np.frombuffer(table, dtype=np.int64).reshape(3, len(fact[0])))

    def _tied(self) -> tuple[dict[str, str], dict[str, frozenset[int]]]:
        tied: dict[str, str] = {}
        first: dict[str, str] = {}
        where: dict[str, set[int]] = {}
        for layout, ranks in zip(self.unique, self.ranks, strict=True):
            for alias, name in layout.tied.items():
                key = self.keys[ranks[0]]
                if tied.setdefault(alias, name) != name:
                    self._bad.append(
                        InputError(f"tied {alias}", f"{tied[alias]} as {first[alias]} says", f"{name} from {key}")
                    )
                first.setdefault(alias, key)
                where.setdefault(alias, set()).update(ranks)
        return tied, {alias: frozenset(ranks) for alias, ranks in where.items()}

    def _keeps(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        every = tuple(sorted({pattern for layout in self.unique for pattern in layout.keep}))
        if all(layout.keep == every for layout in self.unique):
            return every, ()
        of_rank = {rank: lay.keep for lay, ranks in zip(self.unique, self.ranks, strict=True) for rank in ranks}
        return every, tuple(of_rank[rank] for rank in range(len(self.keys)))


def _none(width: int) -> Ints:
    return np.empty((0, width), dtype=np.int64)


def _text(fact: Fact) -> str:
    return f"shape {fact[0]} dtype {fact[1]}"
