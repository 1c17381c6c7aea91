"""How a dimension is cut over coordinates, and the patterns that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError, LayoutError
from refitd.layout.models import Heads
from refitd.layout.side import Pattern

Ints = NDArray[np.int64]


class Runs(NamedTuple):
    """Indices ``lo`` to ``hi`` of one dimension, at index ``at`` of the storage, on coordinate ``coord``; columns
    (n,)."""

    coord: Ints
    lo: Ints
    hi: Ints
    at: Ints

    def extent(self, parts: int) -> int:
        """Indices on one coordinate. All of ``parts`` have equally many, or InputError."""
        sizes = np.bincount(self.coord, weights=self.hi - self.lo, minlength=parts).astype(np.int64)
        if (sizes != sizes[0]).any():
            raise InputError("cut", "equal shares", str(sizes.tolist())[:80])
        return int(sizes[0])


def full(size: int, parts: int) -> Runs:
    """Everything on every coordinate."""
    zero = np.zeros(parts, dtype=np.int64)
    return Runs(np.arange(parts, dtype=np.int64), zero, zero + size, zero)


def even(what: str, size: int, parts: int) -> Runs:
    """Equal shares. Raises LayoutError, naming ``what``, unless ``parts`` divides ``size``."""
    if size % parts:
        raise LayoutError([InputError(what, f"a size that {parts} ranks divide", str(size))])
    return padded(size, size, parts)


def padded(size: int, total: int, parts: int) -> Runs:
    """Equal shares of ``total`` of which only the first ``size`` are real: the rest is padding at the end."""
    share = total // parts
    start = np.arange(parts, dtype=np.int64) * share
    lo, hi = np.minimum(start, size), np.minimum(start + share, size)
    real = lo < hi
    coord = np.arange(parts, dtype=np.int64)
    return Runs(coord[real], lo[real], hi[real], np.zeros(int(real.sum()), dtype=np.int64))


def segments(what: str, sizes: Sequence[int], parts: int) -> Runs:
    """Each segment cut by itself into equal shares; a coordinate's shares follow each other."""
    starts = np.cumsum([0, *sizes[:-1]])
    runs = []
    at = 0
    for i, (start, size) in enumerate(zip(starts.tolist(), sizes, strict=True)):
        run = even(f"{what} segment {i}", size, parts)
        runs.append(Runs(run.coord, run.lo + start, run.hi + start, run.at + at))
        at += size // parts
    return Runs(*(np.concatenate(column) for column in zip(*runs, strict=True)))


def replicated_heads(what: str, heads: int, rows: int, parts: int) -> Runs:
    """kv heads as engines hold them: equal shares, or one head on each of ``parts / heads`` neighbours."""
    if parts <= heads:
        return even(what, heads * rows, parts)
    if parts % heads:
        raise LayoutError([InputError(what, f"a number of heads that divides {parts} ranks", str(heads))])
    coord = np.arange(parts, dtype=np.int64)
    lo = coord // (parts // heads) * rows
    return Runs(coord, lo, lo + rows, np.zeros(parts, dtype=np.int64))


def interleaved(what: str, heads: Heads, parts: int) -> dict[str, Runs]:
    """q, k and v in Megatron's linear_qkv, rows of the slab; the whole is cut evenly by rows over ``parts`` ranks.

    For each kv group: its queries, head by head; with ``heads.gate`` then its gates, head by head; k; v. That is
    ``SelfAttention.get_query_key_value_tensors`` of Megatron-Core, which splits a group of n query heads of d rows
    into [n d, n d, d, d] (``attention_output_gate``) or [n d, d, d], and ``merge_qkv_weights`` of Megatron-Bridge.
    With more ranks than groups a rank holds a part of a group: Megatron replicates nothing.

    Raises LayoutError, naming ``what``, unless kv heads divide query heads, all heads are of one size, and ``parts``
    divides the rows.
    """
    _require_heads(what, heads)
    number = np.arange(heads.kv, dtype=np.int64)
    n, d = heads.q // heads.kv, heads.kv_rows
    group = (n * (2 if heads.gate else 1) + 2) * d
    total = heads.kv * group
    if total % parts:
        raise LayoutError([InputError(f"{what} linear_qkv", f"rows that {parts} ranks divide", str(total))])
    share, kv = total // parts, (number + 1) * group - 2 * d
    k, v = (_slab(start, number * d, d, share) for start in (kv, kv + d))
    if not heads.gate:
        return {"q": _slab(number * group, number * n * d, n * d, share), "k": k, "v": v}
    # The slab has all queries of a group before all its gates, q_proj has a head's gate behind its query: no run is
    # longer than one head of either.
    head = np.arange(heads.q, dtype=np.int64)
    query = head // n * group + head % n * d
    start = np.stack([query, query + n * d], axis=1).ravel()
    own = np.arange(2 * heads.q, dtype=np.int64) * d
    return {"q": _slab(start, own, d, share), "k": k, "v": v}


