"""Fill buckets with moves: one edge, stage and pair of dtypes each, by destination address."""

from __future__ import annotations

from collections import Counter

import numpy as np

from refitd.layout.box import Ints
from refitd.layout.dtypes import ITEMSIZE
from refitd.plan.moves import Moves
from refitd.plan.program import LOCAL, NETWORK, PEER, Bucket
from refitd.plan.tables import Table


def fill(table: Table, moves: Moves, bucket_bytes: int) -> tuple[Moves, tuple[Bucket, ...]]:
    """Moves in the order of the buckets, and the buckets, whose ids are their positions.

    Within an edge, buckets follow destination addresses; a destination's edges take turns, so that all senders work.
    """
    edges = np.stack([moves.stage, table.rank[moves.src], table.rank[moves.dst], table.dtype[moves.src],
                      table.dtype[moves.dst]], axis=1)  # fmt: skip
    order = np.lexsort((moves.table[:, 5], moves.table[:, 4], *edges.T[::-1]))
    moves, edges = moves.take(order), edges[order]
    itemsize = np.array([ITEMSIZE[dtype] for dtype in table.dtypes], np.int64)[edges[:, 4]]
    nbytes = moves.table[:, 8] * moves.table[:, 9] * itemsize
    starts = _starts(edges, nbytes.tolist(), bucket_bytes)
    return _arranged(table, moves, edges[starts], nbytes, starts)


def _starts(edges: Ints, nbytes: list[int], bucket_bytes: int) -> Ints:
    """Positions of the first move of every bucket."""
    fresh = np.ones(len(edges), dtype=bool)
    fresh[1:] = (edges[1:] != edges[:-1]).any(axis=1)
    starts, room = [], 0
    for position, (new_edge, size) in enumerate(zip(fresh.tolist(), nbytes, strict=True)):
        if new_edge or size > room:
            starts.append(position)
            room = bucket_bytes
        room -= size
    return np.array(starts, np.int64)


def _arranged(table: Table, moves: Moves, edges: Ints, nbytes: Ints, starts: Ints) -> tuple[Moves, tuple[Bucket, ...]]:
    ends = np.append(starts[1:], len(moves.stage))
    if not len(starts):
        return moves, ()
    turn, turns = [], Counter[tuple[int, int, int]]()
    for stage, src, dst in edges[:, :3].tolist():
        turn.append(turns[stage, src, dst])
        turns[stage, src, dst] += 1
    order = np.lexsort((edges[:, 1], np.array(turn, np.int64), edges[:, 2], edges[:, 0]))
    sums = np.add.reduceat(nbytes, starts)
    buckets, picked, first = [], [], 0
    for number, at in enumerate(order.tolist()):
        stage, src, dst = edges[at, :3].tolist()
        last = first + int(ends[at] - starts[at])
        keys = table.ranks[src].key, table.ranks[dst].key
        buckets.append(Bucket(number, *keys, link_of(table, src, dst), stage, int(sums[at]), first, last))
        picked.append(np.arange(starts[at], ends[at]))
        first = last
    return moves.take(np.concatenate(picked)), tuple(buckets)


def link_of(table: Table, src: int, dst: int) -> str:
    """The link class between two ranks, by index."""
    if src == dst:
        return LOCAL
    return PEER if table.ranks[src].node == table.ranks[dst].node else NETWORK
