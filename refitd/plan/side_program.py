"""Put a rank's rows in order and in buckets: its `Program`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from refitd.errors import PlanError
from refitd.layout import codec
from refitd.layout.box import Ints
from refitd.layout.dtypes import ITEMSIZE
from refitd.layout.side import Side
from refitd.plan.canon import Ranks
from refitd.plan.expand import Deliveries
from refitd.plan.laid import DTYPES
from refitd.plan.lines import PARTS
from refitd.plan.program import LINKS, Bucket, Program, StorageRef
from refitd.plan.ranksets import distinct, stable_order
from refitd.plan.rows import Rows

ITEM = np.array([ITEMSIZE[dtype] for dtype in DTYPES], np.int64)


class Numbering(NamedTuple):
    """How buckets are numbered, alike on all ranks without a list of them: by message (stage, source, destination, pair
    of dtypes), then by place. ``most``: more than any rank moves, in units of ``half`` a bucket."""

    ranks: int
    pairs: Ints
    half: int
    most: int

    def edges(self, work: Deliveries, dtypes: Ints) -> Ints:
        """The part of each delivery's messages that is not their stage. ``dtypes``: of each delivery."""
        pair = np.searchsorted(self.pairs, dtypes)
        return (work.src * self.ranks + work.dst) * len(self.pairs) + pair

    def messages(self, stage: Ints, edge: Ints) -> Ints:
        """Numbers of messages."""
        return stage * (self.ranks * self.ranks * len(self.pairs)) + edge


class Order(NamedTuple):
    """Rows by message, phase and destination address: ``row``; the ``bucket`` of each and its ``nbytes``."""

    row: Ints
    bucket: Ints
    nbytes: Ints


def by_address(rows: Rows) -> Ints:
    """Rows by destination storage and offset."""
    order = stable_order(rows.dst_offset)
    return order[stable_order(rows.dst_storage[order])]


def order_rows(numbering: Numbering, edges: Ints, rows: Rows, nbytes: Ints, address: Ints) -> Order:
    """Put rows in order and number their buckets. ``edges``: of each delivery; ``nbytes``: of each walk; ``address``:
    rows `by_address`. Raises PlanError where the numbers would not fit a record."""
    known = distinct(edges)
    edge = np.searchsorted(known, edges)[rows.walks.delivery]
    message = rows.stage * len(known) + edge[rows.walk]
    order = address[stable_order((message * PARTS + rows.phase)[address])]
    nbytes, message = nbytes[rows.walk[order]], message[order]
    starts = np.flatnonzero(np.append(True, message[1:] != message[:-1])[: len(message)])
    sizes = np.diff(np.append(starts, len(message)))
    done = np.cumsum(nbytes) - nbytes
    within = done - np.repeat(done[starts], sizes)
    stage, place = np.divmod(message[starts], max(len(known), 1))
    number = numbering.messages(stage, known[place])
    bucket = np.repeat(number * numbering.most, sizes) + within // numbering.half
    if len(bucket) and int(bucket.max()) > codec.MAX_INT:
        raise PlanError(f"{int(bucket.max())} bucket numbers: a larger bucket_bytes is needed")
    return Order(order, bucket, nbytes)


def make_program(
    key: str, digest: str, sides: tuple[Side, Side], ranks: Ranks, work: Deliveries, rows: Rows, order: Order
) -> tuple[Program, Ints]:
    """The program, and the rows in its order. Buckets run by stage, then by phase, the peers in turn."""
    bucket = order.bucket
    starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1])[: len(bucket)])
    sizes = np.diff(np.append(starts, len(bucket)))
    head = order.row[starts]
    delivery = rows.walks.delivery[rows.walk[head]]
    src, dst = work.src[delivery], work.dst[delivery]
    me = int(ranks.numbers([key])[0])
    turn = (np.where(src == me, dst, src) - me) % len(ranks.keys)
    run = np.lexsort((bucket[starts], turn, rows.phase[head], rows.stage[head]))
    sizes, last = sizes[run], np.cumsum(sizes[run])
    place = np.repeat(starts[run] - last + sizes, sizes) + np.arange(len(bucket))
    total = np.add.reduceat(order.nbytes, starts)[run] if len(starts) else starts
    names = ([ranks.keys[number] for number in column[run].tolist()] for column in (src, dst))
    link = [LINKS[number] for number in work.link[delivery[run]].tolist()]
    numbers = (column.tolist() for column in (bucket[starts[run]], rows.stage[head[run]], total, last - sizes, last))
    number, stage, nbytes, first, stop = numbers
    buckets = tuple(map(Bucket._make, zip(number, *names, link, stage, nbytes, first, stop, strict=True)))
    chosen = order.row[place]
    moves, storages = _with_storages(sides, ranks, work, rows, chosen)
    return Program(key, digest, buckets, moves, storages), chosen


def _with_storages(
    sides: tuple[Side, Side], ranks: Ranks, work: Deliveries, rows: Rows, chosen: Ints
) -> tuple[Ints, Sequence[StorageRef]]:
    """The move table with storages of its own numbering, and those storages."""
    walk, delivery, count = rows.walk[chosen], rows.walks.delivery, max(len(side.storages) for side in sides)
    ends = (work.held * len(ranks.keys) + work.src, rows.src_storage), (len(ranks.keys) + work.dst, rows.dst_storage)
    code = np.concatenate([(owner[delivery] * count)[walk] + storage[chosen] for owner, storage in ends])
    order = stable_order(code)
    ordered = code[order]
    fresh = np.append(True, ordered[1:] != ordered[:-1])[: len(code)]
    number = np.empty_like(code)
    number[order] = np.cumsum(fresh) - 1
    moves = rows.table(chosen, number[: len(chosen)], number[len(chosen) :])
    moves.flags.writeable = False
    return moves, StorageRefs(sides, ranks, *np.divmod(ordered[fresh], count))


class StorageRefs(Sequence[StorageRef]):
    """Storages by (side, rank) and number, as `StorageRef` once they are looked at: a rank's peers have very many."""

    def __init__(self, sides: tuple[Side, Side], ranks: Ranks, owner: Ints, storage: Ints) -> None:
        self._sides, self._ranks, self._owner, self._storage = sides, ranks, owner, storage

    def __len__(self) -> int:
        return len(self._owner)

    @overload
    def __getitem__(self, index: int) -> StorageRef: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StorageRef]: ...
    def __getitem__(self, index: int | slice) -> StorageRef | Sequence[StorageRef]:
        return self._refs[index]

    def __iter__(self) -> Iterator[StorageRef]:
        return iter(self._refs)

    @cached_property
    def _refs(self) -> tuple[StorageRef, ...]:
        count = len(self._ranks.keys)
        back = [
            dict(zip(n.tolist(), range(len(n)), strict=True)) for n in (self._ranks.source, self._ranks.destination)
        ]
        slots: dict[tuple[int, int], dict[int, int]] = {}
        refs = []
        for owner, storage in zip(self._owner.tolist(), self._storage.tolist(), strict=True):
            which, rank = divmod(owner, count)
            side = self._sides[which]
            pattern = side.storage_patterns[int(side.storage_pattern[storage])]
            group = int(side.storage_group[storage])
            if (which, group) not in slots:
                slots[which, group] = {member: slot for slot, member in enumerate(side.groups[group])}
            numel = int(pattern.numel[slots[which, group][back[which][rank]]])
            refs.append(StorageRef(self._ranks.keys[rank], side.storages[storage], pattern.dtype, numel))
        return tuple(refs)
