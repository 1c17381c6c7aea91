"""Violations inside one rank's layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from refitd.errors import InputError
from refitd.layout.box import (
    VIEW_CALLS,
    Bools,
    Box,
    Budget,
    DigitBoxes,
    Ints,
    Keys,
    Piece,
    digit_boxes,
    in_company,
    merged_dims,
    neighbours,
    view_dims,
    views_overlap,
)
from refitd.layout.dtypes import ITEMSIZE
from refitd.layout.names import Names, template_set

if TYPE_CHECKING:
    from refitd.layout.layout import Layout

_LIMIT = 100  # overlaps named for one storage
_BEYOND = 1 << 62  # an address that no storage has
_SHOWN = 300  # characters of a name in an error: each violation repeats it

# A daemon checks what clients send on its event loop, so that the search for overlaps has an end. Layouts of real
# models, of tens of thousands of pieces, take a small part of it.
STEPS = 1 << 22  # pairs of boxes compared in arrays
CALLS = 1 << 17  # calls of the recursion for views that are compared one by one
MAX_CHAIN = 9  # strides that views of at most 8 dimensions have, and 1
_FEW = 5  # entries that are compared one by one at once: arrays would take longer
_MANY = 256  # boxes that are worth a round over arrays
_ROUND = 128  # what a round over arrays costs in steps, however short they are


def violations(layout: Layout) -> list[InputError]:
    """Everything that is wrong with a layout by itself."""
    return [*_dtypes(layout), *_names(layout), *_tied(layout), *_geometry(layout), *_overlaps(layout)]


def _dtypes(layout: Layout) -> list[InputError]:
    facts = [("tensor", name, dtype) for name, (_, dtype) in layout.tensors.items()]
    facts += [("storage", name, dtype) for name, (_, dtype) in layout.storages.items()]
    return [
        InputError(f"{kind} {_short(name)}: dtype", "a dtype that refitd knows", _short(dtype))
        for kind, name, dtype in facts
        if dtype not in ITEMSIZE
    ]


def _names(layout: Layout) -> list[InputError]:
    """Planning numbers the names of all ranks by their templates, for which a code has so much room."""
    count = len(template_set(layout.tensors)) if len(layout.tensors) > Names.MAX_TEMPLATES else 0
    if count <= Names.MAX_TEMPLATES:
        return []
    expected = f"at most {Names.MAX_TEMPLATES} that differ in more than dotted numbers"
    return [InputError("tensors: names", expected, str(count))]


def _tied(layout: Layout) -> list[InputError]:
    return [
        InputError(
            f"tied {_short(alias)}", f"the shape and dtype of {_short(name)}: {_fact(layout.tensors[name])}",
            _fact(layout.tensors[alias]),
        )
        for alias, name in layout.tied.items()
        if alias in layout.tensors and layout.tensors[alias] != layout.tensors[name]
    ]  # fmt: skip


def _fact(fact: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = fact
    return str((shape, _short(dtype)))


def _short(name: str) -> str:
    """A name as errors show it."""
    return name if len(name) <= _SHOWN else f"{name[:_SHOWN]}… ({len(name)} characters)"


def last_addresses(base: Ints, lo: Ints, hi: Ints, strides: Ints) -> Ints:
    """The last address of each view, for arrays (N,) and (N, D); 2**62 where it is beyond any storage."""
    reach = base + ((hi - lo - 1).astype(np.float64) * strides).sum(axis=1)
    exact = base + ((hi - lo - 1) * strides).sum(axis=1)
    return np.where(reach < 2.0**52, exact, np.int64(_BEYOND))


def _geometry(layout: Layout) -> list[InputError]:
    if not len(layout.instances):
        return []
    tensor, storage, base, lo, hi, strides = layout.columns
    shapes = np.ones((len(layout.tensors), lo.shape[1]), dtype=np.int64)
    for row, (shape, _dtype) in zip(shapes, layout.tensors.values(), strict=True):
        row[: len(shape)] = shape[: lo.shape[1]]
    numel = np.array([count for count, _ in layout.storages.values()], dtype=np.int64)
    outside_tensor: Bools = np.any((hi > shapes[tensor]) | (lo >= hi), axis=1)
    outside_storage: Bools = np.greater_equal(last_addresses(base, lo, hi, strides), numel[storage])
    kinds: dict[str, int] = {}  # numbers: an array of strings would give each the room of the longest
    dtype_of, storage_dtype = (
        np.array([kinds.setdefault(dtype, len(kinds)) for _, dtype in facts], dtype=np.int64)
        for facts in (layout.tensors.values(), layout.storages.values())
    )
    other_dtype: Bools = np.not_equal(dtype_of[tensor], storage_dtype[storage])
    wrong: Ints = np.flatnonzero(outside_tensor | outside_storage | other_dtype)
    pieces = layout.pieces() if len(wrong) else ()
    return [
        error
        for i in wrong.tolist()
        for error in _describe(layout, pieces[i], bool(outside_tensor[i]), bool(outside_storage[i]))
    ]


def _describe(layout: Layout, piece: Piece, outside_tensor: bool, outside_storage: bool) -> list[InputError]:
    field = f"piece of {_short(piece.tensor)} in {_short(piece.storage)}"
    shape, dtype = layout.tensors[piece.tensor]
    numel, storage_dtype = layout.storages[piece.storage]
    bad = []
    if outside_tensor:
        bad.append(InputError(f"{field}: box", f"inside shape {shape}", f"{piece.box.lo} to {piece.box.hi}"))
    if outside_storage:
        view = f"offset {piece.offset}, extents {piece.box.shape}, strides {piece.strides}"
        bad.append(InputError(f"{field}: view", f"inside {numel} elements", view))
    if dtype != storage_dtype:
        bad.append(
            InputError(f"{field}: dtype", f"{_short(dtype)}, the tensor's", f"{_short(storage_dtype)}, the storage's")
        )
    return bad


def _overlaps(layout: Layout) -> list[InputError]:
    entries = _entries(layout)
    if not len(entries.row):
        return []
    search = _Search(layout, entries)
    search.run()
    pieces = layout.pieces() if search.pairs or search.undecided else ()
    row = entries.row.tolist()
    named = sorted((a, b) for b, a in search.pairs)  # by the later of the two, as they come along the storage
    bad = [_overlap(pieces[row[b]], pieces[row[a]]) for a, b in named]
    return bad + [_undecided(pieces[row[first]], count) for first, count in sorted(search.undecided.values())]


class _Entries(NamedTuple):
    """Pieces whose addresses lie between those of others of their storage, along the storages.

    ``row``: in `Layout.instances`; ``storage``, ``cluster``: numbers; ``base`` and ``last``: addresses; ``pattern``.
    All (N,). Only those of one cluster can overlap.
    """

    row: Ints
    storage: Ints
    cluster: Ints
    base: Ints
    last: Ints
    pattern: Ints


def _entries(layout: Layout) -> _Entries:
    _, storage, base, lo, hi, strides = layout.columns
    last = last_addresses(base, lo, hi, strides)
    sound = (lo < hi).all(axis=1) & (last < _BEYOND)  # the others are outside their tensor or storage: said already
    row = np.flatnonzero(sound)
    row = row[in_company(storage[row])]
    cluster = Keys.of(storage[row], base[row], last[row] + 1).clusters()
    together = in_company(cluster)
    row, cluster = row[together], cluster[together]
    order = np.lexsort((row, last[row], base[row], cluster))
    row, cluster = row[order], cluster[order]
    return _Entries(row, storage[row], cluster, base[row], last[row], layout.instances[row, 3])


class _Search:
    """Overlaps of the entries, as ``pairs`` of their numbers; in bounded time.

    Clusters whose strides nest become boxes over the digits of their addresses, and all their boxes are compared at
    once, sorted. Views of other clusters are boxes among those of equal strides, and are compared one by one with the
    others. ``undecided``: by storage, the first entry and the number of those for which the budget did not do.
    """

    def __init__(self, layout: Layout, entries: _Entries) -> None:
        self.entries = entries
        self.pairs: set[tuple[int, int]] = set()
        self.undecided: dict[int, tuple[int, int]] = {}
        self.steps, self.calls = Budget(STEPS), Budget(CALLS)
        self._found = np.zeros(len(layout.storages), dtype=np.int64)
        self._dims = {p: _pattern_dims(layout.patterns[p]) for p in np.unique(entries.pattern).tolist()}
        self._boxes: list[tuple[Ints, DigitBoxes]] = []
        self._labels = int(entries.cluster.max()) + 1

    def run(self) -> None:
        """Fill ``pairs`` and ``undecided``."""
        starts = np.flatnonzero(np.diff(self.entries.cluster, prepend=-1))
        families: dict[tuple[int, ...], list[Ints]] = {}
        for cluster in np.split(np.arange(len(self.entries.row)), starts[1:]):
            families.setdefault(self._chain(cluster), []).append(cluster)
        loose = [cluster for chain, clusters in families.items() for cluster in self._as_boxes(chain, clusters)]
        kinds = [self._kinds(cluster) for cluster in loose]
        self._sweep()
        for groups in kinds:
            self._one_by_one(groups)

    def _chain(self, entries: Ints) -> tuple[int, ...]:
        """Their strides, largest first; the last one is 1."""
        patterns = set(self.entries.pattern[entries].tolist())
        return tuple(sorted({1, *(stride for p in patterns for stride, _ in self._dims[p])}, reverse=True))

    def _as_boxes(self, chain: tuple[int, ...], clusters: list[Ints]) -> list[Ints]:
        """Take the clusters of one chain as boxes; returns those that do not allow it."""
        every = np.concatenate(clusters)
        if len(every) < _FEW or len(chain) > MAX_CHAIN:
            return clusters
        base, sizes = self.entries.base, [len(cluster) for cluster in clusters]
        which = np.repeat(np.arange(len(clusters)), sizes)
        boxes = self._digits(chain, every, np.repeat([int(base[cluster[0]]) for cluster in clusters], sizes))
        spoilt = np.bincount(which[boxes.bad], minlength=len(clusters)) > 0
        kept = boxes.without(spoilt[which])
        self._add(kept, every)
        return [clusters[i] for i in np.flatnonzero(spoilt).tolist()]

    def _digits(self, chain: tuple[int, ...], entries: Ints, origin: Ints | int) -> DigitBoxes:
        patterns, at = np.unique(self.entries.pattern[entries], return_inverse=True)
        place = {stride: i for i, stride in enumerate(chain)}
        extent = np.ones((len(patterns), len(chain)), dtype=np.int64)
        for row, pattern in zip(extent, patterns.tolist(), strict=True):
            for stride, size in self._dims[pattern]:
                row[place[stride]] = size
        return digit_boxes(self.entries.base[entries] - origin, extent[at], np.array(chain, dtype=np.int64))

    def _add(self, boxes: DigitBoxes, entries: Ints, label: int | None = None) -> None:
        owner = entries[boxes.owner]
        label_of = self.entries.cluster[owner] if label is None else np.full(len(owner), label, dtype=np.int64)
        self._boxes.append((label_of, boxes._replace(owner=owner)))

    def _kinds(self, cluster: Ints) -> list[Ints]:
        """Groups of the cluster, smallest first: views of equal strides that have become boxes, and single views."""
        by_strides: dict[tuple[int, ...], list[int]] = {}
        for entry, pattern in zip(cluster.tolist(), self.entries.pattern[cluster].tolist(), strict=True):
            by_strides.setdefault(tuple(stride for stride, _ in self._dims[pattern]), []).append(entry)
        groups: list[Ints] = []
        for strides, members in by_strides.items():
            group = np.array(members, dtype=np.int64)
            if len(group) >= _FEW:
                chain = strides if strides[-1:] == (1,) else (*strides, 1)
                boxes = self._digits(chain, group, int(self.entries.base[group[0]]))
                self._add(boxes, group, self._labels)
                self._labels += 1
                groups += [group[~boxes.bad]] if not boxes.bad.all() else []
                group = group[boxes.bad]
            groups += np.split(group, len(group)) if len(group) else []
        return sorted(groups, key=len)

    def _sweep(self) -> None:
        """Compare all boxes of equal labels, along the axis on which the fewest of theirs meet."""
        if not self._boxes:
            return
        label = np.concatenate([label for label, _ in self._boxes])
        owner = np.concatenate([boxes.owner for _, boxes in self._boxes])
        axes = max(boxes.lo.shape[1] for _, boxes in self._boxes)
        lo, extent = (np.full((len(label), axes), fill, dtype=np.int64) for fill in (0, 1))
        at = 0
        for _, boxes in self._boxes:
            part = slice(at, at := at + len(boxes.owner))
            lo[part, : boxes.lo.shape[1]], extent[part, : boxes.lo.shape[1]] = boxes.lo, boxes.extent
        rows, label = neighbours(label, lo, lo + extent)
        if len(rows):
            self._compare(label, lo[rows], (lo + extent)[rows], owner[rows])

    def _compare(self, label: Ints, lo: Ints, hi: Ints, owner: Ints) -> None:
        axes = [Keys.of(label, lo[:, d], hi[:, d]).followers() for d in range(lo.shape[1])]
        best = np.argmin([np.bincount(label[order], weights=count) for order, count in axes], axis=0)
        storage = self.entries.storage[owner]
        for d, (order, count) in enumerate(axes):
            mine = best[label[order]] == d
            for a, b in self._rounds(storage, order[mine], count[mine]):
                self.steps.left -= len(a) + _ROUND
                if self.steps.left < 0:  # one that is undecided refuses the layout: the others need no look
                    self._give_up(owner[a])
                    break
                self._judge(lo, hi, owner, a, b)

    def _rounds(self, storage: Ints, order: Ints, count: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Each box with the ``count`` that follow it, as pairs: all with their next ones while they are many, then one
        by one. Those of a storage in which enough was found are left out."""
        active, ahead = np.arange(len(order)), 1
        while len(active := active[(count[active] >= ahead) & (self._found[storage[order[active]]] < _LIMIT)]) > _MANY:
            yield order[active], order[active + ahead]
            ahead += 1
        for at, stop in zip(active.tolist(), (active + count[active] + 1).tolist(), strict=True):
            if self._found[storage[order[at]]] < _LIMIT:
                others = order[at + ahead : stop]
                yield np.full(len(others), order[at]), others

    def _judge(self, lo: Ints, hi: Ints, owner: Ints, a: Ints, b: Ints) -> None:
        apart = owner[a] == owner[b]
        for d in range(lo.shape[1]):
            apart |= (lo[a, d] >= hi[b, d]) | (lo[b, d] >= hi[a, d])
        for one, other in zip(owner[a[~apart]].tolist(), owner[b[~apart]].tolist(), strict=True):
            self._report(one, other)

    def _report(self, one: int, other: int) -> None:
        pair, storage = (min(one, other), max(one, other)), int(self.entries.storage[one])
        if self._found[storage] < _LIMIT and pair not in self.pairs:
            self.pairs.add(pair)
            self._found[storage] += 1

    def _give_up(self, entries: Ints) -> None:
        for entry in entries.tolist():
            storage = int(self.entries.storage[entry])
            first, count = self.undecided.get(storage, (entry, 0))
            self.undecided[storage] = min(first, entry), count + 1

    def _one_by_one(self, groups: list[Ints]) -> None:
        """Compare each entry with those of the groups after its own that come near it."""
        every = np.concatenate(groups)
        base, last = self.entries.base[every], self.entries.last[every]
        stops = np.repeat(np.cumsum([len(group) for group in groups]), [len(group) for group in groups]).tolist()
        for at, stop in enumerate(stops):
            if stop == len(every) or self._found[self.entries.storage[every[at]]] >= _LIMIT:
                break
            near = stop + np.flatnonzero((base[stop:] <= last[at]) & (last[stop:] >= base[at]))
            self.calls.left -= len(every) >> 9  # a look at many costs something too
            for other in near.tolist():
                if self.calls.left <= 0:
                    self._give_up(every[at:])
                    return
                if self._clash(int(every[at]), int(every[other])):
                    self._report(int(every[at]), int(every[other]))

    def _clash(self, a: int, b: int) -> bool:
        start, dims = self.entries.base, [self._dims[int(self.entries.pattern[i])] for i in (a, b)]
        budget = Budget(VIEW_CALLS)  # not what is left: whether two views overlap does not depend on the others
        found = views_overlap(int(start[a]), dims[0], int(start[b]), dims[1], budget)
        self.calls.left -= VIEW_CALLS - budget.left
        return found


def _pattern_dims(table: Ints) -> list[tuple[int, int]]:
    lo, hi, strides = (tuple(row) for row in table.tolist())
    return merged_dims(view_dims(Box(lo, hi), strides))


def _undecided(piece: Piece, count: int) -> InputError:
    field = f"storage {_short(piece.storage)}: the piece of {_short(piece.tensor)} at {piece.offset} and others"
    expected = f"views that nest in one another, or few enough to be compared in {STEPS} steps and {CALLS} calls"
    return InputError(field, expected, f"{count} or more that interleave too much to be told apart")


def _overlap(a: Piece, b: Piece) -> InputError:
    field = f"storage {_short(a.storage)}: pieces of {_short(a.tensor)} and {_short(b.tensor)}"
    got = f"{a.box.lo}-{a.box.hi} at {a.offset} and {b.box.lo}-{b.box.hi} at {b.offset}"
    return InputError(field, "no common element unless tied", got)
