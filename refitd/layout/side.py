"""`Side`: the layouts of all ranks of one side, factored. Models repeat themselves, so this is small.

A *pattern* says how one tensor shape lies over the slots of a group: unique boxes, and pieces (slot, box, offset, strides).
A *group* is an ordered tuple of ranks: slot i of a pattern is rank ``group[i]``. An *instance* is one tensor laid out by a
pattern over a group in a storage: DeepSeek-V3 has 45,395 instances of some 20 patterns, where flat tables of pieces would have
millions of rows. Front ends call `SideBuilder.add` once for each kind of tensor with all its names, never once a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pattern:
    """How tensors of one ``shape`` (D dims) and ``dtype`` lie over the slots of a group.

    ``boxes`` (B, 2, D): unique half-open boxes, lo then hi. Pieces are columns of length N: ``slot``, ``box`` (index into
    ``boxes``), ``offset`` (elements from the instance's base in that slot's storage), ``strides`` (N, D). A slot may have no
    piece, one, or several.
    """

    shape: tuple[int, ...]
    dtype: str
    slots: int
    boxes: Ints
    slot: Ints
    box: Ints
    offset: Ints
    strides: Ints


@dataclass(frozen=True, eq=False)
class StoragePattern:
    """A storage of ``dtype`` on each slot of a group, with ``numel`` (slots,) elements (0: the slot has none)."""

    dtype: str
    numel: Ints


@dataclass(frozen=True, eq=False)
class Side:
    """All ranks of a side.

    ``ranks``: keys, with ``nodes`` and ``domains`` beside them. ``groups``: tuples of rank indices. ``tensors``: names.
    ``storages``: names, with ``storage_pattern`` and ``storage_group`` (indices). ``instances`` (I, 5): tensor, pattern, group,
    storage, base. ``tied``: alias -> canonical name. ``keep``: fnmatch patterns of storages that the trainer does not own.
    """

    ranks: tuple[str, ...]
    nodes: tuple[str, ...]
    domains: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    patterns: tuple[Pattern, ...]
    tensors: tuple[str, ...]
    storages: tuple[str, ...]
    storage_patterns: tuple[StoragePattern, ...]
    storage_pattern: Ints
    storage_group: Ints
    instances: Ints
    tied: dict[str, str]
    keep: tuple[str, ...]


class SideBuilder:
    """Collects instances. ``ranks``: (key, node, domain) of every rank of the side, in rank order."""

    def __init__(self, ranks: Sequence[tuple[str, str, str]]) -> None:
        self._ranks = tuple(ranks)
        self._groups: dict[tuple[int, ...], int] = {}
        self._patterns: list[Pattern] = []
        self._pattern_ids: dict[int, int] = {}
        self._tensors: dict[str, int] = {}
        self._storages: dict[tuple[str, int], int] = {}
        self._storage_patterns: list[StoragePattern] = []
        self._storage_pattern: list[int] = []
        self._storage_names: list[str] = []
        self._storage_group: list[int] = []
        self._blocks: list[Ints] = []
        self.tied: dict[str, str] = {}
        self.keep: list[str] = []

    def group(self, ranks: Sequence[int]) -> int:
        """The index of an ordered group of rank indices."""
        return self._groups.setdefault(tuple(ranks), len(self._groups))

    def storage(self, names: Sequence[str], group: int, pattern: StoragePattern) -> Ints:
        """Indices of storages of these names on a group, made where they are new."""
        number = len(self._storage_patterns)
        self._storage_patterns.append(pattern)
        found = []
        for name in names:
            key = (name, group)
            if key not in self._storages:
                self._storages[key] = len(self._storage_names)
                self._storage_names.append(name)
                self._storage_pattern.append(number)
                self._storage_group.append(group)
            found.append(self._storages[key])
        return np.array(found, dtype=np.int64)

    def add(self, names: Sequence[str], pattern: Pattern, group: int, storage: Ints, base: Ints | int = 0) -> None:
        """Lay tensors ``names`` out by ``pattern`` over ``group``, each in its storage from its base on."""
        number = self._pattern_ids.setdefault(id(pattern), len(self._patterns))
        if number == len(self._patterns):
            self._patterns.append(pattern)
        tensors = [self._tensors.setdefault(name, len(self._tensors)) for name in names]
        block = np.empty((len(tensors), 5), dtype=np.int64)
        block[:, 0], block[:, 1], block[:, 2], block[:, 3], block[:, 4] = tensors, number, group, storage, base
        self._blocks.append(block)

    def build(self) -> Side:
        """The finished side."""
        instances = np.concatenate(self._blocks) if self._blocks else np.empty((0, 5), dtype=np.int64)
        keys, nodes, domains = zip(*self._ranks, strict=True)
        return Side(
            keys, nodes, domains, tuple(self._groups), tuple(self._patterns), tuple(self._tensors),
            tuple(self._storage_names), tuple(self._storage_patterns), np.array(self._storage_pattern, dtype=np.int64),
            np.array(self._storage_group, dtype=np.int64), instances, dict(self.tied), tuple(self.keep),
        )  # fmt: skip
