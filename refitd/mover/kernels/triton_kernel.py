"""The kernel: one program of the grid does one tile of a `Table`, casting and summing on the way.

Only `refitd.mover.kernels.launch` imports this, and only where Triton is installed. Classes of rows that a launch does
not have (``KINDS``) are not compiled into it.
"""
# Triton reads these functions' source: annotations other than constexpr, and names it does not know, stay out of them.
# An if on a constexpr is settled at compilation, and only by itself: such ifs are nested, not joined.
# mypy: ignore-errors
# ruff: noqa: C901, FURB136, N803, RET505, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from refitd.mover.kernels import checksum as reference
from refitd.mover.kernels import table

GOLDEN = tl.constexpr(reference.GOLDEN)
MIX_1, MIX_2 = tl.constexpr(reference.MIX_1), tl.constexpr(reference.MIX_2)
COLUMNS = tl.constexpr(len(table.COLUMNS))
TILE_WORDS = tl.constexpr(table.TILE_WORDS)
TRANSPOSE = tl.constexpr(table.TRANSPOSE)
SUMS = tl.constexpr(table.SUMS)
SAMPLES = tl.constexpr(table.SAMPLES)
STEP_WORDS = tl.constexpr(512)  # words of a tile of single elements that are in registers at a time


@triton.jit
def _terms(words, numbers, start):
    """What ``words`` with these ``numbers`` add to the sum: `refitd.mover.kernels.checksum`."""
    x = words ^ ((numbers + 1).to(tl.uint64) * GOLDEN + start)
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _bits(values, BYTES: tl.constexpr):
    """The bit patterns of ``values``, elements of ``BYTES`` bytes, as 64-bit numbers."""
    if BYTES == 8:
        return values.to(tl.uint64, bitcast=True)
    elif BYTES == 4:
        return values.to(tl.uint32, bitcast=True).to(tl.uint64)
    elif BYTES == 2:
        return values.to(tl.uint16, bitcast=True).to(tl.uint64)
    else:
        return values.to(tl.uint8, bitcast=True).to(tl.uint64)


