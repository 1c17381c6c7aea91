"""All pieces of all ranks that a plan is about, as columns grouped by the source's tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from refitd.layout import Box, Layout
from refitd.layout.box import Ints
from refitd.layout.sides import facts_of, source_name, wanted
from refitd.plan.held import Held
from refitd.plan.program import StorageRef

SOURCE, NEIGHBOUR, MEMBER = 0, 1, 2


class Rank(NamedTuple):
    """A rank of one side: its key, where it runs, and what it holds."""

    key: str
    node: str
    domain: str
    layout: Layout


class Table(NamedTuple):
    """Pieces of every rank. Row columns are (R,) or (R, D); rows are sorted by ``group``, then rank.

    ``groups``: the tensors of the sources that are needed; ``names``: destination tensor names; ``start`` (G + 1,) the
    first row of each group. ``storage`` indexes ``storages``, ``dtype`` and ``itemsize`` are those of the storage.
    """

    ranks: tuple[Rank, ...]
    roles: Ints
    groups: tuple[str, ...]
    names: tuple[str, ...]
    storages: tuple[StorageRef, ...]
    dtypes: tuple[str, ...]
    start: Ints
    rank: Ints
    storage: Ints
    dtype: Ints
    name: Ints
    base: Ints
    lo: Ints
    hi: Ints
    strides: Ints
    dims: Ints

    def role(self) -> Ints:
        """Role of each row's rank, (R,)."""
        return self.roles[self.rank]


def build_table(sources: Sequence[Rank], neighbours: Sequence[Rank], members: Sequence[Rank]) -> Table:
    """Columns of the pieces that hold or need what ``members`` need. The sides must have passed `check_match`."""
    tagged = [(SOURCE, r) for r in sources] + [(NEIGHBOUR, r) for r in neighbours] + [(MEMBER, r) for r in members]
    tagged.sort(key=lambda item: (item[0], item[1].key))
    names = tuple(sorted({piece.tensor for r in members for piece in wanted(r.layout)}))
    group_of = _group_names(names, sources, members)
    groups = tuple(sorted(set(group_of.values())))
    index = {name: i for i, name in enumerate(groups)}
    blocks, refs, first = [], [], 0
    for position, (role, rank) in enumerate(tagged):
        if role == SOURCE:
            local = [(index[group], -1, rank.layout.canonical(group)) for group in groups]
        else:
            local = [(index[group_of[name]], i, name) for i, name in enumerate(names)]
        blocks.append(_rows(rank.layout, local, position, first, role != SOURCE))
        refs += [StorageRef(rank.key, name, dtype, numel) for name, (numel, dtype) in rank.layout.storages.items()]
        first += len(rank.layout.storages)
    return _assemble(tagged, groups, names, tuple(refs), blocks)


def _group_names(names: Sequence[str], sources: Sequence[Rank], members: Sequence[Rank]) -> dict[str, str]:
    """Destination tensor -> the source tensor whose bytes it gets: one for names that all sources tie together."""
    side = {r.key: r.layout for r in sources}
    wanting = {r.key: r.layout for r in members}
    known = facts_of(side)
    result = {}
    for name in names:
        found = source_name(name, wanting, known) or name
        homes = {lay.canonical(found) for lay in side.values() if found in lay.tensors or found in lay.tied}
        result[name] = homes.pop() if len(homes) == 1 else found
    return result


class _Block(NamedTuple):
    heads: Ints  # (n, 4): group, rank, storage, name
    base: Ints
    boxes: Ints  # (n, 3, D)


def _rows(layout: Layout, local: list[tuple[int, int, str]], rank: int, first: int, writes: bool) -> _Block:
    """Rows of one rank. ``local``: (group, name index, tensor name of this layout)."""
    columns = layout.columns
    order = np.argsort(columns.tensor, kind="stable")
    if writes and layout.kept:
        kept = np.array([name in layout.kept for name in layout.storages], dtype=bool)
        order = order[~kept[columns.storage[order]]]
    bounds = np.searchsorted(columns.tensor[order], np.arange(len(layout.tensors) + 1))
    tensor_index = {name: i for i, name in enumerate(layout.tensors)}
    picked, groups, labels = [], [], []
    for group, label, name in local:
        at = tensor_index.get(name)
        if at is not None and (count := int(bounds[at + 1] - bounds[at])):
            picked.append(order[bounds[at] : bounds[at + 1]])
            groups += [group] * count
            labels += [label] * count
    rows = np.concatenate([*picked, np.zeros(0, np.int64)]).astype(np.int64)
    heads = np.stack([np.array(groups, np.int64), np.full_like(rows, rank), columns.storage[rows] + first,
                      np.array(labels, np.int64)], axis=1)  # fmt: skip
    return _Block(
        heads, columns.base[rows], np.stack([columns.lo[rows], columns.hi[rows], columns.strides[rows]], axis=1)
    )


def _assemble(
    tagged: list[tuple[int, Rank]],
    groups: tuple[str, ...],
    names: tuple[str, ...],
    refs: tuple[StorageRef, ...],
    blocks: list[_Block],
) -> Table:
    dims = max([1, *(block.boxes.shape[2] for block in blocks)])
    boxes = np.concatenate([_pad(block.boxes, dims) for block in blocks])
    heads = np.concatenate([block.heads for block in blocks])
    base = np.concatenate([block.base for block in blocks])
    order = np.argsort(heads[:, 0], kind="stable")
    heads, base, boxes = heads[order], base[order], boxes[order]
    dtypes = tuple(sorted({ref.dtype for ref in refs}))
    dtype_index = {dtype: i for i, dtype in enumerate(dtypes)}
    dtype = np.array([dtype_index[ref.dtype] for ref in refs], np.int64)[heads[:, 2]]
    facts = facts_of({rank.key: rank.layout for role, rank in tagged if role == SOURCE})
    rank_dims = np.array([len(facts[group][1][0]) for group in groups], np.int64)
    return Table(
        ranks=tuple(rank for _, rank in tagged),
        roles=np.array([role for role, _ in tagged], np.int64),
        groups=groups,
        names=names,
        storages=refs,
        dtypes=dtypes,
        start=np.searchsorted(heads[:, 0], np.arange(len(groups) + 1)),
        rank=heads[:, 1],
        storage=heads[:, 2],
        dtype=dtype,
        name=heads[:, 3],
        base=base,
        lo=boxes[:, 0],
        hi=boxes[:, 1],
        strides=boxes[:, 2],
        dims=rank_dims,
    )


def _pad(boxes: Ints, dims: int) -> Ints:
    spare = dims - boxes.shape[2]
    filler = np.broadcast_to(np.array([[0], [1], [0]], np.int64), (len(boxes), 3, spare))
    return np.concatenate([boxes, filler], axis=2)


def held_boxes(table: Table, held: Mapping[str, Held], row: int) -> Ints:
    """lo and hi (n, 2, D) of what the rank of ``row`` holds of that row's tensor."""
    parts: tuple[Box, ...] = ()
    rank = table.ranks[int(table.rank[row])].key
    if rank in held and table.name[row] >= 0:
        parts = held[rank].boxes.get(table.names[int(table.name[row])], ())
    width = table.lo.shape[1]
    rows = [[[*lo, *(0,) * (width - len(lo))], [*hi, *(1,) * (width - len(hi))]] for lo, hi in parts]
    return np.array(rows, np.int64).reshape(len(rows), 2, width)
