"""Descriptor tables: what one launch moves, as rows of numbers that a kernel reads.

A *row* is a move in bytes and addresses (`COLUMNS`); a *tile* is the part of a move that one program of the grid does.
Rows are classed by how their ends are aligned (`Kind`), here, once, so that the kernel only looks the class up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError
from refitd.layout.codec import Ints
from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.kernels.checksum import WORD, first_words, move_bytes, seed
from refitd.plan.program import Bucket, Program

Places = Mapping[str, int]  # storage name -> address of its first element

# One row; addresses and strides in bytes, rows and cols in elements of the row's kind, slot: which sum it adds to.
COLUMNS = (
    "src", "src_stride0", "src_stride1", "dst", "dst_stride0", "dst_stride1",
    "rows", "cols", "kind", "first_word", "seed", "slot",
)  # fmt: skip
WIRE_ALIGN = 16  # bytes; where a move begins in a packed bucket on a device
TILE_WORDS = 2048  # of payload that one program of the grid moves
TRANSPOSE = 64  # rows and columns of a tile whose two ends run along different axes
SUMS = 128  # slots of sums that one program hands over to the host; there are always whole such parts
SAMPLES = 512  # that are read before a launch, half of them sources
MAX_COLS = 1 << 30  # so that positions in a row, and a tile beyond it, are 32-bit numbers


class Kind(IntEnum):
    """How a row is moved. Elements of the ``BYTES_n`` kinds are n bytes wide, or the destination's dtype under a cast.

    ``WIDE`` rows are contiguous and aligned at both ends: 16 bytes at a time, or one word of the destination under a
    cast. The last three are tiles of a matrix: which end runs along the rows' axis (columns of the source's storage
    are read in order, or of the destination's written in order, or both).
    """

    WIDE = 0
    BYTES_8 = 1
    BYTES_4 = 2
    BYTES_2 = 3
    BYTES_1 = 4
    TURN_SRC = 5
    TURN_DST = 6
    TURN_BOTH = 7


_OF_WIDTH = {8: Kind.BYTES_8, 4: Kind.BYTES_4, 2: Kind.BYTES_2, 1: Kind.BYTES_1}
_WIDTHS = np.zeros(17, np.int64)
_WIDTHS[[8, 4, 2, 1]] = [_OF_WIDTH[width] for width in (8, 4, 2, 1)]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """What one launch does. ``rows`` is int64 (n, 12), ``tiles`` int32 (t, 4): row, first row, first column, first word
    of the move. ``dtypes`` are (source, destination); ``buckets`` are the ids that the sums stand for, by slot;
    ``nbytes`` is the payload. Without ``store`` the destination is only read: the source columns describe it.
    """

    rows: Ints
    tiles: NDArray[np.int32]
    dtypes: tuple[str, str]
    buckets: tuple[int, ...]
    nbytes: int
    store: bool = True

    @property
    def kinds(self) -> int:
        """A bit for every `Kind` that occurs."""
        found = np.unique(self.rows[:, 8]).tolist()
        return sum(1 << kind for kind in found)


def wire_offsets(program: Program, bucket: Bucket) -> tuple[Ints, int]:
    """Where each move of a bucket begins in its packed form on a device, and how many bytes that form has."""
    padded = -(-move_bytes(program, bucket) // WIRE_ALIGN) * WIRE_ALIGN
    ends = np.cumsum(padded)
    return np.asarray(ends - padded, np.int64), int(ends[-1])


def gather(
    program: Program, buckets: Sequence[Bucket], sources: Places, wire: Mapping[int, int], dense: bool = False
) -> Table:
    """Pack ``buckets`` from ``sources`` to the 16-byte aligned addresses that ``wire`` has by bucket id, with casts.

    ``dense``: in the packed form of the CPU, where moves follow each other without a gap. Raises InputError where the
    buckets differ in dtypes, or a row cannot be moved.
    """
    return _table(program, buckets, _strided(program, 0, sources), _packed(program, wire, dense))


def scatter(
    program: Program, buckets: Sequence[Bucket], wire: Mapping[int, int], destinations: Places, dense: bool = False
) -> Table:
    """Unpack ``buckets``, which lie packed in the destination's dtype, into ``destinations``. Raises InputError."""
    ends = _packed(program, wire, dense), _strided(program, 4, destinations)
    return _table(program, buckets, *ends, cast=False)


def through(program: Program, buckets: Sequence[Bucket], sources: Places, destinations: Places) -> Table:
    """Move ``buckets`` from ``sources`` straight into ``destinations``, with casts. Raises InputError."""
    return _table(program, buckets, _strided(program, 0, sources), _strided(program, 4, destinations))


def reread(program: Program, buckets: Sequence[Bucket], destinations: Places) -> Table:
    """Only sum what lies in ``destinations`` now. Raises InputError."""
    end = _strided(program, 4, destinations)
    return _table(program, buckets, end, end, cast=False, store=False)


