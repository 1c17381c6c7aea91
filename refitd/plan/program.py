"""What one rank does: its buckets, and the moves that they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from refitd.errors import InputError
from refitd.layout import codec
from refitd.layout.codec import Ints
from refitd.layout.dtypes import ITEMSIZE, cast_allowed

NETWORK, PEER, LOCAL, FABRIC = "network", "peer", "local", "fabric"
LINKS = (NETWORK, PEER, LOCAL, FABRIC)
SENT = (NETWORK, FABRIC)  # a rank at each end moves these; the others are read by the destination alone
MAX_STAGES = 1 << 16

# Columns of a move, in elements: dst[do + i*ds0 + j*ds1] = src[so + i*ss0 + j*ss1] for i < rows, j < cols.
MOVE_COLUMNS = (
    "src_storage", "src_offset", "src_stride0", "src_stride1",
    "dst_storage", "dst_offset", "dst_stride0", "dst_stride1", "rows", "cols",
)  # fmt: skip
_KIND = "program"


class StorageRef(NamedTuple):
    """A storage tensor of a rank: ``numel`` elements of ``dtype``."""

    rank: str
    name: str
    dtype: str
    numel: int


class Bucket(NamedTuple):
    """The unit of transfer: ``moves[first:last]`` of the program, ``nbytes`` of payload in the destination's dtype."""

    id: int
    src: str
    dst: str
    link: str
    stage: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's part of a plan.

    ``buckets`` are those that this rank sends (over network or fabric) and all that it receives, in the order in which
    they should run; ``moves`` is an int64 table (n, 10) with the columns `MOVE_COLUMNS`; its storage columns index
    ``storages``.
    """

    rank: str
    plan_digest: str
    buckets: tuple[Bucket, ...]
    moves: Ints
    storages: Sequence[StorageRef]

    def sends(self) -> tuple[Bucket, ...]:
        """Buckets that this rank sends, over the network or across the hosts of its domain."""
        return tuple(b for b in self.buckets if b.src == self.rank and b.link in SENT)

    def receives(self) -> tuple[Bucket, ...]:
        """Buckets that this rank brings in: network receives, peer reads and local copies."""
        return tuple(b for b in self.buckets if b.dst == self.rank)

    def moves_of(self, bucket: Bucket) -> Ints:
        """Rows of ``moves`` that ``bucket`` is made of, shape (n, 10)."""
        return self.moves[bucket.first : bucket.last]

    @cached_property
    def dense_spans(self) -> Mapping[int, tuple[int, int, int]]:
        """Where a bucket lies in its destination exactly as in its packed form, by bucket id.

        Values are (index of the storage, first element, elements); a bucket that has to be scattered is left out.
        """
        storage, start, stride0, stride1, rows, cols = self.moves[:, 4:].T
        stop = start + rows * cols
        loose = ~(((cols == 1) | (stride1 == 1)) & ((rows == 1) | (stride0 == cols)))
        apart = np.ones(len(loose), bool)  # from the move before
        apart[1:] = (storage[1:] != storage[:-1]) | (start[1:] != stop[:-1])
        seen = np.concatenate([[0], np.cumsum(2 * loose + apart)])
        return {
            b.id: (int(storage[b.first]), int(start[b.first]), int(stop[b.last - 1] - start[b.first]))
            for b in self.buckets
            if seen[b.last] - seen[b.first] == apart[b.first]
        }

    def dtypes_of(self, bucket: Bucket) -> tuple[str, str]:
        """(source dtype, destination dtype) of a bucket: one pair for all its moves."""
        row = self.moves[bucket.first]
        return self.storages[int(row[0])].dtype, self.storages[int(row[4])].dtype

    def to_bytes(self) -> bytes:
        """Bytes without pickle; `from_bytes` reads them."""
        ranks = sorted({key for b in self.buckets for key in (b.src, b.dst)} | {s.rank for s in self.storages})
        index = {key: i for i, key in enumerate(ranks)}
        rows = [(b.id, index[b.src], index[b.dst], LINKS.index(b.link), *b[4:]) for b in self.buckets]
        header = {
            "rank": self.rank,
            "plan_digest": self.plan_digest,
            "ranks": ranks,
            "storages": [(index[s.rank], s.name, s.dtype, s.numel) for s in self.storages],
        }
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 8)
        return codec.encode(_KIND, header, {"buckets": table, "moves": self.moves})

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Read a program. Raises InputError on garbage, on indices out of range and on moves outside their storage."""
        header, arrays = codec.decode(_KIND, data)
        ranks = codec.strings("program ranks", header.get("ranks"))
        storages = _storages(header.get("storages"), ranks)
        moves = _table(arrays, "moves", len(MOVE_COLUMNS))
        _check_moves(moves, storages)
        buckets = _buckets(_table(arrays, "buckets", 8), ranks, len(moves))
        rank, digest = codec.strings("program rank", [header.get("rank"), header.get("plan_digest")])
        program = cls(rank, digest, buckets, moves, storages)
        _check_buckets(program)
        return program


