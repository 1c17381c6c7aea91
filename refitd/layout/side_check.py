"""What must hold over a factored side, found by pattern: the same rules as `check_side`, without a loop over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from refitd.errors import InputError, LayoutError
from refitd.layout.box import Ints, missing
from refitd.layout.check import last_addresses
from refitd.layout.names import Names
from refitd.layout.side import Pattern, Side

_LIMIT = 100  # missing tensors named in one error


def check(side: Side, names: Names | None = None) -> None:
    """Raise LayoutError with every violation.

    All ranks agree on the shape and dtype of a tensor, every element of every tensor that has an instance has a holder,
    views lie inside boxes and storages, and with ``names`` (a catalogue's) each of them is held or tied.
    """
    bad = [*_facts(side), *_views(side)] or list(_uncovered(side))
    if names is not None:
        bad += _absent(side, names)
    if bad:
        raise LayoutError(bad)


def _pairs(side: Side) -> Ints:
    """Distinct (tensor, pattern), by tensor, those of ``bare`` included."""
    return _distinct(np.concatenate([side.instances[:, :2], side.bare[:, :2]]), len(side.patterns))


def _distinct(pairs: Ints, patterns: int) -> Ints:
    code = np.unique(pairs[:, 0] * max(1, patterns) + pairs[:, 1])
    return np.stack(np.divmod(code, max(1, patterns)), axis=1)


def _facts(side: Side) -> Iterator[InputError]:
    facts: dict[tuple[tuple[int, ...], str], int] = {}
    fact = np.array([facts.setdefault((p.shape, p.dtype), len(facts)) for p in side.patterns], dtype=np.int64)
    pairs = _pairs(side)
    same = pairs[1:, 0] == pairs[:-1, 0]
    for i in np.flatnonzero(same & (fact[pairs[1:, 1]] != fact[pairs[:-1, 1]])).tolist():
        one, other = (side.patterns[n] for n in pairs[i : i + 2, 1].tolist())
        tensor = int(pairs[i, 0])
        ranks = [_a_rank(side, tensor, n) for n in pairs[i : i + 2, 1].tolist()]
        expected = f"shape {one.shape} dtype {one.dtype} as {ranks[0]} reports"
        got = f"shape {other.shape} dtype {other.dtype} from {ranks[1]}"
        yield InputError(f"tensor {side.tensors[tensor]}", expected, got)


def _a_rank(side: Side, tensor: int, pattern: int) -> str:
    for rows in (side.instances, side.bare):
        found = rows[(rows[:, 0] == tensor) & (rows[:, 1] == pattern)]
        if len(found):
            return side.ranks[side.groups[int(found[0, 2])][0]]
    return "no rank"


def _first_rank(side: Side, tensor: int) -> str:
    """The first rank, in the order of their keys, that knows a tensor."""
    groups = np.concatenate([rows[rows[:, 0] == tensor, 2] for rows in (side.instances, side.bare)])
    return min(side.ranks[rank] for group in np.unique(groups).tolist() for rank in side.groups[group])


def _views(side: Side) -> Iterator[InputError]:
    """Boxes outside their tensor, views outside their storage. One row of a (pattern, group, storage pattern) is
    judged."""
    for number, pattern in enumerate(side.patterns):
        outside = (pattern.boxes[:, 0] < 0) | (pattern.boxes[:, 1] > np.array(pattern.shape, dtype=np.int64))
        if outside.any():
            yield _outside_tensor(side, number, int(outside.any(axis=1).argmax()))
    inst = side.instances
    key = np.stack([inst[:, 1], inst[:, 2], side.storage_pattern[inst[:, 3]], side.storage_group[inst[:, 3]]], axis=1)
    order = np.lexsort((-inst[:, 4], *key.T))
    ordered = key[order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    for row in order[fresh].tolist():
        yield from _outside(side, inst[row])


def _outside_tensor(side: Side, number: int, box: int) -> InputError:
    """The error for a box of a pattern; it names the first tensor and rank that have it."""
    pattern = side.patterns[number]
    lo, hi = (tuple(edge) for edge in pattern.boxes[box].tolist())
    rows = side.instances[side.instances[:, 1] == number]
    slots = pattern.slot[pattern.box == box]
    if not len(rows) or not len(slots):
        return InputError(f"pattern of shape {pattern.shape}", "boxes inside it", f"{lo} to {hi}")
    tensor, _, group, storage, _ = rows[0].tolist()
    rank = side.ranks[side.groups[group][int(slots[0])]]
    field = f"piece of {side.tensors[tensor]} in {side.storages[storage]} of {rank}: box"
    return InputError(field, f"inside shape {pattern.shape}", f"{lo} to {hi}")


def _outside(side: Side, row: Ints) -> Iterator[InputError]:
    tensor, number, group, storage, base = row.tolist()
    pattern, members = side.patterns[number], side.groups[group]
    own = {rank: slot for slot, rank in enumerate(side.groups[int(side.storage_group[storage])])}
    stored = side.storage_patterns[int(side.storage_pattern[storage])]
    numel = np.array([int(stored.numel[own[rank]]) if rank in own else -1 for rank in members], dtype=np.int64)
    field = f"piece of {side.tensors[tensor]} in {side.storages[storage]} of {side.ranks[members[0]]}"
    if pattern.dtype != stored.dtype:
        yield InputError(f"{field}: dtype", f"{pattern.dtype}, the tensor's", f"{stored.dtype}, the storage's")
    last = _last(pattern) + base
    for i in np.flatnonzero(last >= numel[pattern.slot])[:1].tolist():
        rank = side.ranks[members[int(pattern.slot[i])]]
        room = int(numel[pattern.slot[i]])
        field = f"piece of {side.tensors[tensor]} in {side.storages[storage]} of {rank}"
        yield InputError(f"{field}: view", f"inside {room} elements", f"its last element at {int(last[i])}")


def _last(pattern: Pattern) -> Ints:
    lo, hi = pattern.boxes[pattern.box, 0], pattern.boxes[pattern.box, 1]
    return last_addresses(pattern.offset, lo, hi, pattern.strides)


def _uncovered(side: Side) -> Iterator[InputError]:
    pairs = _distinct(side.instances[:, :2], len(side.patterns))
    start = (
        np.flatnonzero(np.append(True, pairs[1:, 0] != pairs[:-1, 0])) if len(pairs) else np.empty(0, dtype=np.int64)
    )
    ends = np.append(start[1:], len(pairs))
    seen: dict[tuple[int, ...], object] = {}
    single = ends - start == 1
    for pattern in np.unique(pairs[start[single], 1]).tolist():
        seen[(pattern,)] = _gap([side.patterns[pattern]])
    bad = np.array([seen.get((i,)) is not None for i in range(len(side.patterns))], dtype=bool)
    suspects = ~single
    suspects[single] = bad[pairs[start[single], 1]]
    for i in np.flatnonzero(suspects).tolist():
        numbers = tuple(pairs[start[i] : ends[i], 1].tolist())
        if numbers not in seen:
            seen[numbers] = _gap([side.patterns[n] for n in numbers])
        if seen[numbers] is not None:
            shape = side.patterns[numbers[0]].shape
            tensor = int(pairs[start[i], 0])
            expected = f"a holder for every element of shape {shape} as {_first_rank(side, tensor)} reports"
            yield InputError(f"tensor {side.tensors[tensor]}", expected, f"none for {seen[numbers]}")


def _gap(patterns: list[Pattern]) -> object:
    shape = patterns[0].shape
    if 0 in shape:
        return None
    boxes = np.concatenate([pattern.boxes[np.unique(pattern.box)] for pattern in patterns])
    if not shape:
        return None if len(boxes) else "its only element"
    return missing(shape, boxes[:, 0], boxes[:, 1])


def _absent(side: Side, names: Names) -> list[InputError]:
    """Tensors of a catalogue that nobody has: a list of names that was gathered over too few ranks shows here."""
    held = np.zeros(len(side.tensors), dtype=bool)
    held[side.instances[:, 0]] = True
    at = side.tensors.where(names)
    known = (at >= 0) & held[np.maximum(at, 0)]
    lost = [name for name in names.take(np.flatnonzero(~known)) if name not in side.tied]
    more = f" (and {len(lost) - _LIMIT} more)" if len(lost) > _LIMIT else ""
    return [InputError(f"tensor {name}", "a rank that holds it", f"none{more}") for name in lost[:_LIMIT]]
