"""Flat shards: ZeRO, FSDP1, Megatron's distributed optimizer. Parameters laid end to end, the buffer cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from refitd.errors import InputError, LayoutError
from refitd.layout.box import Box, Piece
from refitd.layout.layout import Layout


class Rules(NamedTuple):
    """How a framework fills its buffer.

    ``reverse``: in reverse registration order. ``align``: each start is rounded up to it. ``pad``: each bucket's end is
    rounded up to it (always also to the number of ranks). ``bucket``: a bucket is closed once it has so many elements;
    0: one bucket.
    """

    reverse: bool
    align: int
    pad: int
    bucket: int = 0


FSDP1 = Rules(reverse=False, align=1, pad=1)


def distributed_optimizer(dp: int, bucket: int = 0, high_bandwidth: bool = False) -> Rules:
    """Megatron's rules: starts at multiples of 64, ends at lcm(DP, 128), or lcm(DP, 128, 65536) for high bandwidth."""
    return Rules(True, 64, math.lcm(dp, 128, *([65536] if high_bandwidth else [])), bucket)


class Bucket(NamedTuple):
    """Part [lo, hi) of the buffer; ``starts``: where each parameter in it begins, in buffer space."""

    lo: int
    hi: int
    starts: dict[str, int]

    def share(self, rank: int, parts: int) -> tuple[int, int]:
        """The part of the buffer that ``rank`` of ``parts`` owns."""
        size = (self.hi - self.lo) // parts
        return self.lo + rank * size, self.lo + (rank + 1) * size


def buckets(sizes: Mapping[str, int], parts: int, rules: Rules) -> list[Bucket]:
    """The buffer of parameters with these ``sizes`` (elements, in registration order), cut over ``parts`` ranks."""
    names = list(sizes)[::-1] if rules.reverse else list(sizes)
    pad = math.lcm(rules.pad, parts)
    found: list[Bucket] = []
    lo = end = 0
    starts: dict[str, int] = {}
    for name in names:
        starts[name] = -(-end // rules.align) * rules.align
        end = starts[name] + sizes[name]
        if rules.bucket and end - lo >= rules.bucket:
            found.append(_closed(lo, end, starts, pad))
            lo = end = found[-1].hi
            starts = {}
    if starts:
        found.append(_closed(lo, end, starts, pad))
    return found


def _closed(lo: int, end: int, starts: dict[str, int], pad: int) -> Bucket:
    return Bucket(lo, lo + -(-(end - lo) // pad) * pad, starts)


def run_boxes(shape: Sequence[int], begin: int, end: int) -> list[tuple[Box, int]]:
    """Elements [begin, end) of a dense tensor as boxes, each with the flat index of its first element; in order."""
    if begin >= end:
        return []
    if not shape:
        return [(Box((), ()), 0)]
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # inside one row
        return _in_row(shape, first - 1, begin, end)
    boxes = _in_row(shape, first - 1, begin, first * inner)
    if first < last:
        boxes.append((Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:])), first * inner))
    return boxes + _in_row(shape, last, last * inner, end)


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[tuple[Box, int]]:
    inner = math.prod(shape[1:])
    parts = run_boxes(shape[1:], begin - row * inner, end - row * inner)
    return [(Box((row, *box.lo), (row + 1, *box.hi)), at + row * inner) for box, at in parts]


def flat_shard(layout: Layout, order: Sequence[str], rank: int, parts: int, rules: Rules, name: str = "flat") -> Layout:
    """What ``rank`` of ``parts`` owns when the storages of ``layout`` named in ``order`` are laid into a flat buffer.

    ``layout`` is that of one model-parallel rank, equal on all ``parts`` ranks. One storage a bucket, ``flat.0`` and so
    on, holds this rank's share. Pieces must be dense inside their storage. Raises LayoutError otherwise, and for
    storages that ``layout`` does not have or that have several dtypes.
    """
    _require(layout, order)
    found = buckets({storage: layout.storages[storage][0] for storage in order}, parts, rules)
    pieces: list[Piece] = []
    storages: dict[str, tuple[int, str]] = {}
    dtype = layout.storages[order[0]][1] if order else "float32"
    starts: dict[str, tuple[int, Bucket]] = {}
    for number, bucket in enumerate(found):
        lo, hi = bucket.share(rank, parts)
        storages[f"{name}.{number}"] = (hi - lo, dtype)
        starts |= dict.fromkeys(bucket.starts, (number, bucket))
    for piece in layout.pieces():
        if piece.storage in starts:
            number, bucket = starts[piece.storage]
            pieces += _cut(piece, bucket.starts[piece.storage], bucket.share(rank, parts), f"{name}.{number}")
    return Layout.from_pieces(layout.tensors, storages, pieces, layout.keep, layout.tied)


def _require(layout: Layout, order: Sequence[str]) -> None:
    bad = [InputError("order", "storages of the layout", name) for name in order if name not in layout.storages]
    dtypes = {layout.storages[name][1] for name in order if name in layout.storages}
    if len(dtypes) > 1:
        bad.append(InputError("order", "storages of one dtype (a buffer each)", ", ".join(sorted(dtypes))))
    if bad:
        raise LayoutError(bad)


def _cut(piece: Piece, start: int, share: tuple[int, int], storage: str) -> Iterable[Piece]:
    """The part of a piece that lies in the share; its storage starts at ``start`` of the buffer."""
    shape = piece.box.shape
    dense = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    if piece.strides != dense and any(n > 1 and s != t for n, s, t in zip(shape, piece.strides, dense, strict=True)):
        raise LayoutError(
            [InputError(f"piece of {piece.tensor} in {piece.storage}", f"dense strides {dense}", str(piece.strides))]
        )
    at = start + piece.offset
    begin, end = max(share[0] - at, 0), min(share[1] - at, piece.box.volume)
    for box, first in run_boxes(shape, begin, end):
        lo = tuple(a + b for a, b in zip(piece.box.lo, box.lo, strict=True))
        hi = tuple(a + b for a, b in zip(piece.box.lo, box.hi, strict=True))
        yield Piece(piece.tensor, Box(lo, hi), storage, at + first - share[0], dense)