def _require_heads(what: str, heads: Heads) -> None:
    """Megatron has one size of heads, ``kv_channels``. Rows that it does not explain would be laid out wrongly."""
    if min(heads[:4]) < 1 or heads.q % heads.kv:
        expected, got = "at least one, kv heads that divide query heads", f"{heads.q} query and {heads.kv} kv heads"
        raise LayoutError([InputError(f"{what} heads", expected, got)])
    rows = heads.kv_rows * (2 if heads.gate else 1)
    if heads.q_rows != rows:
        expected = f"{rows} rows of q a head, as k has {heads.kv_rows} and gate is {heads.gate}"
        raise LayoutError([InputError(f"{what} heads", expected, str(heads.q_rows))])


def _slab(start: Ints, own: Ints, rows: int, share: int) -> Runs:
    """Runs of ``rows`` rows that begin at ``start`` of the slab and ``own`` of their tensor, cut every ``share``
    rows."""
    first, last = start // share, (start + rows - 1) // share
    count = last - first + 1
    which = np.repeat(np.arange(len(start)), count)
    coord = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    lo = np.maximum(start[which], coord * share)
    hi = np.minimum(start[which] + rows, (coord + 1) * share)
    shift = own[which] - start[which]
    return Runs(coord, lo + shift, hi + shift, lo - coord * share)


def glu_blocks(what: str, size: int, parts: int, block: int) -> tuple[Runs, Runs]:
    """Gate and up interleaved in blocks of ``block`` rows inside each share (``moe_mlp_glu_interleave_size``)."""
    share = even(what, size, parts)
    rows = size // parts
    if rows % block:
        raise LayoutError([InputError(f"{what} interleave", f"a block that divides {rows} rows", str(block))])
    step = np.arange(rows // block, dtype=np.int64) * block
    lo = (share.lo[:, None] + step).ravel()
    coord = np.repeat(share.coord, len(step))
    at = np.tile(2 * step, parts)
    return Runs(coord, lo, lo + block, at), Runs(coord, lo, lo + block, at + block)


def pattern(
    shape: tuple[int, ...], dtype: str, coords: Ints, runs: Runs, dim: int, strides: tuple[int, ...]
) -> Pattern:
    """The pattern of a tensor whose dimension ``dim`` is cut by ``runs``; slot i has coordinate ``coords[i]``.

    ``strides`` are those of the storage; a run starts at ``at * strides[dim]``.
    """
    order = np.argsort(runs.coord, kind="stable")
    count = np.bincount(runs.coord, minlength=int(coords.max()) + 1)
    each = count[coords]
    slot = np.repeat(np.arange(len(coords), dtype=np.int64), each)
    within = np.arange(len(slot)) - np.repeat(np.cumsum(each) - each, each)
    run = order[(np.cumsum(count) - count)[coords][slot] + within]
    bounds, box = _distinct(runs.lo, runs.hi)
    boxes = np.zeros((len(bounds), 2, len(shape)), dtype=np.int64)
    boxes[:, 1] = shape
    boxes[:, :, dim] = bounds
    table = np.broadcast_to(np.array(strides, dtype=np.int64), (len(slot), len(shape)))
    return Pattern(shape, dtype, len(coords), boxes, slot, box[run], runs.at[run] * strides[dim], table)


def _distinct(lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    code, inverse = np.unique((lo << 31) | hi, return_inverse=True)
    return np.stack([code >> 31, code & ((1 << 31) - 1)], axis=1), inverse


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)
