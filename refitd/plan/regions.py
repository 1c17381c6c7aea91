"""Cut each tensor into regions with one set of holders and needers, and regions into chunks that can be shared out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.errors import PlanError
from refitd.layout.box import Bools, Ints, coarsen, grid
from refitd.layout.dtypes import ITEMSIZE
from refitd.plan.cells import GRID, Tangled, corners, grid_size, joined, sweep
from refitd.plan.ranksets import ragged
from refitd.plan.tables import MEMBER, SOURCE, Table

ENTER, NEAR, LANDED = 0, 1, 2  # over the network, from a source in the node, from what landed in the node
MIN_CHUNK = 64 * 1024  # bytes; less is not worth a share of its own


class Flow(NamedTuple):
    """Rows (relative to the group's first) that hold a region and that need it, inside one node and dtype."""

    kind: int
    holders: tuple[int, ...]
    needers: tuple[int, ...]


class Regions(NamedTuple):
    """Chunks ``lo``, ``hi`` (K, D), each of ``flows[flow[k]]`` and ``nbytes`` in the destination's dtype."""

    flows: tuple[Flow, ...]
    flow: Ints
    lo: Ints
    hi: Ints
    nbytes: Ints
    network_min: int


def make_regions(table: Table, rows: slice, held: list[Ints], places: Ints, bucket_bytes: int) -> Regions:
    """Regions of one group. ``held``: a (n, 2, D) array for each row of the slice; ``places``: see `places_of`.

    Raises PlanError where a needed region has no holder, and where boxes cut each other into more parts than are
    planned (`Tangled`).
    """
    rank = table.rank[rows]
    lo = np.concatenate([table.lo[rows], *(h[:, 0] for h in held)])
    hi = np.concatenate([table.hi[rows], *(h[:, 1] for h in held)])
    roles = _Roles(table.roles[rank], np.repeat(np.arange(len(rank)), [len(boxes) for boxes in held]))
    facts = _Rows(
        roles.role.tolist(), places[rank].tolist(), (places[rank] * len(table.dtypes) + table.dtype[rows]).tolist()
    )
    try:
        cut = _by_grid(lo, hi, roles, facts) if grid_size(lo, hi) <= GRID else _by_sweep(lo, hi, roles, facts)
    except Tangled as error:
        group = int(np.searchsorted(table.start, rows.start, side="right")) - 1
        raise error.of(tensor=f"tensor {table.groups[group]}") from None
    return _chunks(cut, table, rows, bucket_bytes)


class _Cut(NamedTuple):
    """Cells ``lo``, ``hi`` (C, D) in row-major order, with ``flows[label[c]]`` each."""

    lo: Ints
    hi: Ints
    label: Ints
    flows: list[list[Flow]]


class _Roles(NamedTuple):
    """Of each row: its rank's role. Boxes are those of the rows, then what rows hold: ``owner`` has the row of each."""

    role: Ints
    owner: Ints

    def of(self, inside: Bools) -> tuple[Bools, Bools]:
        """Which rows need, and which have, cells that are ``inside`` (C, B) of boxes: (C, R) each."""
        count = len(self.role)
        rows, owned = inside[:, :count], np.zeros((len(inside), count), dtype=bool)
        for box, row in enumerate(self.owner.tolist(), count):
            owned[:, row] |= rows[:, row] & inside[:, box]
        need = rows & ~owned & (self.role == MEMBER)
        have = (rows & (self.role != MEMBER)) | owned
        return need, have & need.any(axis=1, keepdims=True)


def _by_grid(lo: Ints, hi: Ints, roles: _Roles, facts: _Rows) -> _Cut:
    """Cells of the coarsest grid whose cells each have one set of holders and needers."""
    cells = grid(lo, hi)
    kinds = np.concatenate(roles.of(cells.inside), axis=1)
    packed = np.packbits(kinds, axis=1)
    whole = packed.view(np.dtype((np.void, packed.shape[1]))).reshape(-1)  # compared as bytes, not field by field
    _, head, label = np.unique(whole, return_index=True, return_inverse=True)
    cuts, label = coarsen(cells.cuts, label.reshape(-1))
    low, high = corners(cuts)
    need, have = np.split(kinds[head], 2, axis=1)
    return _Cut(low, high, label, [_flows(_members(n), _members(h), facts) for n, h in zip(need, have, strict=True)])


def _by_sweep(lo: Ints, hi: Ints, roles: _Roles, facts: _Rows) -> _Cut:
    """Cells where that grid would be too large: those that are needed, as they are swept, and joined where they have
    the same flows."""
    swept = sweep(lo, hi)
    sets = swept.sets()
    count, block = len(sets.first) - 1, max(GRID // max(len(lo), 1), 1)
    number: dict[tuple[Flow, ...], int] = {}
    kind: list[int] = []
    for start in range(0, count, block):
        first = sets.first[start : start + block + 1]
        inside = np.zeros((len(first) - 1, len(lo)), dtype=bool)
        inside[ragged(first[1:] - first[:-1])[0], sets.box[first[0] : first[-1]]] = True
        for need, have in zip(*roles.of(inside), strict=True):
            flows = tuple(_flows(_members(need), _members(have), facts))
            kind.append(number.setdefault(flows, len(number)) if flows else -1)
    label = np.array(kind, np.int64)[sets.label]
    used = label >= 0
    return _Cut(*joined(swept.lo[used], swept.hi[used], label[used]), [list(flows) for flows in number])


class _Rows(NamedTuple):
    """Of each row: its rank's role, its node, and its node and dtype as one number."""

    role: list[int]
    node: list[int]
    place: list[int]


def _members(mask: Bools) -> list[int]:
    return [int(i) for i in mask.nonzero()[0]]


def _flows(need: list[int], have: list[int], rows: _Rows) -> list[Flow]:
    """The flows of a cell, one for each (node, dtype) that needs it. No holders: nobody has it."""
    sources = [row for row in have if rows.role[row] == SOURCE]
    by_place: dict[int, list[int]] = {}
    for row in need:
        by_place.setdefault(rows.place[row], []).append(row)
    flows = []
    for place, needers in sorted(by_place.items()):
        near = [row for row in sources if rows.node[row] == rows.node[needers[0]]]
        landed = [row for row in have if rows.role[row] != SOURCE and rows.place[row] == place]
        kind, holders = (NEAR, near) if near else (LANDED, landed) if landed else (ENTER, sources)
        flows.append(Flow(kind, tuple(holders), tuple(needers)))
    return flows


def _chunks(cut: _Cut, table: Table, rows: slice, bucket_bytes: int) -> Regions:
    low, high = cut.lo, cut.hi
    boxes = np.stack([low, high], axis=1)
    number: dict[Flow, int] = {}
    parts, flow_of, network_min = [np.zeros((0, 2, low.shape[1]), np.int64)], [], 0
    sizes = [ITEMSIZE[table.dtypes[d]] for d in table.dtype[rows].tolist()]
    volume = (high - low).prod(axis=1).tolist()
    for cell, kind in enumerate(cut.label.tolist()):
        for flow in cut.flows[kind]:
            if not flow.holders:
                raise PlanError(_orphan(table, rows, flow, low[cell], high[cell]))
            itemsize = sizes[flow.needers[0]]
            ways = max(len(flow.holders), len(flow.needers)) if flow.kind == ENTER else len(flow.holders)
            nbytes = volume[cell] * itemsize
            elements = _target(nbytes, ways, bucket_bytes) // itemsize
            whole = boxes[cell : cell + 1]
            parts.append(whole if volume[cell] <= elements else split(low[cell], high[cell], elements))
            flow_of += [number.setdefault(flow, len(number))] * len(parts[-1])
            network_min += nbytes if flow.kind == ENTER else 0
    lo, hi = np.moveaxis(np.concatenate(parts), 1, 0)
    index = np.array(flow_of, np.int64)
    scale = np.array([sizes[flow.needers[0]] for flow in number] or [1], np.int64)
    nbytes = (hi - lo).prod(axis=1) * scale[index]
    return Regions(tuple(number), index, lo, hi, nbytes, network_min)


def _orphan(table: Table, rows: slice, flow: Flow, lo: Ints, hi: Ints) -> str:
    row = rows.start + flow.needers[0]
    name, key = table.names[int(table.name[row])], table.ranks[int(table.rank[row])].key
    return f"tensor {name}: no source holds {lo.tolist()} to {hi.tolist()}, which {key} needs"


def _target(nbytes: int, ways: int, bucket_bytes: int) -> int:
    return min(max(-(-nbytes // ways), MIN_CHUNK), bucket_bytes)


def split(lo: Ints, hi: Ints, elements: int) -> Ints:
    """Row ranges (n, 2, D) of a box with at most ``elements`` each (at least one element), in row-major order."""
    shape = (hi - lo).tolist()
    inner = int(np.prod(shape))
    if inner <= max(elements, 1):
        return np.stack([lo, hi])[None]
    axis = next(d for d, size in enumerate(shape) if size > 1)
    inner //= shape[axis]
    parts = -(-shape[axis] // max(elements // inner, 1))
    edges = lo[axis] + np.arange(parts + 1) * shape[axis] // parts
    boxes = np.repeat(np.stack([lo, hi])[None], parts, axis=0)
    boxes[:, 0, axis], boxes[:, 1, axis] = edges[:-1], edges[1:]
    if inner <= elements:
        return boxes
    return np.concatenate([split(box[0], box[1], elements) for box in boxes])


def places_of(table: Table) -> Ints:
    """The index of each rank's (domain, node), (ranks,)."""
    pairs = [(rank.domain, rank.node) for rank in table.ranks]
    index = {pair: i for i, pair in enumerate(sorted(set(pairs)))}
    return np.array([index[pair] for pair in pairs], np.int64)
