"""Prove that views stay inside their storages, and that no two of a destination rank share an address.

Ranks whose views are alike are looked at once: a storage of one rank stands for those of all ranks that have the same
patterns at slots of equal geometry.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Bools, Box, Ints, overlaps_itself, view_dims, views_overlap
from refitd.layout.codec import MAX_INT
from refitd.layout.side import Pattern, Side
from refitd.plan.forms import unique_rows
from refitd.plan.ranksets import distinct, ends, ragged, stable_order


class _Kind(NamedTuple):
    """Pieces of a pattern, by slot, and which slots are alike: ``label`` (slots,), -1 where a slot has nothing."""

    label: Ints
    first: Ints
    offset: Ints
    last: Ints
    dense: Bools
    boxes: Ints
    strides: Ints
    lowest: int
    highest: int


def prove_views(side: Side, rows: Ints, apart: bool) -> None:
    """Raise ProofError unless the views of instances ``rows`` are inside their storages and, where asked, apart."""
    table = side.instances[rows]
    if not len(table):
        return
    kinds = {p: _kind(side.patterns[p]) for p in distinct(table[:, 1]).tolist()}
    _prove_inside(side, table, kinds)
    if apart:
        _prove_apart(side, table, kinds)


def _prove_inside(side: Side, table: Ints, kinds: dict[int, _Kind]) -> None:
    """The lowest and the highest base of instances that differ in nothing else stand for all of them."""
    kind, group = side.storage_pattern[table[:, 3]], side.storage_group[table[:, 3]]
    code = ((table[:, 1] * len(side.groups) + table[:, 2]) * len(side.storage_patterns) + kind) * len(
        side.groups
    ) + group
    order = stable_order(code)
    starts = np.flatnonzero(np.append(True, code[order[1:]] != code[order[:-1]])[: len(code)])
    base = table[order, 4]
    lows, highs = np.minimum.reduceat(base, starts), np.maximum.reduceat(base, starts)
    least = [int(pattern.numel.min(initial=MAX_INT)) for pattern in side.storage_patterns]
    places = _Places(side)
    for at, low, high in zip(order[starts].tolist(), lows.tolist(), highs.tolist(), strict=True):
        tensor, pattern, number, storage, _ = table[at].tolist()
        kept = places.of(storage, number)
        if low + kinds[pattern].lowest < 0 or high + kinds[pattern].highest >= least[int(kind[at])]:
            room = side.storage_patterns[int(kind[at])].numel[kept]
            _require_inside(side, (tensor, number, storage), kinds[pattern], (low, high), room)


def _require_inside(side: Side, names: tuple[int, int, int], kind: _Kind, bases: tuple[int, int], room: Ints) -> None:
    """Piece by piece, in storages that hold ``room`` elements, by slot. ``names``: tensor, group and storage."""
    slots = np.repeat(np.arange(len(room)), np.diff(kind.first))
    outside = np.flatnonzero((kind.offset + bases[0] < 0) | (kind.last + bases[1] >= room[slots]))
    if len(outside):
        first, (tensor, number, storage) = int(outside[0]), names
        rank = side.ranks[side.groups[number][int(slots[first])]]
        where = f"tensor {side.tensors[tensor]} or one like it leaves storage {side.storages[storage]} of {rank}"
        reach = f"{int(kind.offset[first] + bases[0])} to {int(kind.last[first] + bases[1])}"
        raise ProofError(f"{where}: elements {reach} of {int(room[slots[first]])}")


class _Places:
    """`_slots`, worked out once for each pair of groups."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._known: dict[tuple[int, int], Ints] = {}

    def of(self, storage: int, group: int) -> Ints:
        key = int(self._side.storage_group[storage]), group
        if key not in self._known:
            self._known[key] = _slots(self._side, storage, group)
        return self._known[key]


def _slots(side: Side, storage: int, group: int) -> Ints:
    """The slots of the storage's group at which the ranks of ``group`` are."""
    mine, whole = side.groups[group], side.groups[int(side.storage_group[storage])]
    if mine == whole:
        return np.arange(len(mine))
    slot_of = {rank: slot for slot, rank in enumerate(whole)}
    for rank in mine:
        if rank not in slot_of:
            raise ProofError(f"{side.ranks[rank]} has no storage {side.storages[storage]}")
    return np.array([slot_of[rank] for rank in mine], np.int64)


def _prove_apart(side: Side, table: Ints, kinds: dict[int, _Kind]) -> None:
    """Storages whose instances lie alike are looked at once."""
    order = stable_order(table[:, 4])
    table = table[order[stable_order(table[order, 3])]]
    first = np.flatnonzero(np.append(True, table[1:, 3] != table[:-1, 3])[: len(table)])
    stops = np.append(first[1:], len(table))
    relative = table[:, 4] - np.repeat(table[first, 4], stops - first)
    code = np.stack([table[:, 1], table[:, 2], relative], axis=1)
    seen: set[tuple[bytes, int]] = set()
    for start, stop in zip(first.tolist(), stops.tolist(), strict=True):
        storage = int(table[start, 3])
        key = (code[start:stop].tobytes(), int(side.storage_group[storage]))
        if key not in seen:
            seen.add(key)
            _prove_storage(side, storage, code[start:stop], kinds)


