"""From a factored `Side` to the layout of one rank."""

from __future__ import annotations

import numpy as np

from refitd.errors import InputError, LayoutError
from refitd.layout import columns
from refitd.layout.box import Ints
from refitd.layout.layout import Fact, Layout, Storage
from refitd.layout.side import Pattern, Side


def layout_of(side: Side, key: str) -> Layout:
    """The layout of rank ``key``. Raises InputError on an unknown rank, LayoutError on contradictions."""
    rank = side.rank_index(key)
    slot_of = _slots(side, rank)
    slot = slot_of[side.instances[:, 2]]
    held = np.concatenate([side.instances, slot[:, None]], axis=1)[slot >= 0]
    facts, bad = _facts(side, key, held[:, :2], side.bare[slot_of[side.bare[:, 2]] >= 0][:, :2])
    storages, more = _storages(side, key, slot_of)
    if bad or more:
        raise LayoutError([*bad, *more])
    rows = _rows(side, held)
    known = np.array(list(facts), dtype=np.int64)
    names = side.tensors.take(known)
    tensors = dict(zip(names, facts.values(), strict=True))
    numbered = rows._replace(
        tensor=_renumber(names)[np.searchsorted(known, rows.tensor)],
        storage=_storage_numbers(side, rows.storage, storages),
    )
    tied = _tied(side, rank, tensors, rows)
    return Layout(columns.parts(tensors, storages, numbered, side.keep_of(rank), tied))


def _slots(side: Side, rank: int) -> Ints:
    """The slot of a rank in each group, -1 where it is in none."""
    group, slot, member = side.members
    slots = np.full(len(side.groups), -1, dtype=np.int64)
    at = member == rank
    slots[group[at]] = slot[at]
    return slots


def _facts(side: Side, key: str, held: Ints, bare: Ints) -> tuple[dict[int, Fact], list[InputError]]:
    """Tensor number, ascending -> fact, for every tensor that the rank knows; and tensors with two facts."""
    bad: list[InputError] = []
    known = np.concatenate([held, bare])
    pairs = np.unique(known[:, 0] * max(1, len(side.patterns)) + known[:, 1])
    by_pattern = [(pattern.shape, pattern.dtype) for pattern in side.patterns]
    facts: dict[int, Fact] = {}
    for pair in pairs.tolist():
        tensor, pattern = divmod(pair, len(by_pattern))
        first = facts.setdefault(tensor, by_pattern[pattern])
        if first != by_pattern[pattern]:
            got = f"shape {by_pattern[pattern][0]} dtype {by_pattern[pattern][1]} too"
            field = f"tensor {side.tensors[tensor]} of {key}"
            bad.append(InputError(field, f"one fact: shape {first[0]} dtype {first[1]}", got))
    return facts, bad


def _storages(side: Side, key: str, slot_of: Ints) -> tuple[dict[str, Storage], list[InputError]]:
    bad: list[InputError] = []
    found: dict[str, Storage] = {}
    slots = slot_of[side.storage_group]
    for i in np.flatnonzero(slots >= 0).tolist():
        pattern = side.storage_patterns[side.storage_pattern[i]]
        value = (int(pattern.numel[slots[i]]), pattern.dtype)
        first = found.setdefault(side.storages[i], value)
        if first != value:
            field = f"storage {side.storages[i]} of {key}"
            bad.append(InputError(field, f"one storage: {first[0]} of {first[1]}", f"{value[0]} of {value[1]} too"))
    return found, bad


def _rows(side: Side, held: Ints) -> columns.Rows:
    """All pieces of the rank; tensors and storages by the side's numbers."""
    dims = max([1, *(len(pattern.shape) for pattern in side.patterns)])
    blocks = [_expand(side.patterns[number], held[held[:, 1] == number], dims) for number in np.unique(held[:, 1])]
    return columns.Rows(*(np.concatenate(column) for column in zip(_empty(dims), *blocks, strict=True)))


def _empty(dims: int) -> columns.Rows:
    none = np.empty(0, dtype=np.int64)
    return columns.Rows(none, none, none, *(np.empty((0, dims), dtype=np.int64) for _ in range(3)))


def _expand(pattern: Pattern, instances: Ints, dims: int) -> columns.Rows:
    order = np.argsort(pattern.slot, kind="stable")
    count = np.bincount(pattern.slot, minlength=pattern.slots)
    start = np.cumsum(count) - count
    slot = instances[:, 5]
    each = np.repeat(np.arange(len(slot)), count[slot])
    within = np.arange(len(each)) - np.repeat(np.cumsum(count[slot]) - count[slot], count[slot])
    piece = order[start[slot][each] + within]
    lo, hi, strides = (np.full((len(each), dims), fill, dtype=np.int64) for fill in (0, 1, 0))
    own = len(pattern.shape)
    lo[:, :own], hi[:, :own] = pattern.boxes[pattern.box[piece], 0], pattern.boxes[pattern.box[piece], 1]
    strides[:, :own] = pattern.strides[piece]
    return columns.Rows(
        instances[each, 0], instances[each, 3], instances[each, 4] + pattern.offset[piece], lo, hi, strides
    )


def _renumber(names: list[str]) -> Ints:
    """For each name its place in sorted order."""
    order = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(names), dtype=np.int64)
    place[order] = np.arange(len(names))
    return place


def _storage_numbers(side: Side, numbers: Ints, storages: dict[str, Storage]) -> Ints:
    place = {name: i for i, name in enumerate(sorted(storages))}
    used, inverse = np.unique(numbers, return_inverse=True)
    return np.array([place[side.storages[i]] for i in used.tolist()], dtype=np.int64)[inverse]


def _tied(side: Side, rank: int, tensors: dict[str, Fact], rows: columns.Rows) -> dict[str, str]:
    """The side's aliases that hold on this rank."""
    held = set(rows.tensor.tolist())

    def applies(alias: str, name: str) -> bool:
        if alias in side.tied_on:
            return rank in side.tied_on[alias]
        return name in tensors and side.tensors.find(alias) not in held

    return {alias: name for alias, name in side.tied.items() if applies(alias, name)}
