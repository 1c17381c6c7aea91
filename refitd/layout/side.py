"""`Side`: the layouts of all ranks of one side, factored. Models repeat themselves, so this is small.

A *pattern* says how one tensor shape lies over the slots of a group: unique boxes, and pieces (slot, box, offset,
strides). A *group* is an ordered tuple of ranks: slot i of a pattern is rank ``group[i]``. An *instance* is one tensor
laid out by a pattern over a group in a storage: DeepSeek-V3 has 45,395 instances of some 20 patterns, where flat tables
of pieces would have millions of rows. Front ends call `SideBuilder.add` once for each kind of tensor with all its
names, never once a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError
from refitd.layout.names import Names

if TYPE_CHECKING:
    from refitd.layout.layout import Layout

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pattern:
    """How tensors of one ``shape`` (D dims) and ``dtype`` lie over the slots of a group.

    ``boxes`` (B, 2, D): unique half-open boxes, lo then hi. Pieces are columns of length N: ``slot``, ``box`` (index
    into ``boxes``), ``offset`` (elements from the instance's base in that slot's storage), ``strides`` (N, D). A slot
    may have no piece (its rank knows the tensor and holds nothing), one, or several.
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
    """A storage of ``dtype`` on each slot of a group, with ``numel`` (slots,) elements, at least 0."""

    dtype: str
    numel: Ints


@dataclass(frozen=True, eq=False)
class Side:
    """All ranks of a side.

    ``ranks``: keys, with ``nodes`` and ``domains`` beside them. ``groups``: tuples of rank indices. ``tensors``: names,
    as templates; not every one has an instance, and one may have several. ``storages``: names, with ``storage_pattern``
    and ``storage_group`` (indices). ``instances`` (I, 5): tensor, pattern, group, storage, base. The storage's group
    contains the instance's group and may be larger: find a rank's storage by rank, not by slot. ``bare`` (K, 3):
    tensor, pattern (without pieces) and group of ranks that know a tensor and hold nothing of it.

    ``tied``: alias -> canonical name, on the ranks ``tied_on[alias]``, or where that is not given, on each rank that
    knows the canonical tensor and has no piece of the alias. ``keep``: fnmatch patterns of storages that the trainer
    does not own; ``keeps``: those of each rank, where they differ (else empty). All ranks of a storage keep it, or none
    does.
    """

    ranks: tuple[str, ...]
    nodes: tuple[str, ...]
    domains: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    patterns: tuple[Pattern, ...]
    tensors: Names
    storages: tuple[str, ...]
    storage_patterns: tuple[StoragePattern, ...]
    storage_pattern: Ints
    storage_group: Ints
    instances: Ints
    tied: dict[str, str]
    keep: tuple[str, ...]
    keeps: tuple[tuple[str, ...], ...] = ()
    bare: Ints = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    tied_on: dict[str, frozenset[int]] = field(default_factory=dict)

    def layout(self, key: str) -> Layout:
        """One rank's layout. Raises InputError when the side has no such rank."""
        from refitd.layout.side_layouts import layout_of

        return layout_of(self, key)

    def rank_index(self, key: str) -> int:
        """The index of a rank key. Raises InputError when the side has no such rank."""
        found = self._rank_ids.get(key)
        if found is None:
            raise InputError("rank", f"one of the side's {len(self.ranks)} ranks", key)
        return found

    def keep_of(self, rank: int) -> tuple[str, ...]:
        """Patterns of the storages that rank number ``rank`` keeps."""
        return self.keeps[rank] if self.keeps else self.keep

    @cached_property
    def _rank_ids(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.ranks)}

    @cached_property
    def members(self) -> tuple[Ints, Ints, Ints]:
        """Group, slot and rank of every slot of every group, as columns."""
        sizes = [len(group) for group in self.groups]
        number = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        starts = np.cumsum([0, *sizes[:-1]]) if sizes else np.empty(0, dtype=np.int64)
        slot = np.arange(len(number), dtype=np.int64) - starts[number] if len(number) else number
        ranks = np.array([rank for group in self.groups for rank in group], dtype=np.int64)
        return number, slot, ranks