def _kind(pattern: Pattern) -> _Kind:
    order = np.argsort(pattern.slot, kind="stable")
    boxes, strides, offset = pattern.boxes[pattern.box[order]], pattern.strides[order], pattern.offset[order]
    extent = boxes[:, 1] - boxes[:, 0]
    real = (extent > 0).all(axis=1)
    order, boxes, strides, offset, extent = order[real], boxes[real], strides[real], offset[real], extent[real]
    last = offset + ((extent - 1) * strides).sum(axis=1)
    count = np.bincount(pattern.slot[order], minlength=pattern.slots)
    first = ends(count)
    facts = np.concatenate([offset[:, None], extent, strides], axis=1)
    width = int(count.max(initial=0))
    table = np.full((pattern.slots, 1 + width * facts.shape[1]), -1, np.int64)
    table[:, 0] = count
    slot, place = ragged(count)
    columns = 1 + place[:, None] * facts.shape[1] + np.arange(facts.shape[1])
    table[slot[:, None], columns] = facts
    label = unique_rows(table)[1]
    label[count == 0] = -1
    dense = last - offset + 1 == extent.prod(axis=1)
    reach = int(offset.min(initial=MAX_INT)), int(last.max(initial=-1))
    return _Kind(label, first, offset, last, dense, boxes, strides, *reach)


def _prove_storage(side: Side, storage: int, code: Ints, kinds: dict[int, _Kind]) -> None:
    group = side.groups[int(side.storage_group[storage])]
    pairs, which = unique_rows(code[:, :2])
    places = np.full((len(group), len(pairs)), -1, np.int64)
    for column, number in enumerate(pairs[:, 1].tolist()):
        places[_slots(side, storage, number), column] = np.arange(len(side.groups[number]))
    labels = [np.where(places[:, c] >= 0, kinds[p].label[places[:, c]], -1) for c, p in enumerate(pairs[:, 0].tolist())]
    _, alike = unique_rows(np.stack(labels, axis=1))
    for rank in np.unique(alike, return_index=True)[1].tolist():
        held = [_Held.of(kinds[p], int(slot)) for p, slot in zip(pairs[:, 0].tolist(), places[rank], strict=True)]
        _require_apart(held, which, code[:, 2], f"storage {side.storages[storage]} of {side.ranks[group[rank]]}")


class _Held(NamedTuple):
    """The pieces of a pattern at one slot."""

    offset: Ints
    last: Ints
    dense: Bools
    boxes: Ints
    strides: Ints

    @classmethod
    def of(cls, kind: _Kind, slot: int) -> _Held:
        at = slice(int(kind.first[slot]), int(kind.first[slot + 1])) if slot >= 0 else slice(0, 0)
        return cls(kind.offset[at], kind.last[at], kind.dense[at], kind.boxes[at], kind.strides[at])


def _require_apart(held: list[_Held], which: Ints, base: Ints, where: str) -> None:
    """Instances have the pieces ``held[which]``, moved by ``base``; none may share an address."""
    counts = np.array([len(part.offset) for part in held], np.int64)
    run, place = ragged(counts[which])
    at = (np.cumsum(counts) - counts)[which[run]] + place
    start = np.concatenate([part.offset for part in held])[at] + base[run]
    last = np.concatenate([part.last for part in held])[at] + base[run]
    order = stable_order(start - int(start.min(initial=0)))
    dense = all(bool(part.dense.all()) for part in held)
    if not dense or (start[order[1:]] <= last[order[:-1]]).any():
        _compare([_moved(held[w], b) for w, b in zip(which.tolist(), base.tolist(), strict=True)], where)


def _moved(part: _Held, base: int) -> _Held:
    return part._replace(offset=part.offset + base, last=part.last + base)


def _compare(views: list[_Held], where: str) -> None:
    """The exact test, for views with gaps: those whose ranges meet are compared one by one."""
    entries = []
    for start, last, _, boxes, strides in views:
        for a, b, (lo, hi), steps in zip(start.tolist(), last.tolist(), boxes.tolist(), strides.tolist(), strict=True):
            box = Box(tuple(lo), tuple(hi))
            if overlaps_itself(box, tuple(steps)):
                raise ProofError(f"{where}: a view overlaps itself")
            entries.append((a, b, view_dims(box, tuple(steps))))
    entries.sort(key=lambda entry: entry[0])
    open_: list[tuple[int, int, list[tuple[int, int]]]] = []
    for entry in entries:
        open_ = [other for other in open_ if other[1] >= entry[0]]
        if any(views_overlap(other[0], other[2], entry[0], entry[2]) for other in open_):
            raise ProofError(f"{where}: two views share an address")
        open_.append(entry)
