"""One tensor, each side cut along one axis without copies: no choice is left, and all sums are products along the axes.

Row shards to column shards of 256 ranks each overlap in 65,536 boxes. None of them is made before a program is asked
for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.layout.dtypes import ITEMSIZE, cast_allowed
from refitd.layout.side import Pattern, Side
from refitd.plan.canon import Ranks, number_ranks
from refitd.plan.content import side_digest
from refitd.plan.cost import Bounds
from refitd.plan.loads import Loads
from refitd.plan.side_plan import Core, SidePlan
from refitd.plan.topology import Topology


class _Cut(NamedTuple):
    """Shares along ``axis``: ``edges`` (n + 1,), the i-th is that of rank ``rank[i]``."""

    axis: int
    edges: Ints
    rank: Ints


class Axes(NamedTuple):
    """A tensor of ``shape`` cut on both sides; ``itemsize`` is the destination's."""

    ranks: Ranks
    shape: tuple[int, ...]
    itemsize: int
    source: _Cut
    destination: _Cut
    digest: str


def by_axes(source: Side, destination: Side) -> Axes | None:
    """The two cuts, proven to cover the tensor once on each side, with views inside their storages; None where the
    sides are anything else."""
    if not (len(source.instances) == len(destination.instances) == 1) or source.tied or destination.tied:
        return None
    if (
        destination.keep
        or destination.keeps
        or len(destination.storages) > 1
        or source.tensors[0] != destination.tensors[0]
    ):
        return None
    patterns = [side.patterns[int(side.instances[0, 1])] for side in (source, destination)]
    if patterns[0].shape != patterns[1].shape or not cast_allowed(patterns[0].dtype, patterns[1].dtype):
        return None
    if patterns[0].dtype not in ITEMSIZE:
        return None
    if int(source.instances[0, 0]) or int(destination.instances[0, 0]) or 0 in patterns[0].shape:
        return None
    ranks = number_ranks(source, destination)
    if len(ranks.keys) < len(source.ranks) + len(destination.ranks):  # a rank on both sides
        return None
    cuts = _cut(source, patterns[0], ranks.source), _cut(destination, patterns[1], ranks.destination)
    if cuts[0] is None or cuts[1] is None:
        return None
    digest = hashlib.blake2b(b"axes" + side_digest(source, destination, ranks), digest_size=16).hexdigest()
    return Axes(ranks, patterns[0].shape, ITEMSIZE[patterns[1].dtype], cuts[0], cuts[1], digest)


def _cut(side: Side, pattern: Pattern, numbers: Ints) -> _Cut | None:
    if len(pattern.slot) != pattern.slots or not pattern.shape or len(pattern.boxes) != pattern.slots:
        return None
    boxes = pattern.boxes[pattern.box]
    whole = np.array(pattern.shape, np.int64)
    cut = np.flatnonzero(((boxes[:, 0] != 0) | (boxes[:, 1] != whole)).any(axis=0))
    if len(cut) > 1 or (np.sort(pattern.slot) != np.arange(pattern.slots)).any():
        return None
    axis = int(cut[0]) if len(cut) else 0
    order = np.argsort(boxes[:, 0, axis])
    low, high = boxes[order, 0, axis], boxes[order, 1, axis]
    if low[0] != 0 or high[-1] != whole[axis] or (low[1:] != high[:-1]).any() or (low >= high).any():
        return None
    if not _dense(side, pattern, boxes):
        return None
    group = np.array(side.groups[int(side.instances[0, 2])], np.int64)
    return _Cut(axis, np.append(low, high[-1]), numbers[group[pattern.slot[order]]])


def _dense(side: Side, pattern: Pattern, boxes: Ints) -> bool:
    """Whether every view is one run inside its storage, so that its elements have an address each."""
    _, _, group, storage, base = side.instances[0].tolist()
    if int(side.storage_group[storage]) != group:
        return False
    extent = boxes[:, 1] - boxes[:, 0]
    step = np.ones(len(extent), np.int64)
    for d in range(extent.shape[1] - 1, -1, -1):
        if ((pattern.strides[:, d] != step) & (extent[:, d] > 1)).any():
            return False
        step = step * extent[:, d]
    numel = side.storage_patterns[int(side.storage_pattern[storage])].numel[pattern.slot]
    return bool(((pattern.offset + base >= 0) & (pattern.offset + base + step <= numel)).all())


