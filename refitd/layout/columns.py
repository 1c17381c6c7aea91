"""Columns of pieces to the parts of a `Layout`, without a loop over pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.layout.build import Parts


class Rows(NamedTuple):
    """Pieces of one rank as columns: tensor and storage (numbers), offset (N,); lo, hi, strides (N, D)."""

    tensor: Ints
    storage: Ints
    offset: Ints
    lo: Ints
    hi: Ints
    strides: Ints


def parts(
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    storages: Mapping[str, tuple[int, str]],
    rows: Rows,
    keep: Sequence[str],
    tied: Mapping[str, str],
) -> Parts:
    """Parts of a layout, equal to those of `build.from_records`.

    ``rows`` number the names of ``tensors`` and ``storages`` in sorted order. D is at least 1 and no less than any
    shape has; dimensions that a tensor lacks have lo 0, hi 1, stride 0.
    """
    facts = dict(sorted(tensors.items()))
    held = np.unique(rows.tensor).tolist()
    dims = np.array([len(shape) for shape, _ in facts.values()], dtype=np.int64)
    rows = _ordered(rows, max([1, *dims[held].tolist()]))
    fact_ids: dict[tuple[tuple[int, ...], str], int] = {}
    numbers = np.array([fact_ids.setdefault(fact, len(fact_ids)) for fact in facts.values()], dtype=np.int64)
    fact = numbers[rows.tensor]
    table = np.concatenate([fact[:, None], rows.lo, rows.hi, rows.strides], axis=1)
    unique, first, inverse = _distinct(table)
    own, _, pattern_fact = _distinct(unique[:, :1])
    values = list(fact_ids)
    instances = np.stack([rows.tensor, rows.storage, rows.offset, inverse], axis=1).reshape(-1, 4)
    patterns = table[first, 1:].reshape(len(first), 3, rows.lo.shape[1])
    stored = dict(sorted(storages.items()))
    used = tuple(values[i] for i in own[:, 0].tolist())
    return Parts(
        facts, stored, tuple(sorted(set(keep))), dict(sorted(tied.items())), used, pattern_fact, patterns, instances
    )


def _ordered(rows: Rows, dims: int) -> Rows:
    tensor, storage, offset, lo, hi, strides = rows
    lo, hi, strides = lo[:, :dims], hi[:, :dims], strides[:, :dims]
    keys = [*strides.T[::-1], offset, storage, *hi.T[::-1], *lo.T[::-1], tensor]
    order = np.lexsort(keys)
    table = np.stack(keys, axis=1)[order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (table[1:] != table[:-1]).any(axis=1)
    order = order[fresh]
    return Rows(tensor[order], storage[order], offset[order], lo[order], hi[order], strides[order])


def _distinct(table: Ints) -> tuple[Ints, Ints, Ints]:
    """Distinct rows in order of first occurrence, where each first occurs, and which one each row is."""
    if not len(table):
        return table, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    order = np.lexsort(table.T[::-1])
    ordered = table[order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    label = np.empty(len(order), dtype=np.int64)
    label[order] = np.cumsum(fresh) - 1
    first = order[fresh]  # lexsort is stable: the first of equal rows comes first
    rank = np.empty(len(first), dtype=np.int64)
    by_place = np.argsort(first)
    rank[by_place] = np.arange(len(first))
    return table[first[by_place]], first[by_place], rank[label]