@triton.jit
def _wide(d, row0, col0, first, sums, SRC: tl.constexpr, DST: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr,
          STORE: tl.constexpr, SUM: tl.constexpr):  # fmt: skip
    """Units of ``LANES`` elements, contiguous and aligned at both ends."""
    width: tl.constexpr = DST.primitive_bitwidth // 8
    src_bytes: tl.constexpr = SRC.primitive_bitwidth // 8 * LANES
    rows, cols = tl.load(d + 6), tl.load(d + 7)
    unit, lane = tl.arange(0, UNITS), tl.arange(0, LANES)
    here = unit < rows * cols - first.to(tl.int64) * UNITS
    at = col0 + unit
    i = at // cols.to(tl.int32)
    j = (at - i * cols.to(tl.int32)).to(tl.int64)
    i = (row0 + i).to(tl.int64)
    src = (tl.load(d) + i * tl.load(d + 1) + tl.multiple_of(j * src_bytes, src_bytes)).to(tl.pointer_type(SRC))
    src = tl.multiple_of(src, 16 if src_bytes >= 16 else src_bytes)
    values = tl.load(src[:, None] + lane[None, :], mask=here[:, None], other=0).to(DST)
    if STORE:
        dst = (tl.load(d + 3) + i * tl.load(d + 4) + j * (width * LANES)).to(tl.pointer_type(DST))
        dst = tl.multiple_of(dst, 16 if width * LANES >= 16 else width * LANES)
        tl.store(dst[:, None] + lane[None, :], values, mask=here[:, None])
    if SUM:
        number = tl.load(d + 9) + first.to(tl.int64) * (UNITS * width * LANES // 8)
        start = tl.load(d + 10).to(tl.uint64, bitcast=True)
        if width == 8:
            numbers = number + (unit * LANES)[:, None] + lane[None, :]
            terms = tl.where(here[:, None], _terms(values.to(tl.uint64, bitcast=True), numbers, start), 0)
            total = tl.sum(tl.sum(terms, axis=1), axis=0)
        else:
            words = tl.sum(_bits(values, width) << (lane * (8 * width)).to(tl.uint64)[None, :], axis=1)
            total = tl.sum(tl.where(here, _terms(words, number + unit, start), 0), axis=0)
        tl.atomic_add(sums + tl.load(d + 11), total, sem="relaxed")


@triton.jit
def _element(words, lane: tl.constexpr, DST: tl.constexpr):
    """Element ``lane`` of each word."""
    width: tl.constexpr = DST.primitive_bitwidth
    if width == 64:
        return words.to(DST, bitcast=True)
    elif width == 32:
        return (words >> (32 * lane)).to(tl.uint32).to(DST, bitcast=True)
    elif width == 16:
        return (words >> (16 * lane)).to(tl.uint16).to(DST, bitcast=True)
    else:
        return (words >> (8 * lane)).to(tl.uint8).to(DST, bitcast=True)


@triton.jit
def _elements(d, row0, col0, first, sums, SRC: tl.constexpr, DST: tl.constexpr, CAST: tl.constexpr,
              WORDS: tl.constexpr, STEP: tl.constexpr, STORE: tl.constexpr, SUM: tl.constexpr):  # fmt: skip
    """Single elements at any strides, each thread a word's; whole words at an end that is as dense as the payload."""
    width: tl.constexpr = DST.primitive_bitwidth // 8
    lanes: tl.constexpr = 8 // width
    cols = tl.load(d + 7).to(tl.int32)
    left = tl.load(d + 6) * cols - first.to(tl.int64) * (WORDS * lanes)
    src, src0, src1 = tl.load(d), tl.load(d + 1), tl.load(d + 2)
    dst, dst0, dst1 = tl.load(d + 3), tl.load(d + 4), tl.load(d + 5)
    single = tl.load(d + 6) == 1
    src_turn, dst_turn = src0 - cols * src1, dst0 - cols * dst1  # from the end of a row to the next one's start
    src_dense = (single | (src_turn == 0)) & (src1 == width) & (src % 8 == 0) & (not CAST)
    dst_dense = (single | (dst_turn == 0)) & (dst1 == width) & (dst % 8 == 0)
    start = tl.load(d + 10).to(tl.uint64, bitcast=True)
    total = tl.zeros((STEP,), tl.uint64)
    for at in range(0, WORDS, STEP):
        if at * lanes < left:
            word = at + tl.arange(0, STEP)
            element = word * lanes
            number = first.to(tl.int64) * WORDS + word  # in the move
            whole = element + lanes <= left
            words = tl.load((src + number * 8).to(tl.pointer_type(tl.uint64)), mask=whole & src_dense, other=0)
            i = (col0 + element) // cols
            j = col0 + element - i * cols
            i = (row0 + i).to(tl.int64)
            src_at, dst_at = src + i * src0 + j * src1, dst + i * dst0 + j * dst1
            for lane in tl.static_range(lanes):
                here = element + lane < left
                loaded = here & ~(whole & src_dense)
                values = tl.load(src_at.to(tl.pointer_type(SRC)), mask=loaded, other=0).to(DST)
                words |= _bits(values, width) << (8 * width * lane)
                if STORE:
                    stored = here & ~(whole & dst_dense)
                    tl.store(dst_at.to(tl.pointer_type(DST)), _element(words, lane, DST), mask=stored)
                j += 1
                ended = j == cols
                src_at += src1 + tl.where(ended, src_turn, 0)
                dst_at += dst1 + tl.where(ended, dst_turn, 0)
                j = tl.where(ended, 0, j)
            if STORE:
                tl.store((dst + number * 8).to(tl.pointer_type(tl.uint64)), words, mask=whole & dst_dense)
            if SUM:
                total += tl.where(element < left, _terms(words, tl.load(d + 9) + number, start), 0)
    if SUM:
        tl.atomic_add(sums + tl.load(d + 11), tl.sum(total, axis=0), sem="relaxed")


@triton.jit
def _turn(d, row0, col0, sums, SRC: tl.constexpr, DST: tl.constexpr, CAST: tl.constexpr, SRC_ROWS: tl.constexpr,
          DST_ROWS: tl.constexpr, SIDE: tl.constexpr, STORE: tl.constexpr, SUM: tl.constexpr):  # fmt: skip
    """A tile of a matrix; ``SRC_ROWS`` and ``DST_ROWS`` say that this end's elements follow each other by rows.

    An end with rows is read or written by whole words; else a word's elements follow each other in one thread, each
    for all words, so that no thread needs another's.
    """
    width: tl.constexpr = DST.primitive_bitwidth // 8
    lanes: tl.constexpr = 8 // width
    rows, cols = tl.load(d + 6), tl.load(d + 7)
    src, src0, src1 = tl.load(d), tl.load(d + 1), tl.load(d + 2)
    dst, dst0, dst1 = tl.load(d + 3), tl.load(d + 4), tl.load(d + 5)
    i, k = row0 + tl.arange(0, SIDE), tl.arange(0, SIDE // lanes)
    here = (i < rows)[:, None] & (col0 + k * lanes < cols)[None, :]
    words = tl.zeros((SIDE, SIDE // lanes), tl.uint64)
    if not SRC_ROWS and not CAST:
        row = (src + i.to(tl.int64) * src0 + col0 * width).to(tl.pointer_type(tl.uint64))
        words = tl.load(row[:, None] + k[None, :], mask=here, other=0)
    for lane in tl.static_range(lanes):
        j = col0 + k * lanes + lane
        if SRC_ROWS or CAST:
            if SRC_ROWS:
                src_at = (src + j.to(tl.int64) * src1).to(tl.pointer_type(SRC))[None, :] + i[:, None]
            else:
                src_at = (src + i.to(tl.int64) * src0).to(tl.pointer_type(SRC))[:, None] + j[None, :]
            words |= _bits(tl.load(src_at, mask=here, other=0).to(DST), width) << (8 * width * lane)
        if STORE and DST_ROWS:
            dst_at = (dst + j.to(tl.int64) * dst1).to(tl.pointer_type(DST))[None, :] + i[:, None]
            tl.store(dst_at, _element(words, lane, DST), mask=here)
    if STORE and not DST_ROWS:
        row = (dst + i.to(tl.int64) * dst0 + col0 * width).to(tl.pointer_type(tl.uint64))
        tl.store(row[:, None] + k[None, :], words, mask=here)
    if SUM:
        numbers = tl.load(d + 9) + (i.to(tl.int64) * (cols // lanes))[:, None] + (col0 // lanes + k)[None, :]
        terms = _terms(words, numbers, tl.load(d + 10).to(tl.uint64, bitcast=True))
        total = tl.sum(tl.sum(tl.where(here, terms, 0), axis=1), axis=0)
        tl.atomic_add(sums + tl.load(d + 11), total, sem="relaxed")


@triton.jit
def move(rows, tiles, sums, SRC: tl.constexpr, DST: tl.constexpr, CAST: tl.constexpr, KINDS: tl.constexpr,
         STORE: tl.constexpr, SUM: tl.constexpr):  # fmt: skip
    """Grid: one program a tile. ``SRC`` and ``DST`` are the ends' dtypes, integers of that width without ``CAST``."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 4
    d = rows + tl.load(tile).to(tl.int64) * COLUMNS
    row0, col0, first = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    kind = tl.load(d + 8)
    if KINDS & 1:
        if kind == 0:
            if CAST:
                lanes: tl.constexpr = 64 // DST.primitive_bitwidth
                _wide(d, row0, col0, first, sums, SRC, DST, lanes, TILE_WORDS, STORE, SUM)
            else:
                _wide(d, row0, col0, first, sums, tl.uint64, tl.uint64, 2, TILE_WORDS // 2, STORE, SUM)
    if CAST:
        if KINDS & 30:
            if (kind >= 1) & (kind <= 4):
                _elements(d, row0, col0, first, sums, SRC, DST, CAST, TILE_WORDS, STEP_WORDS, STORE, SUM)
    else:
        if KINDS & 2:
            if kind == 1:
                _elements(d, row0, col0, first, sums, tl.uint64, tl.uint64, CAST, TILE_WORDS, STEP_WORDS, STORE, SUM)
        if KINDS & 4:
            if kind == 2:
                _elements(d, row0, col0, first, sums, tl.uint32, tl.uint32, CAST, TILE_WORDS, STEP_WORDS, STORE, SUM)
        if KINDS & 8:
            if kind == 3:
                _elements(d, row0, col0, first, sums, tl.uint16, tl.uint16, CAST, TILE_WORDS, STEP_WORDS, STORE, SUM)
        if KINDS & 16:
            if kind == 4:
                _elements(d, row0, col0, first, sums, tl.uint8, tl.uint8, CAST, TILE_WORDS, STEP_WORDS, STORE, SUM)
    if KINDS & 32:
        if kind == 5:
            _turn(d, row0, col0, sums, SRC, DST, CAST, True, False, TRANSPOSE, STORE, SUM)
    if KINDS & 64:
        if kind == 6:
            _turn(d, row0, col0, sums, SRC, DST, CAST, False, True, TRANSPOSE, STORE, SUM)
    if KINDS & 128:
        if kind == 7:
            _turn(d, row0, col0, sums, SRC, DST, CAST, True, True, TRANSPOSE, STORE, SUM)


@triton.jit
def hand_over(sums, host):
    """Sums go to memory of the host, and are zero for the next launch. Grid: one program for `SUMS` of them."""
    slot = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    tl.store(host + slot, tl.load(sums + slot))
    tl.store(sums + slot, tl.zeros((SUMS,), tl.uint64))


@triton.jit
def touch(places, found):
    """Every program reads a byte at each of `SAMPLES` addresses, and all leave the same in ``found``."""
    at = tl.arange(0, SAMPLES)
    tl.store(found + at, tl.load(tl.load(places + at).to(tl.pointer_type(tl.uint8))))