class SideBuilder:
    """Collects instances. ``ranks``: (key, node, domain) of every rank of the side, in rank order.

    With ``tensors`` (the names of a catalogue) tensors may be given by their index in it, which needs no strings.
    """

    def __init__(self, ranks: Sequence[tuple[str, str, str]], tensors: Names | None = None) -> None:
        self._ranks = tuple(ranks)
        self._groups: dict[tuple[int, ...], int] = {}
        self._patterns: list[Pattern] = []
        self._pattern_ids: dict[int, int] = {}
        self._known = tensors if tensors is not None else Names((), np.empty(0, dtype=np.int64))
        self._tensors: dict[str, int] = {}
        self._storages: dict[tuple[str, int], int] = {}
        self._storage_patterns: list[StoragePattern] = []
        self._storage_pattern_ids: dict[tuple[str, bytes], int] = {}
        self._storage_pattern: list[int] = []
        self._blocks: list[Ints] = []
        self.tied: dict[str, str] = {}
        self.keep: list[str] = []
        self.keeps: tuple[tuple[str, ...], ...] = ()

    def group(self, ranks: Sequence[int]) -> int:
        """The index of an ordered group of rank indices."""
        return self._groups.setdefault(tuple(ranks), len(self._groups))

    def storage(self, names: Sequence[str], group: int | Sequence[int], pattern: StoragePattern) -> Ints:
        """Indices of storages of these names, each on its group (one for all, or one each), made where they are new."""
        key = (pattern.dtype, pattern.numel.tobytes())
        number = self._storage_pattern_ids.setdefault(key, len(self._storage_patterns))
        if number == len(self._storage_patterns):
            self._storage_patterns.append(pattern)
        groups = [group] * len(names) if isinstance(group, int) else group
        table = self._storages
        found = [table.setdefault(pair, len(table)) for pair in zip(names, groups, strict=True)]
        self._storage_pattern += [number] * (len(table) - len(self._storage_pattern))
        return np.array(found, dtype=np.int64)

    def add(
        self,
        names: Sequence[str] | Ints,
        pattern: Pattern,
        group: int | Ints,
        storage: Ints,
        base: Ints | int = 0,
    ) -> None:
        """Lay tensors out by ``pattern`` over ``group`` (one for all, or one each), each in its storage from its base
        on.

        ``names``: names, or indices into the names that the builder was made with.
        """
        number = self._pattern_ids.setdefault(id(pattern), len(self._patterns))
        if number == len(self._patterns):
            self._patterns.append(pattern)
        tensors = names if isinstance(names, np.ndarray) else self._indices(names)
        block = np.empty((len(tensors), 5), dtype=np.int64)
        block[:, 0], block[:, 1], block[:, 2], block[:, 3], block[:, 4] = tensors, number, group, storage, base
        self._blocks.append(block)

    def _indices(self, names: Sequence[str]) -> Ints:
        known, own = self._known, self._tensors
        found = []
        for name in names:
            at = known.find(name) if len(known) else -1
            found.append(at if at >= 0 else len(known) + own.setdefault(name, len(own)))
        return np.array(found, dtype=np.int64)

    def build(self) -> Side:
        """The finished side."""
        instances = np.concatenate(self._blocks) if self._blocks else np.empty((0, 5), dtype=np.int64)
        keys, nodes, domains = zip(*self._ranks, strict=True)
        tensors = Names.from_strings([*self._known, *self._tensors]) if self._tensors else self._known
        return Side(
            keys, nodes, domains, tuple(self._groups), tuple(self._patterns), tensors,
            tuple(name for name, _ in self._storages), tuple(self._storage_patterns),
            np.array(self._storage_pattern, dtype=np.int64),
            np.array([group for _, group in self._storages], dtype=np.int64), instances, dict(self.tied),
            tuple(self.keep), self.keeps,
        )  # fmt: skip
