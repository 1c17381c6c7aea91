"""`reshard`: run a whole plan in memory. The reference that every transport is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from refitd.errors import InputError
from refitd.layout import Layout
from refitd.plan.execute import Array, array_dtype, copy
from refitd.plan.planner import make_plan
from refitd.plan.tables import Rank

if TYPE_CHECKING:
    import torch


def reshard(
    src: Sequence[Layout], dst: Sequence[Layout], shards: Sequence[Mapping[str, Any]]
) -> list[dict[str, torch.Tensor]]:
    """Deliver ``shards`` (one mapping storage name -> tensor or flat array for each source layout) to ``dst``.

    A tensor may be any view whose elements span the storage: element 0 is its first element in memory, as
    `Layout.from_tensors` lays it out. Returns flat tensors by storage name for each destination; what no piece covers
    is zero. Raises InputError for storages that are missing, of another dtype or too small, LayoutError for a layout
    that contradicts itself; see also `make_plan`.
    """
    if len(src) != len(shards):
        raise InputError("shards", f"one mapping for each of {len(src)} source layouts", str(len(shards)))
    sources = [Rank(f"trainer/reshard/{i}", f"source {i}", f"source {i}", lay) for i, lay in enumerate(src)]
    members = [Rank(f"engine/reshard/{i}", "destination", "destination", lay) for i, lay in enumerate(dst)]
    for rank in (*sources, *members):
        rank.layout.check(rank.key)
    plan = make_plan(sources, members)
    arrays = {r.key: _flat_sources(r.layout, shard) for r, shard in zip(sources, shards, strict=True)}
    arrays |= {r.key: _zeros(r.layout) for r in members}
    programs = [plan.program(r.key) for r in members]
    for stage in (0, 1):
        for program in programs:
            for bucket in program.receives():
                if bucket.stage == stage:
                    copy(program, bucket, arrays[bucket.src], arrays[bucket.dst])
    return [{name: _tensor(a, r.layout.storages[name][1]) for name, a in arrays[r.key].items()} for r in members]


def _zeros(layout: Layout) -> dict[str, Array]:
    return {name: np.zeros(numel, array_dtype(dtype)) for name, (numel, dtype) in layout.storages.items()}


def _flat_sources(layout: Layout, shard: Mapping[str, Any]) -> dict[str, Array]:
    used = {piece.storage for piece in layout.pieces()}
    return {name: _flat(name, shard.get(name), *layout.storages[name]) for name in sorted(used)}


def _flat(name: str, value: Any, numel: int, dtype: str) -> Array:
    field = f"shard {name}"
    if value is None:
        raise InputError(field, "a tensor", "none")
    if isinstance(value, np.ndarray):
        if value.dtype != array_dtype(dtype) or value.ndim != 1 or value.size < numel:
            raise InputError(field, f"a flat array of {numel} {array_dtype(dtype)}", f"{value.dtype} {value.shape}")
        return value
    return _flat_tensor(field, value, numel, dtype)


def _flat_tensor(field: str, value: Any, numel: int, dtype: str) -> Array:
    import torch

    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    tensor = getattr(tensor, "_local_tensor", tensor)
    if str(tensor.dtype) != f"torch.{dtype}":
        raise InputError(field, dtype, str(tensor.dtype))
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if room < numel:
        raise InputError(field, f"memory for {numel} elements", str(room))
    flat = tensor.as_strided((numel,), (1,))
    return flat.view(_bits(torch, dtype)).numpy() if array_dtype(dtype) != np.dtype(_plain(dtype)) else flat.numpy()


def _plain(dtype: str) -> str:
    return "void" if dtype in ("bfloat16", "bool") or dtype.startswith("float8") else dtype


def _bits(torch: Any, dtype: str) -> Any:
    return getattr(torch, array_dtype(dtype).name)


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(array).view(getattr(torch, dtype))
