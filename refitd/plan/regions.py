"""Cut each tensor into regions with one set of holders and needers, and regions into chunks that can be shared out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.errors import PlanError
from refitd.layout.box import Bools, Ints, coarsen, grid
from refitd.layout.dtypes import ITEMSIZE
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

    Raises PlanError where a needed region has no holder.
    """
    role, rank = table.roles[table.rank[rows]], table.rank[rows]
    count = len(rank)
    lo = np.concatenate([table.lo[rows], *(h[:, 0] for h in held)])
    hi = np.concatenate([table.hi[rows], *(h[:, 1] for h in held)])
    cells = grid(lo, hi)
    owned = np.zeros((len(cells.inside), count), dtype=bool)
    at = count
    for row, boxes in enumerate(held):
        owned[:, row] = cells.inside[:, row] & cells.inside[:, at : at + len(boxes)].any(axis=1)
        at += len(boxes)
    inside = cells.inside[:, :count]
    need = inside & ~owned & (role == MEMBER)
    have = (inside & (role != MEMBER)) | owned
    have &= need.any(axis=1, keepdims=True)
    kinds, label = np.unique(np.concatenate([need, have], axis=1), axis=0, return_inverse=True)
    cuts, label = coarsen(cells.cuts, label.reshape(-1))
    facts = _Rows(role.tolist(), places[rank].tolist(), (places[rank] * len(table.dtypes) + table.dtype[rows]).tolist())
    flows = [_flows(_members(kind[:count]), _members(kind[count:]), facts) for kind in kinds]
    return _chunks(cuts, label, flows, table, rows, bucket_bytes)


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


def _chunks(
    cuts: tuple[Ints, ...], label: Ints, flows: list[list[Flow]], table: Table, rows: slice, bucket_bytes: int
) -> Regions:
    low = np.stack([a.ravel() for a in np.meshgrid(*[cut[:-1] for cut in cuts], indexing="ij")], axis=1)
    high = np.stack([a.ravel() for a in np.meshgrid(*[cut[1:] for cut in cuts], indexing="ij")], axis=1)
    boxes = np.stack([low, high], axis=1)
    number: dict[Flow, int] = {}
    parts, flow_of, network_min = [np.zeros((0, 2, low.shape[1]), np.int64)], [], 0
    sizes = [ITEMSIZE[table.dtypes[d]] for d in table.dtype[rows].tolist()]
    volume = (high - low).prod(axis=1).tolist()
    for cell, kind in enumerate(label.tolist()):
        for flow in flows[kind]:
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