def interleaved(table: Table, sources: Sequence[str]) -> Table:
    """The same work, in an order in which tiles from different ``sources`` (one a bucket, by slot) take turns.

    Else a launch would empty one source after the other: one link would be busy and the others idle, and all readers
    would meet at the same source.
    """
    names, numbers = np.unique(np.array(sources), return_inverse=True)
    if len(names) < 2:
        return table
    of = numbers[table.rows[table.tiles[:, 0], 11]]
    when = np.empty(len(of))
    for number in range(len(names)):
        there = np.flatnonzero(of == number)
        when[there] = (np.arange(len(there)) + 0.5) / len(there)
    return replace(table, tiles=table.tiles[np.argsort(when, kind="stable")])


def samples(table: Table) -> Ints:
    """`SAMPLES` addresses, of bytes that ``table`` reads or writes: where tiles begin, evenly spread, at either end.

    Zeros where it moves nothing.
    """
    if not len(table.tiles):
        return np.zeros(SAMPLES, np.int64)
    tiles = table.tiles[np.linspace(0, len(table.tiles) - 1, SAMPLES // 2).astype(int)].astype(np.int64)
    rows = table.rows[tiles[:, 0]]
    steps = np.where(rows[:, 8, None] == Kind.WIDE, _wide_steps(table), rows[:, [2, 5]])
    found: Ints = rows[:, [0, 3]] + tiles[:, 1, None] * rows[:, [1, 4]] + tiles[:, 2, None] * steps
    return found.T.reshape(-1)


def _wide_steps(table: Table) -> list[int]:
    """Bytes of a unit of `Kind.WIDE` at either end."""
    source, destination = (ITEMSIZE[dtype] for dtype in table.dtypes)
    cast = table.dtypes[0] != table.dtypes[1]
    return [WORD // destination * source, WORD] if cast else [16, 16]


# -- one end of the moves of a bucket: address, row stride, column stride, in bytes, shape (n, 3)

_End = Callable[[Bucket], Ints]


def _strided(program: Program, side: int, places: Places) -> _End:
    known = [(places.get(ref.name, 0), ITEMSIZE[ref.dtype]) for ref in program.storages]
    address, itemsize = np.array(known, np.int64).reshape(-1, 2).T

    def end(bucket: Bucket) -> Ints:
        moves = program.moves_of(bucket)
        storage = moves[:, side]
        for index in np.unique(storage).tolist():
            if program.storages[index].name not in places:
                raise InputError(f"storage {program.storages[index].name}", "an address", "none")
        ends = moves[:, side + 1 : side + 4] * itemsize[storage, None]
        ends[:, 0] += address[storage]
        return ends

    return end


def _packed(program: Program, wire: Mapping[int, int], dense: bool) -> _End:
    def end(bucket: Bucket) -> Ints:
        width = ITEMSIZE[program.dtypes_of(bucket)[1]]
        sizes = move_bytes(program, bucket)
        offsets = np.cumsum(sizes) - sizes if dense else wire_offsets(program, bucket)[0]
        starts = offsets + wire[bucket.id]
        return np.stack([starts, program.moves_of(bucket)[:, 9] * width, np.full_like(starts, width)], axis=1)

    return end


def _table(
    program: Program, buckets: Sequence[Bucket], src: _End, dst: _End, cast: bool = True, store: bool = True
) -> Table:
    pairs = {program.dtypes_of(bucket) for bucket in buckets}
    if len(pairs) != 1:
        raise InputError("buckets of one launch", "one pair of dtypes", ", ".join(map(str, sorted(pairs))) or "none")
    source, destination = pairs.pop()
    dtypes = (source if cast else destination, destination)
    parts = [_rows_of(program, bucket, src(bucket), dst(bucket), slot) for slot, bucket in enumerate(buckets)]
    rows = _classed(np.concatenate(parts), ITEMSIZE[dtypes[0]], ITEMSIZE[destination], dtypes[0] != destination)
    tiles = _tiles(rows, ITEMSIZE[destination], dtypes[0] != destination)
    nbytes = sum(bucket.nbytes for bucket in buckets)
    return Table(rows, tiles, dtypes, tuple(bucket.id for bucket in buckets), nbytes, store)


def _rows_of(program: Program, bucket: Bucket, src: Ints, dst: Ints, slot: int) -> Ints:
    shapes = program.moves_of(bucket)[:, 8:]
    rows = np.zeros((len(src), len(COLUMNS)), np.int64)
    rows[:, 0:3], rows[:, 3:6], rows[:, 6:8] = src, dst, shapes
    rows[:, 9] = first_words(move_bytes(program, bucket))
    rows[:, 10] = np.uint64(seed(bucket.id)).astype(np.int64)
    rows[:, 11] = slot
    return rows


# -- classes


def _classed(rows: Ints, src_size: int, dst_size: int, cast: bool) -> Ints:
    """``rows`` with their kinds, merged and rescaled where that allows wider accesses."""
    _merge(rows)
    src, dst = rows[:, 0:3], rows[:, 3:6]
    flat = (src[:, 2] == src_size) & (dst[:, 2] == dst_size)
    exact = ~flat | cast  # moved in whole elements: there is nothing narrower
    if (src[exact] % src_size).any() or (dst[exact] % dst_size).any():
        raise InputError("moves", "strided views aligned to their elements", "an odd address")
    rows[:, 8] = _OF_WIDTH[dst_size]
    _turns(rows, src_size, dst_size, cast)
    (_widen_cast if cast else _widen)(rows, flat, src_size, dst_size)
    if int(rows[:, 7].max()) >= MAX_COLS:
        raise InputError("moves", f"rows of fewer than {MAX_COLS} elements", str(int(rows[:, 7].max())))
    return rows


def _merge(rows: Ints) -> None:
    """A column is a row; rows that follow each other at both ends are one row. Packed order stays what it is."""
    column = rows[:, 7] == 1
    for stride0, stride1 in ((1, 2), (4, 5)):
        rows[column, stride1] = rows[column, stride0]
    rows[column, 7], rows[column, 6] = rows[column, 6], 1
    single = rows[:, 6] == 1
    joined = single | ((rows[:, 1] == rows[:, 7] * rows[:, 2]) & (rows[:, 4] == rows[:, 7] * rows[:, 5]))
    rows[joined, 7] *= rows[joined, 6]
    rows[joined, 6] = 1
    rows[joined, 1] = rows[joined, 4] = 0


def _turns(rows: Ints, src_size: int, dst_size: int, cast: bool) -> None:
    """Matrices of which an end runs along the other axis, where whole words of packed order stay inside a row.

    An end that runs along the rows is read or written by words.
    """
    large = (rows[:, 6] >= 16) & (rows[:, 7] >= 16) & (rows[:, 7] * dst_size % WORD == 0)
    across = [rows[:, 1] == src_size, rows[:, 4] == dst_size]
    along = [rows[:, 2] == src_size, rows[:, 5] == dst_size]
    whole = [np.bitwise_or.reduce(rows[:, end], axis=1) % WORD == 0 for end in ([0, 1], [3, 4])]
    rows[large & across[0] & along[1] & whole[1], 8] = Kind.TURN_SRC
    rows[large & along[0] & across[1] & (whole[0] | cast), 8] = Kind.TURN_DST
    rows[large & across[0] & across[1], 8] = Kind.TURN_BOTH


def _widen(rows: Ints, flat: NDArray[np.bool_], _src_size: int, dst_size: int) -> None:
    """Contiguous rows are moved in the widest elements that all their addresses and lengths are multiples of."""
    bits = np.bitwise_or.reduce(rows[:, [0, 1, 3, 4]], axis=1) | (rows[:, 7] * dst_size) | 16
    width = np.where(flat, bits & -bits, dst_size)
    narrow = np.minimum(width, 8)
    rows[flat, 8] = np.where(width >= 16, Kind.WIDE, _WIDTHS[narrow])[flat]
    rows[flat, 2] = rows[flat, 5] = narrow[flat]
    rows[flat, 7] = rows[flat, 7] * dst_size // width[flat]


def _widen_cast(rows: Ints, flat: NDArray[np.bool_], src_size: int, dst_size: int) -> None:
    """Contiguous rows of whole aligned words of the destination are cast a word at a time."""
    lanes = WORD // dst_size
    even = (np.bitwise_or.reduce(rows[:, [0, 1]], axis=1) % (lanes * src_size) == 0) & (rows[:, 7] % lanes == 0)
    even &= np.bitwise_or.reduce(rows[:, [3, 4]], axis=1) % WORD == 0
    wide = flat & even
    rows[wide, 8] = Kind.WIDE
    rows[wide, 7] //= lanes


# -- tiles


def _tiles(rows: Ints, dst_size: int, cast: bool) -> NDArray[np.int32]:
    """Shape (t, 4): each row cut into parts of `TILE_WORDS`, or of `TRANSPOSE` rows and columns."""
    count, kind = rows[:, 6] * rows[:, 7], rows[:, 8]
    turned = kind >= Kind.TURN_SRC
    step = _steps(kind, dst_size, cast)  # elements a tile
    across = np.where(turned, -(-rows[:, 7] // TRANSPOSE), 1)
    tiles = np.where(turned, -(-rows[:, 6] // TRANSPOSE) * across, -(-count // step))
    row = np.repeat(np.arange(len(rows)), tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = number * step[row]
    cols, across, turned = rows[row, 7], across[row], turned[row]
    row0 = np.where(turned, number // across * TRANSPOSE, first // cols)
    col0 = np.where(turned, number % across * TRANSPOSE, first % cols)
    return np.stack([row, row0, col0, np.where(turned, 0, number)], axis=1).astype(np.int32)


def _steps(kind: Ints, dst_size: int, cast: bool) -> Ints:
    """Elements of a kind in `TILE_WORDS` words of payload."""
    if cast:
        return np.where(kind == Kind.WIDE, TILE_WORDS, TILE_WORDS * WORD // dst_size)
    widths = np.array([16, 8, 4, 2, 1, 1, 1, 1], np.int64)
    return TILE_WORDS * WORD // widths[kind]
