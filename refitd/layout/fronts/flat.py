"""Flat shards: ZeRO, FSDP1, Megatron's distributed optimizer. Parameters laid end to end, the buffer cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
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


def fsdp1(itemsize: int, use_orig_params: bool) -> Rules:
    """Rules of torch's ``FullyShardedDataParallel`` (torch 2.13): one buffer for each unit, in registration order.

    The two settings lay parameters out differently, and a shard does not show which one it has: give
    ``use_orig_params`` as FSDP got it (its own default is False), and let ``Buffer.numels`` prove it. True: each
    parameter starts at a multiple of 16 bytes (``_get_aligned_numel`` of torch/distributed/fsdp/_flat_param.py), which
    padding *before* it makes up; False: parameters follow each other without padding. Either way the end is padded to
    the number of ranks.

    ``itemsize``: bytes of one element of the dtype that forward and backward compute in, for that is what torch
    divides the 16 bytes by: ``MixedPrecision.param_dtype`` where the unit has one, else the dtype of the parameters
    when they were wrapped. It is *not* the item size of the buffer: fp32 shards of a bf16 mixed-precision unit are
    aligned to 8 elements, 32 bytes. It plays no part when ``use_orig_params`` is False.

    ``Buffer.parts`` is the size of the group that FSDP shards over (with HYBRID_SHARD: the inner one).
    Raises InputError on another item size than 1, 2, 4 or 8, and on a setting that is not a bool.
    """
    for field, value, kind in (("itemsize", itemsize, int), ("use_orig_params", use_orig_params, bool)):
        if type(value) is not kind:
            raise InputError(field, f"{'an' if kind is int else 'a'} {kind.__name__}", repr(value))
    if itemsize not in (1, 2, 4, 8):
        raise InputError("itemsize", "1, 2, 4 or 8 bytes, the size of a floating-point dtype", str(itemsize))
    return Rules(reverse=False, align=_FSDP1_BYTES // itemsize if use_orig_params else 1, pad=1)


_FSDP1_BYTES = 16

# FSDP1 with use_orig_params=False and nothing else: with True these rules read padding as weights.
FSDP1_WITHOUT_ORIG_PARAMS = Rules(reverse=False, align=1, pad=1)


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


class Buffer(NamedTuple):
    """A flat buffer: storages in registration order, of which ``rank`` of ``parts`` owns its share.

    ``numels``: what the framework itself says that its buffer is made of, elements of parameters and paddings in order
    (FSDP1: ``unit._handle.flat_param._numels_with_padding``). Where it is given, it is checked against ``rules``.
    """

    order: Sequence[str]
    rank: int
    parts: int
    rules: Rules
    numels: Sequence[int] | None = None


def flat_shards(layout: Layout, buffers: Mapping[str, Buffer]) -> Layout:
    """What a rank owns when storages of ``layout`` are laid into flat buffers: FSDP1 has one for each unit, Megatron
    one for each dtype and one for experts.

    ``layout`` is that of one model-parallel rank, equal on all ``parts`` ranks of a buffer. Storage
    ``<buffer>.<bucket>`` holds this rank's share of a bucket; storages in no buffer stay as they are. Raises
    LayoutError for storages that ``layout`` does not have or that stand twice, buffers of several dtypes, pieces
    that are not dense, and ``numels`` that the rules of a buffer do not give.
    """
    _require(layout, buffers)
    storages = dict(layout.storages)
    homes: dict[str, _Home] = {}
    for name, buffer in buffers.items():
        dtype = layout.storages[buffer.order[0]][1] if buffer.order else "float32"
        sizes = {storage: storages.pop(storage)[0] for storage in buffer.order}
        found = buckets(sizes, buffer.parts, buffer.rules)
        _require_numels(name, buffer, sizes, found)
        for number, bucket in enumerate(found):
            share = bucket.share(buffer.rank, buffer.parts)
            storages[f"{name}.{number}"] = (share[1] - share[0], dtype)
            homes |= {storage: _Home(f"{name}.{number}", start, share) for storage, start in bucket.starts.items()}
    pieces: list[Piece] = []
    for piece in layout.pieces():
        pieces += _cut(piece, homes[piece.storage]) if piece.storage in homes else [piece]
    return Layout.from_pieces(layout.tensors, storages, pieces, layout.keep, layout.tied)


def flat_shard(layout: Layout, order: Sequence[str], rank: int, parts: int, rules: Rules, name: str = "flat") -> Layout:
    """`flat_shards` with one buffer."""
    return flat_shards(layout, {name: Buffer(order, rank, parts, rules)})


class _Home(NamedTuple):
    """Where a storage went: a bucket's storage, its start in the buffer, and the share [lo, hi) that the rank owns."""

    storage: str
    start: int
    share: tuple[int, int]


def _require(layout: Layout, buffers: Mapping[str, Buffer]) -> None:
    bad: list[InputError] = []
    seen: set[str] = set()
    for name, buffer in buffers.items():
        if not 0 <= buffer.rank < buffer.parts:
            bad.append(InputError(f"rank of {name}", f"one of {buffer.parts} ranks", str(buffer.rank)))
        field = f"order of {name}"
        bad += [InputError(field, "storages of the layout", s) for s in buffer.order if s not in layout.storages]
        bad += [InputError(field, "each storage in one buffer, once", s) for s in buffer.order if s in seen]
        seen.update(buffer.order)
        dtypes = {layout.storages[s][1] for s in buffer.order if s in layout.storages}
        if len(dtypes) > 1:
            bad.append(InputError(field, "storages of one dtype (a buffer each)", ", ".join(sorted(dtypes))))
    if bad:
        raise LayoutError(bad)


def _require_numels(name: str, buffer: Buffer, sizes: Mapping[str, int], found: Sequence[Bucket]) -> None:
    """Hold what a framework says of its buffer to the rules, part by part: a sum may be right by chance."""
    if buffer.numels is None:
        return
    expected: list[int] = []
    end, padded = 0, False
    for bucket in found:
        for storage, start in bucket.starts.items():
            expected += [*([start - end] if start > end else []), sizes[storage]]
            end = start + sizes[storage]
        expected += [bucket.hi - end] if bucket.hi > end else []
        padded, end = bucket.hi > end, bucket.hi
    given = list(buffer.numels)
    # Without alignment FSDP pads the end as it cuts the buffer, after it has counted: the last padding may be missing.
    if given == expected or (padded and given == expected[:-1]):
        return
    for at, (want, got) in enumerate(zip_longest(expected, given)):
        if want != got:
            shown = "the end" if want is None else f"{want} elements by {buffer.rules}"
            raise LayoutError(
                [InputError(f"numels of {name}: part {at}", shown, "the end" if got is None else str(got))]
            )


def _cut(piece: Piece, home: _Home) -> Iterable[Piece]:
    """The part of a piece that lies in the share."""
    shape = piece.box.shape
    dense = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    if piece.strides != dense and any(n > 1 and s != t for n, s, t in zip(shape, piece.strides, dense, strict=True)):
        raise LayoutError(
            [InputError(f"piece of {piece.tensor} in {piece.storage}", f"dense strides {dense}", str(piece.strides))]
        )
    at = home.start + piece.offset
    begin, end = max(home.share[0] - at, 0), min(home.share[1] - at, piece.box.volume)
    for box, first in run_boxes(shape, begin, end):
        lo = tuple(a + b for a, b in zip(piece.box.lo, box.lo, strict=True))
        hi = tuple(a + b for a, b in zip(piece.box.lo, box.hi, strict=True))
        yield Piece(piece.tensor, Box(lo, hi), home.storage, at + first - home.share[0], dense)