def _storages(value: object, ranks: tuple[str, ...]) -> tuple[StorageRef, ...]:
    rows: list[Any] = value if isinstance(value, list) else [value]
    for row in rows:
        good = isinstance(row, list) and len(row) == 4 and codec.is_int(row[0], len(ranks) - 1)
        if not good or not isinstance(row[1], str) or row[2] not in ITEMSIZE or not codec.is_int(row[3]):
            raise InputError("program storages", "rows of rank, name, dtype, elements", repr(row)[:80])
    return tuple(StorageRef(ranks[rank], name, dtype, numel) for rank, name, dtype, numel in rows)


def _table(arrays: dict[str, Ints], name: str, width: int) -> Ints:
    table = arrays.get(name)
    if table is None or table.ndim != 2 or table.shape[1] != width:
        raise InputError(
            f"program {name}", f"a table of {width} columns", "none" if table is None else str(table.shape)
        )
    if table.size and (int(table.min()) < 0 or int(table.max()) > codec.MAX_INT):
        raise InputError(f"program {name}", f"numbers from 0 to {codec.MAX_INT}", f"{table.min()} to {table.max()}")
    return table


def _buckets(table: Ints, ranks: tuple[str, ...], moves: int) -> tuple[Bucket, ...]:
    for column, stop in (
        (1, len(ranks)),
        (2, len(ranks)),
        (3, len(LINKS)),
        (4, MAX_STAGES),
        (6, moves),
        (7, moves + 1),
    ):
        codec.require_range(f"program buckets, column {column}", table[:, column], stop)
    if (table[:, 6] >= table[:, 7]).any():
        raise InputError("program buckets", "at least one move in each", "an empty range")
    rows = table.tolist()
    return tuple(Bucket(i, ranks[s], ranks[d], LINKS[link], *rest) for i, s, d, link, *rest in rows)


def _check_moves(moves: Ints, storages: tuple[StorageRef, ...]) -> None:
    numel = np.array([s.numel for s in storages], dtype=np.int64)
    for column in (0, 4):
        codec.require_range("program moves, storage", moves[:, column], len(storages))
    for side in (0, 4):
        offset, stride0, stride1 = moves[:, side + 1 : side + 4].T.astype(np.float64)
        last = offset + (moves[:, 8] - 1.0) * stride0 + (moves[:, 9] - 1.0) * stride1
        if len(moves) and (last >= numel[moves[:, side]]).any():
            raise InputError("program moves", "addresses inside the storage", f"{int(last.max())}")
    if (moves[:, 8:] < 1).any():
        raise InputError("program moves", "at least one row and column", "an empty move")


def _check_buckets(program: Program) -> None:
    for bucket in program.buckets:
        rows = program.moves_of(bucket)
        ends = {(program.storages[s], program.storages[d]) for s, d in rows[:, [0, 4]].tolist()}
        pairs = {(s.dtype, d.dtype) for s, d in ends}
        keys = {(s.rank, d.rank) for s, d in ends}
        if keys != {(bucket.src, bucket.dst)} or len(pairs) != 1 or not cast_allowed(*next(iter(pairs))):
            raise InputError(
                f"bucket {bucket.id}", "storages of its two ranks in one pair of dtypes", f"{keys} {pairs}"
            )
        nbytes = sum(r * c for r, c in rows[:, 8:].tolist()) * ITEMSIZE[next(iter(pairs))[1]]
        if nbytes != bucket.nbytes:
            raise InputError(f"bucket {bucket.id} nbytes", str(nbytes), str(bucket.nbytes))