class AxesPlan(SidePlan):
    """A `SidePlan` of `Axes`: totals and loads come from the axes; programs from the general plan, made when asked
    for."""

    def __init__(self, axes: Axes, topology: Topology, bucket_bytes: int, core: Callable[[], Core]) -> None:
        super().__init__(axes.digest, topology, bucket_bytes, core)
        self._axes = axes
        self.loads  # noqa: B018  (a plan is proven and priced when it is made)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Keys of all ranks of both sides."""
        return self._axes.ranks.keys

    @cached_property
    def loads(self) -> Loads:
        """Bytes of every rank by class of link."""
        return axes_loads(self._axes)

    @cached_property
    def bounds(self) -> Bounds:
        """Every byte has one holder and one needer, so what each moves is the least that it can."""
        egress, ingress = int(self.loads.egress.max(initial=0)), int(self.loads.ingress.max(initial=0))
        senders = int(((self.loads.egress > 0) | (self.loads.ingress > 0)).sum())
        mean = -(-int(self.loads.ingress.sum()) // max(senders, 1))
        return Bounds(max(egress, ingress, mean), ingress, egress)

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """As `SidePlan.totals`."""
        loads = self.loads
        network = int(loads.ingress.sum())
        moved = network + loads.peer + loads.fabric + loads.local
        return {
            "network_bytes": network, "network_bytes_min": network, "relay_bytes": 0, "peer_bytes": loads.peer,
            "fabric_bytes": loads.fabric, "local_bytes": loads.local, "remaining_bytes": moved,
            "unrecoverable_bytes": 0,
        }  # fmt: skip


def axes_loads(axes: Axes) -> Loads:
    """What every rank moves: for each source, its share of the axis times what lies elsewhere, and the other way
    round."""
    count = len(axes.ranks.keys)
    one_axis = axes.source.axis == axes.destination.axis
    far, near, same = _along(axes) if one_axis else _across(axes)
    egress, ingress, out, into = (np.zeros(count, np.int64) for _ in range(4))
    sent, received = np.zeros(count, np.int64), np.zeros(count, np.int64)
    source, destination = axes.source.rank, axes.destination.rank
    egress[source], ingress[destination] = far.out, far.into
    out[source], into[destination] = near.out, near.into
    sent[source], received[destination] = far.sends, far.receives
    peer = int(same.out.sum())
    return Loads(egress, ingress, out, into, sent, received, 0, peer, int(near.out.sum()) - peer, 0)


class _Sums(NamedTuple):
    """By source and by destination: bytes, and how many ranks of the other side they go to or come from."""

    out: Ints
    into: Ints
    sends: Ints
    receives: Ints


def _across(axes: Axes) -> tuple[_Sums, _Sums, _Sums]:
    """Different axes: every source meets every destination. (other domains, own domain, own node)"""
    source, destination, ranks = axes.source, axes.destination, axes.ranks
    rows, cols = np.diff(source.edges), np.diff(destination.edges)
    rest = axes.itemsize
    for d, size in enumerate(axes.shape):
        rest *= 1 if d in (source.axis, destination.axis) else size
    sums = []
    for place, names in ((ranks.domain, ranks.domains), (ranks.node, ranks.nodes)):
        here, there = place[source.rank], place[destination.rank]
        by_here, by_there = (np.zeros(len(names), np.int64) for _ in range(2))
        np.add.at(by_here, here, rows)
        np.add.at(by_there, there, cols)
        counts = np.bincount(here, minlength=len(names)), np.bincount(there, minlength=len(names))
        sums.append(
            _Sums(rows * by_there[here] * rest, cols * by_here[there] * rest, counts[1][here], counts[0][there])
        )
    near, same = sums
    far = _Sums(
        rows * int(cols.sum()) * rest - near.out, cols * int(rows.sum()) * rest - near.into,
        len(cols) - near.sends, len(rows) - near.receives,
    )  # fmt: skip
    return far, near, same


def _along(axes: Axes) -> tuple[_Sums, _Sums, _Sums]:
    """One axis: the shares meet in as many runs as there are edges. (other domains, own domain, own node)"""
    source, destination, ranks = axes.source, axes.destination, axes.ranks
    edges = np.union1d(source.edges, destination.edges)
    i = np.searchsorted(source.edges, edges[:-1], side="right") - 1
    j = np.searchsorted(destination.edges, edges[:-1], side="right") - 1
    rest = axes.itemsize
    for d, size in enumerate(axes.shape):
        rest *= 1 if d == source.axis else size
    nbytes = np.diff(edges) * rest
    here, there = source.rank[i], destination.rank[j]
    near = ranks.domain[here] == ranks.domain[there]
    same = ranks.node[here] == ranks.node[there]
    return tuple(_sums(i[at], j[at], nbytes[at], axes) for at in (~near, near, same))  # type: ignore[return-value]


def _sums(i: Ints, j: Ints, nbytes: Ints, axes: Axes) -> _Sums:
    counts = len(axes.source.rank), len(axes.destination.rank)
    out, into = np.zeros(counts[0], np.int64), np.zeros(counts[1], np.int64)
    np.add.at(out, i, nbytes)
    np.add.at(into, j, nbytes)
    return _Sums(out, into, np.bincount(i, minlength=counts[0]), np.bincount(j, minlength=counts[1]))
