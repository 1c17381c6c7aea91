"""How the two sides cut the model: DTensor shards for trainers, fused tensor-parallel storages for engines.

The oracle at the end says which bytes an engine must hold, by plain slicing of the full weights: it shares no code
with refitd's planner or movers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from refitd.demo.weights import Spec, Weights, shapes
from refitd.hook.memory import shared_empty
from refitd.layout import Box, Layout, Piece

TRAINERS_PER_NODE = 2
TENSOR_PARALLEL = 2


# Trainers: every node holds the whole model, each tensor cut in rows over its two ranks.


def trainer_mesh(rank: int) -> DeviceMesh:
    """The mesh of the trainer that is number ``rank`` on its node: no collective ever runs on it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=TRAINERS_PER_NODE, store=FakeStore())
    return init_device_mesh("cpu", (TRAINERS_PER_NODE,))


def trainer_shards(weights: Weights, mesh: DeviceMesh) -> dict[str, DTensor]:
    """This rank's shards, in memory that a mover can read; integer buffers are replicated. Filled by `fill_shards`."""
    out = {}
    for name, full in weights.items():
        placement = Shard(0) if full.is_floating_point() else Replicate()
        local = shared_empty(tuple(_local(full, placement, mesh.get_local_rank()).shape), full.dtype)
        out[name] = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
        )
    return out


def fill_shards(shards: Mapping[str, DTensor], weights: Weights) -> None:
    """Copy this rank's rows of the full weights into its shards."""
    with torch.no_grad():
        for name, shard in shards.items():
            rank = shard.device_mesh.get_local_rank()
            shard.to_local().copy_(_local(weights[name], shard.placements[0], rank))


def _local(full: Tensor, placement: object, rank: int) -> Tensor:
    if not isinstance(placement, Shard):
        return full
    chunks = full.chunk(TRAINERS_PER_NODE, placement.dim)
    return chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)


# Engines: two ranks hold the whole model; q, k and v of a layer are one storage.


@dataclass(frozen=True)
class Part:
    """Elements ``lo`` to ``hi`` along ``dim`` of a logical tensor; parts of one storage lie below each other."""

    tensor: str
    dim: int
    lo: int
    hi: int

    def cut(self, full: Tensor) -> Tensor:
        return full.narrow(self.dim, self.lo, self.hi - self.lo)


Parts = dict[str, list[Part]]


def engine_parts(spec: Spec, rank: int) -> Parts:
    """Storage name -> parts, for one of the two ranks of a replica."""
    sizes = shapes(spec)
    parts: Parts = {}
    for name, shape in sizes.items():
        storage = _storage_of(name)
        dim = _cut_dimension(name)
        lo, hi = (0, shape[0]) if dim is None else _range(shape[dim], rank)
        parts.setdefault(storage, []).append(Part(name, dim or 0, lo, hi))
    return parts


def _storage_of(tensor: str) -> str:
    for part in ("query", "key", "value"):
        tensor = tensor.replace(f"attention.self.{part}.", "attention.self.qkv.")
    return tensor


def _cut_dimension(tensor: str) -> int | None:
    """Heads, the wide MLP dimension and the vocabulary are cut; what is added after a row-parallel product is not."""
    if ".attention.self." in tensor or ".intermediate." in tensor or tensor == "embeddings.word_embeddings.weight":
        return 0
    if tensor.endswith(("attention.output.dense.weight", "output.dense.weight")):
        return 1
    return None


def _range(size: int, rank: int) -> tuple[int, int]:
    half = -(-size // TENSOR_PARALLEL)
    return rank * half, min((rank + 1) * half, size)


def engine_dtype(tensor: str) -> torch.dtype:
    """Engines hold floats as bfloat16 and buffers as they are."""
    return torch.int64 if tensor == "embeddings.position_ids" else torch.bfloat16


def engine_layout(spec: Spec, rank: int) -> Layout:
    """The geometry of one engine rank, for refitd."""
    sizes = shapes(spec)
    tensors = {name: (shape, _dtype_name(name)) for name, shape in sizes.items()}
    storages, pieces = {}, []
    for storage, parts in engine_parts(spec, rank).items():
        end = 0
        for part, box in ((p, _box(p, sizes[p.tensor])) for p in parts):
            pieces.append(Piece(part.tensor, box, storage, end, _row_major(box.shape)))
            end += box.volume
        storages[storage] = (end, _dtype_name(parts[0].tensor))
    return Layout.from_pieces(tensors=tensors, storages=storages, pieces=pieces)


def _dtype_name(tensor: str) -> str:
    return str(engine_dtype(tensor)).removeprefix("torch.")


def _box(part: Part, shape: tuple[int, ...]) -> Box:
    lo, hi = [0] * len(shape), list(shape)
    lo[part.dim], hi[part.dim] = part.lo, part.hi
    return Box(tuple(lo), tuple(hi))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def engine_storages(spec: Spec, rank: int) -> dict[str, Tensor]:
    """Zeros for every storage of one engine rank, 1-D, in memory that a mover can write."""
    layout = engine_layout(spec, rank)
    return {name: shared_empty((numel,), getattr(torch, dtype)) for name, (numel, dtype) in layout.storages.items()}


# The oracle.


def expected_storages(weights: Weights, spec: Spec, rank: int) -> dict[str, Tensor]:
    """What an engine rank must hold after a refit of ``weights``: slices, cast to the engine's dtype, 1-D."""
    return {
        storage: torch.cat([p.cut(weights[p.tensor].detach()).to(engine_dtype(p.tensor)).flatten() for p in parts])
        for storage, parts in engine_parts(spec, rank).items()
    }


def gather(storages: Mapping[int, Mapping[str, Tensor]], spec: Spec) -> Weights:
    """The full weights (engine dtypes) out of both ranks' storages."""
    full = {name: torch.empty(shape, dtype=engine_dtype(name)) for name, shape in shapes(spec).items()}
    for rank, held in storages.items():
        for storage, part, start in _places(engine_parts(spec, rank), full):
            target = part.cut(full[part.tensor])
            target.copy_(held[storage][start : start + target.numel()].reshape(target.shape))
    return full


def _places(parts: Parts, full: Weights) -> Iterator[tuple[str, Part, int]]:
    for storage, column in parts.items():
        start = 0
        for part in column:
            yield storage, part, start
            start += part.cut(full[part.tensor]).numel()


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def digest(storages: Mapping[str, Tensor]) -> str:
    """Hex digest over the bytes of all storages, in the order of their names."""
    state = xxhash.xxh3_128()
    for name in sorted(storages):
        state.update(raw(storages[name]))
    return state.hexdigest()
