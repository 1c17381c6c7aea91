"""Choose for each chunk who sends it, where it enters a node, and who passes it on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.regions import ENTER, LANDED, Flow, Regions
from refitd.plan.tables import Table


class Transfers(NamedTuple):
    """Box ``lo``, ``hi`` (T, D) from piece row ``src`` to ``dst``; ``chunk`` is equal for copies of one region."""

    src: Ints
    dst: Ints
    lo: Ints
    hi: Ints
    stage: Ints
    chunk: Ints


class _Loads:
    """Bytes given to each rank so far, by direction. All integers: every processor chooses alike."""

    def __init__(self, ranks: int) -> None:
        self.egress, self.ingress, self.spread = [0] * ranks, [0] * ranks, [0] * ranks


def route(table: Table, regions: list[Regions]) -> Transfers:
    """Transfers for the regions of every group. Chunks with one holder and needer come first: they leave no choice."""
    loads = _Loads(len(table.ranks))
    rank = table.rank.tolist()
    chosen: list[tuple[int, int, int, int]] = []  # src row, dst row, stage, chunk
    open_chunks: list[tuple[int, int, int, int, Flow]] = []
    first = 0
    for group, region in enumerate(regions):
        start, nbytes = int(table.start[group]), region.nbytes.tolist()
        for k, flow_index in enumerate(region.flow.tolist()):
            flow = region.flows[flow_index]
            if len(flow.holders) == len(flow.needers) == 1:
                src, dst = start + flow.holders[0], start + flow.needers[0]
                chosen.append((src, dst, int(flow.kind == LANDED), first + k))
                _count(loads, flow.kind, rank[src], rank[dst], nbytes[k])
            else:
                open_chunks.append((len(flow.holders), first + k, start, nbytes[k], flow))
        first += len(region.flow)
    for _, chunk, start, size, flow in sorted(open_chunks, key=lambda item: item[:2]):
        chosen += _choose(flow, start, size, chunk, rank, loads)
    return _columns(chosen, regions, table)


def _count(loads: _Loads, kind: int, src: int, dst: int, size: int) -> None:
    if kind == ENTER:
        loads.egress[src] += size
        loads.ingress[dst] += size
    else:
        loads.spread[src] += size


def _choose(
    flow: Flow, start: int, size: int, chunk: int, rank: list[int], loads: _Loads
) -> list[tuple[int, int, int, int]]:
    holders = [start + row for row in flow.holders]
    needers = [start + row for row in flow.needers]
    if flow.kind != ENTER:
        stage = int(flow.kind == LANDED)
        return [(_spread(holders, rank, loads, size), dst, stage, chunk) for dst in needers]
    src = min(holders, key=lambda row: (loads.egress[rank[row]], row))
    entry = min(needers, key=lambda row: (loads.ingress[rank[row]], row))
    _count(loads, ENTER, rank[src], rank[entry], size)
    return [(src, entry, 0, chunk), *((entry, dst, 1, chunk) for dst in needers if dst != entry)]


def _spread(holders: list[int], rank: list[int], loads: _Loads, size: int) -> int:
    src = min(holders, key=lambda row: (loads.spread[rank[row]], row))
    loads.spread[rank[src]] += size
    return src


def _columns(chosen: list[tuple[int, int, int, int]], regions: list[Regions], table: Table) -> Transfers:
    src, dst, stage, chunk = np.array(chosen, np.int64).reshape(len(chosen), 4).T
    empty = np.zeros((0, table.lo.shape[1]), np.int64)
    lo = np.concatenate([empty, *(region.lo for region in regions)])
    hi = np.concatenate([empty, *(region.hi for region in regions)])
    return Transfers(src, dst, lo[chunk], hi[chunk], stage, chunk)
