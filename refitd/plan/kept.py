"""The instances of a destination that a refit fills: all but those in storages that a rank keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from refitd.errors import InputError, MismatchError
from refitd.layout.box import Bools, Ints
from refitd.layout.side import Pattern, Side
from refitd.plan.ranksets import stable_order


def wanted(side: Side) -> Side:
    """The side without the instances in storages that ``keep`` names (all ranks of a storage keep it, or none).

    Instances of patterns without pieces need nothing and are left out too. Raises MismatchError for storages that
    nothing fills, by the rule of `check_match`.
    """
    filled = np.array([bool(_real(pattern).any()) for pattern in side.patterns], dtype=bool)
    kept = _kept(side)
    used = filled[side.instances[:, 1]] & ~kept[side.instances[:, 3]]
    rows = side.instances[used]
    if bad := list(_unfilled(side, kept, rows)):
        raise MismatchError(bad)
    return replace(side, instances=rows)


def _unfilled(side: Side, kept: Bools, rows: Ints) -> Iterator[InputError]:
    """Storages that nothing fills on a rank and no ``keep`` names.

    One that others fill is good where the rank knows all tensors in it: its part of them is padding.
    """
    code = rows[:, 1] * len(side.groups) + rows[:, 2]
    slots = [np.unique(pattern.slot[_real(pattern)]) for pattern in side.patterns]
    whole = np.array([len(used) == p.slots for used, p in zip(slots, side.patterns, strict=True)], dtype=bool)
    open_ = ~kept
    open_[rows[whole[rows[:, 1]] & (side.storage_group[rows[:, 3]] == rows[:, 2]), 3]] = False
    mine = np.flatnonzero(open_[rows[:, 3]])
    mine = mine[stable_order(rows[mine, 3])]
    numbers = np.flatnonzero(open_)
    first, last = (np.searchsorted(rows[mine, 3], numbers, side=edge).tolist() for edge in ("left", "right"))
    seen: dict[tuple[bytes, int, int], list[int]] = {}
    for number, start, stop in zip(numbers.tolist(), first, last, strict=True):
        found = code[mine[start:stop]]
        key = found.tobytes(), int(side.storage_group[number]), int(side.storage_pattern[number])
        if key not in seen:
            pairs = (divmod(combo, len(side.groups)) for combo in np.unique(found).tolist())
            some = {side.groups[group][slot] for pattern, group in pairs for slot in slots[pattern].tolist()}
            numel = side.storage_patterns[key[2]].numel.tolist()
            seen[key] = [r for r, n in zip(side.groups[key[1]], numel, strict=True) if n and r not in some]
        tensors = rows[mine[start:stop], 0].tolist() if seen[key] else []
        for rank in seen[key]:
            if not tensors or not all(_knows(side, tensor, rank) for tensor in tensors):
                field = f"storage {side.storages[number]} of {side.ranks[rank]}"
                yield InputError(field, "a piece in it, or a keep pattern that names it", "neither")


def _knows(side: Side, tensor: int, rank: int) -> bool:
    """Whether a rank knows a tensor, with or without a piece of it."""
    groups = (table[table[:, 0] == tensor, 2] for table in (side.instances, side.bare))
    return any(rank in side.groups[group] for group in np.concatenate(list(groups)).tolist())


def _real(pattern: Pattern) -> Bools:
    boxes = pattern.boxes[pattern.box]
    real: Bools = np.all(boxes[:, 0] < boxes[:, 1], axis=1)
    return real


def _kept(side: Side) -> Bools:
    """Storages that are kept."""
    if not side.keep and not side.keeps:
        return np.zeros(len(side.storages), dtype=bool)
    keeps = [side.keep_of(side.groups[group][0]) if side.groups[group] else () for group in side.storage_group.tolist()]
    named = zip(side.storages, keeps, strict=True)
    return np.array([any(fnmatchcase(name, pattern) for pattern in keep) for name, keep in named], dtype=bool)
