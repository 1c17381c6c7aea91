"""torch tensors to layout records: plain tensors and DTensors on any mesh. Imports torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from refitd.errors import InputError, LayoutError
from refitd.layout.box import Box, Piece, whole
from refitd.layout.dtypes import ITEMSIZE

Runs = list[tuple[int, int]]  # half-open index ranges of one dimension, in the order of the local tensor
Records = tuple[
    dict[str, tuple[tuple[int, ...], str]], dict[str, tuple[int, str]], list[Piece], tuple[str, ...], dict[str, str]
]  # fmt: skip


def records(tensors: Mapping[str, torch.Tensor], keep: Iterable[str]) -> Records:
    """What `Layout.from_pieces` takes. Raises LayoutError naming every tensor that cannot be laid out."""
    facts: dict[str, tuple[tuple[int, ...], str]] = {}
    storages: dict[str, tuple[int, str]] = {}
    pieces: list[Piece] = []
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    bad: list[InputError] = []
    for name, tensor in tensors.items():
        try:
            local, boxes = _boxes(name, tensor)
            facts[name] = (tuple(tensor.shape), _dtype(name, tensor))
        except InputError as error:
            bad.append(error)
            continue
        first = seen.setdefault(_identity(name, tensor, local), name)
        if first != name:
            tied[name] = first
            continue
        storages[name] = (_numel(local), facts[name][1])
        pieces += [Piece(name, box, name, _offset(start, local.stride()), local.stride()) for box, start in boxes]
    if bad:
        raise LayoutError(bad)
    return facts, storages, pieces, tuple(keep), tied


def state_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a module, the live tensors."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank has of a tensor: itself, or a DTensor's local tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _dtype(name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise InputError(f"tensor {name}: dtype", "a dtype that refitd knows", dtype)
    return dtype


def _numel(local: torch.Tensor) -> int:
    if not local.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))


def _identity(name: str, tensor: torch.Tensor, local: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two names over the same view of the same memory."""
    address = local.data_ptr() if local.device.type != "meta" else 0
    if not address or not local.numel():
        return (name,)
    return (local.device, address, tensor.shape, local.shape, local.stride(), local.dtype)


def _offset(start: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(index * stride for index, stride in zip(start, strides, strict=True))


def _boxes(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, list[tuple[Box, tuple[int, ...]]]]:
    """The local tensor, and its boxes with where each starts in it."""
    local = local_tensor(tensor)
    if local.layout != torch.strided:
        raise InputError(f"tensor {name}", "a strided tensor", str(local.layout))
    if local is tensor:
        return local, [(whole(tuple(tensor.shape)), (0,) * tensor.dim())]
    runs = _sharded_runs(name, tensor)
    if runs is None:
        return local, []
    sizes = tuple(sum(stop - start for start, stop in axis) for axis in runs)
    if sizes != tuple(local.shape):
        raise InputError(f"tensor {name}: local shape", f"{sizes} as its placements say", str(tuple(local.shape)))
    return local, _product(runs)


def _product(runs: list[Runs]) -> list[tuple[Box, tuple[int, ...]]]:
    axes = []
    for axis in runs:
        starts = itertools.accumulate((stop - start for start, stop in axis), initial=0)
        axes.append([(start, stop, at) for (start, stop), at in zip(axis, starts, strict=False)])
    boxes = []
    for combination in itertools.product(*axes):
        box = Box(tuple(c[0] for c in combination), tuple(c[1] for c in combination))
        boxes.append((box, tuple(c[2] for c in combination)))
    return boxes


def _sharded_runs(name: str, tensor: Any) -> list[Runs] | None:
    """Index ranges of each dimension on this rank; None where this rank is not in the mesh."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    runs: list[Runs] = [[(0, size)] for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise InputError(f"tensor {name}: placement", "Shard, _StridedShard or Replicate", str(placement))
        split = int(getattr(placement, "split_factor", 1))
        runs[dim] = _shard(runs[dim], split, mesh.size(mesh_dim), coordinate[mesh_dim])
    return [[run for run in axis if run[0] < run[1]] for axis in runs]


def _shard(runs: Runs, split: int, chunks: int, index: int) -> Runs:
    """What shard ``index`` of ``chunks`` keeps: a share of each of ``split`` parts."""
    result: Runs = []
    for part in range(split):
        result += _chunk(_chunk(runs, split, part), chunks, index)
    return result


def _chunk(runs: Runs, chunks: int, index: int) -> Runs:
    """Chunk ``index`` as ``torch.chunk`` cuts: equal sizes rounded up, the last ones short or empty."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // chunks)
    return _slice(runs, min(index * size, total), min((index + 1) * size, total))


def _slice(runs: Runs, begin: int, end: int) -> Runs:
    result: Runs = []
    position = 0
    for start, stop in runs:
        low, high = max(begin - position, 0), min(end - position, stop - start)
        if low < high:
            result.append((start + low, start + high))
        position += stop - start
    return result
