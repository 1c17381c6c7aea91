"""Violations inside one rank's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refitd.errors import InputError
from refitd.layout.box import Bools, Ints, Piece, view_dims, views_overlap
from refitd.layout.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from refitd.layout.layout import Layout

_LIMIT = 100  # overlaps named for one storage


def violations(layout: Layout) -> list[InputError]:
    """Everything that is wrong with a layout by itself."""
    return [*_dtypes(layout), *_tied(layout), *_geometry(layout), *_overlaps(layout)]


def _dtypes(layout: Layout) -> list[InputError]:
    names = [(f"tensor {name}", dtype) for name, (_, dtype) in layout.tensors.items()]
    names += [(f"storage {name}", dtype) for name, (_, dtype) in layout.storages.items()]
    return [
        InputError(f"{field}: dtype", "a dtype that refitd knows", dtype)
        for field, dtype in names
        if dtype not in ITEMSIZE
    ]


def _tied(layout: Layout) -> list[InputError]:
    return [
        InputError(
            f"tied {alias}", f"the shape and dtype of {name}: {layout.tensors[name]}", str(layout.tensors[alias])
        )
        for alias, name in layout.tied.items()
        if alias in layout.tensors and layout.tensors[alias] != layout.tensors[name]
    ]


def last_addresses(base: Ints, lo: Ints, hi: Ints, strides: Ints) -> Ints:
    """The last address of each view, for arrays (N,) and (N, D); 2**62 where it is beyond any storage."""
    reach = base + ((hi - lo - 1).astype(np.float64) * strides).sum(axis=1)
    exact = base + ((hi - lo - 1) * strides).sum(axis=1)
    return np.where(reach < 2.0**52, exact, np.int64(1) << 62)


def _geometry(layout: Layout) -> list[InputError]:
    if not len(layout.instances):
        return []
    tensor, storage, base, lo, hi, strides = layout.columns
    shapes = np.ones((len(layout.tensors), lo.shape[1]), dtype=np.int64)
    for row, (shape, _dtype) in zip(shapes, layout.tensors.values(), strict=True):
        row[: len(shape)] = shape[: lo.shape[1]]
    numel = np.array([count for count, _ in layout.storages.values()], dtype=np.int64)
    outside_tensor: Bools = np.any((hi > shapes[tensor]) | (lo >= hi), axis=1)
    outside_storage: Bools = np.greater_equal(last_addresses(base, lo, hi, strides), numel[storage])
    dtype_of = np.array([dtype for _, dtype in layout.tensors.values()])
    storage_dtype = np.array([dtype for _, dtype in layout.storages.values()])
    other_dtype: Bools = np.not_equal(dtype_of[tensor], storage_dtype[storage])
    wrong: Ints = np.flatnonzero(outside_tensor | outside_storage | other_dtype)
    pieces = layout.pieces() if len(wrong) else ()
    return [
        error
        for i in wrong.tolist()
        for error in _describe(layout, pieces[i], bool(outside_tensor[i]), bool(outside_storage[i]))
    ]


def _describe(layout: Layout, piece: Piece, outside_tensor: bool, outside_storage: bool) -> list[InputError]:
    field = f"piece of {piece.tensor} in {piece.storage}"
    shape, dtype = layout.tensors[piece.tensor]
    numel, storage_dtype = layout.storages[piece.storage]
    bad = []
    if outside_tensor:
        bad.append(InputError(f"{field}: box", f"inside shape {shape}", f"{piece.box.lo} to {piece.box.hi}"))
    if outside_storage:
        view = f"offset {piece.offset}, extents {piece.box.shape}, strides {piece.strides}"
        bad.append(InputError(f"{field}: view", f"inside {numel} elements", view))
    if dtype != storage_dtype:
        bad.append(InputError(f"{field}: dtype", f"{dtype}, the tensor's", f"{storage_dtype}, the storage's"))
    return bad


def _overlaps(layout: Layout) -> list[InputError]:
    storage = layout.instances[:, 1]
    shared = np.bincount(storage, minlength=len(layout.storages)) > 1
    rows = np.flatnonzero(shared[storage])
    if not len(rows):
        return []
    pieces = layout.pieces()
    by_storage: dict[int, list[tuple[int, int, Piece]]] = {}
    base, lo, hi, strides = layout.columns[2:]
    last = last_addresses(base, lo, hi, strides)
    for i in rows.tolist():
        by_storage.setdefault(int(storage[i]), []).append((int(base[i]), int(last[i]), pieces[i]))
    return [error for entries in by_storage.values() for error in _sweep(sorted(entries))]


def _sweep(entries: list[tuple[int, int, Piece]]) -> list[InputError]:
    bad: list[InputError] = []
    open_entries: list[tuple[int, int, Piece]] = []
    for entry in entries:
        open_entries = [other for other in open_entries if other[1] >= entry[0]]
        bad += [_overlap(other[2], entry[2]) for other in open_entries if _clash(other[2], entry[2])]
        open_entries.append(entry)
        if len(bad) >= _LIMIT:
            break
    return bad


def _clash(a: Piece, b: Piece) -> bool:
    return views_overlap(a.offset, view_dims(a.box, a.strides), b.offset, view_dims(b.box, b.strides))


def _overlap(a: Piece, b: Piece) -> InputError:
    field = f"storage {a.storage}: pieces of {a.tensor} and {b.tensor}"
    got = f"{a.box.lo}-{a.box.hi} at {a.offset} and {b.box.lo}-{b.box.hi} at {b.offset}"
    return InputError(field, "no common element unless tied", got)
