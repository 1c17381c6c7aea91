"""The torch front end, held to torch's own arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from refitd.errors import LayoutError
from refitd.layout import Box, Layout, check_side


@pytest.fixture
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def as_rank(rank: int, world: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def shard_of(whole: torch.Tensor, sizes: Sequence[int], placements: Sequence[Placement]) -> DTensor:
    """The local part of ``whole`` on this rank, cut by torch itself."""
    return shard_on(whole, DeviceMesh("cpu", torch.arange(math.prod(sizes)).reshape(*sizes)), placements)


def shard_on(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The local part of ``whole`` on this rank of ``mesh``, cut by torch itself."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            parts, _ = placement._split_tensor(local, mesh.size(dim), with_padding=False, contiguous=True)
            local = parts[coordinate[dim]]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def test_strided_shard_bounds(group: None) -> None:
    """B1: arange(5) over (dp=2, tp=2) gives [0,1], [3], [2], [4] at offsets 0, 3, 2, 4."""
    seen, layouts = [], {}
    for rank in range(4):
        as_rank(rank, 4)
        tensor = shard_of(torch.arange(5.0), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)])
        layouts[f"trainer/a/{rank}"] = layout = Layout.from_tensors({"w": tensor})
        (piece,) = layout.pieces()
        assert tensor.to_local().tolist() == [float(i) for i in range(piece.box.lo[0], piece.box.hi[0])]
        seen.append((piece.box.lo[0], piece.box.shape[0]))
    assert seen == [(0, 2), (3, 1), (2, 1), (4, 1)]
    check_side(layouts)


PLACEMENTS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]


def assert_torch_agrees(layout: Layout, tensor: DTensor, whole: torch.Tensor) -> None:
    """The pieces rebuild torch's local tensor, and lie at torch's own offsets where torch can say them."""
    layout.check()
    local = tensor.to_local()
    rebuilt = torch.zeros_like(local).flatten()
    for piece in layout.pieces():
        part = whole[tuple(slice(a, b) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))]
        rebuilt.as_strided(piece.box.shape, piece.strides, piece.offset).copy_(part)
    assert rebuilt.reshape(local.shape).tolist() == local.tolist()
    if not any(isinstance(p, _StridedShard) for p in tensor.placements):
        expected, offset = compute_local_shape_and_global_offset(whole.shape, tensor.device_mesh, tensor.placements)
        boxes = [(p.box.shape, p.box.lo) for p in layout.pieces()]
        assert boxes == ([(tuple(expected), tuple(offset))] if math.prod(expected) else [])


@pytest.mark.parametrize("shape", [(5, 7), (8, 6), (1, 2)])
@pytest.mark.parametrize("placements", list(itertools.product(PLACEMENTS, repeat=2)), ids=str)
def test_pieces_equal_what_torch_cuts(group: None, shape: tuple[int, int], placements: tuple[Placement, ...]) -> None:
    """For every pair of placements on a (2, 3) mesh the pieces name the elements that torch put in the local tensor."""
    whole = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    layouts = {}
    for rank in range(6):
        as_rank(rank, 6)
        tensor = shard_of(whole, (2, 3), placements)
        layouts[f"trainer/a/{rank}"] = layout = Layout.from_tensors({"w": tensor})
        assert_torch_agrees(layout, tensor, whole)
    check_side(layouts)


def test_shards_of_fsdp_over_tp_agree_with_torch_s_offsets(group: None) -> None:
    """The composition that FSDP2 uses has one piece a rank, where torch says it is."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    for rank in range(4):
        as_rank(rank, 4)
        tensor = shard_of(torch.arange(22.0).reshape(11, 2), (2, 2), placements)
        expected, offset = compute_local_shape_and_global_offset((11, 2), tensor.device_mesh, placements)
        (piece,) = Layout.from_tensors({"w": tensor}).pieces()
        assert (piece.box.shape, piece.box.lo) == (tuple(expected), tuple(offset))


def test_an_empty_shard_holds_nothing_and_keeps_the_global_shape(group: None) -> None:
    """The third of three ranks has no rows of two; its layout still knows the tensor."""
    as_rank(2, 3)
    layout = Layout.from_tensors({"w": shard_of(torch.zeros(2, 4), (3,), [Shard(0)])})
    assert (dict(layout.tensors), layout.storages["w"], layout.pieces()) == (
        {"w": ((2, 4), "float32")},
        (0, "float32"),
        (),
    )


def test_partial_is_refused_by_name(group: None) -> None:
    """A DTensor that waits for its reduction has no values to send; all such tensors are listed."""
    as_rank(0, 2)
    mesh = DeviceMesh("cpu", torch.arange(2))
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
    with pytest.raises(LayoutError) as caught:
        Layout.from_tensors({"a": partial, "b": torch.zeros(2, dtype=torch.complex64), "c": partial})
    assert [v.field for v in caught.value.violations] == [
        "tensor a: placement", "tensor b: dtype", "tensor c: placement",
    ]  # fmt: skip


def test_plain_tensors_are_whole_with_their_own_strides() -> None:
    """A plain tensor is one piece; its storage ends at its last element in memory."""
    x = torch.zeros(4, 6)[:, ::2]
    layout = Layout.from_tensors({"x": x, "t": torch.zeros(2, 3).t(), "s": torch.tensor(1, dtype=torch.int64)})
    layout.check()
    assert dict(layout.storages) == {"s": (1, "int64"), "t": (6, "float32"), "x": (23, "float32")}
    assert [(p.tensor, p.offset, p.strides) for p in layout.pieces()] == [
        ("s", 0, ()),
        ("t", 0, (1, 3)),
        ("x", 0, (6, 2)),
    ]


def test_a_module_gives_parameters_and_persistent_buffers() -> None:
    """Tied weights become aliases; buffers that are not persistent are left out."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("bias", torch.zeros(4))
            self.register_buffer("cache", torch.zeros(9), persistent=False)

    layout = Layout.from_module(Model())
    layout.check()
    assert dict(layout.tied) == {"head.weight": "embed.weight"}
    assert list(layout.storages) == ["bias", "embed.weight"]
    assert layout.pieces()[1].box == Box((0, 0), (5, 3))
    assert layout.tensors["head.weight"] == ((5, 3), "float32")


THREE = [Replicate(), Shard(0), Shard(1), Shard(2), _StridedShard(0, split_factor=2)]


@pytest.mark.parametrize("shape", [(5, 3, 7), (4, 1, 2)])
@pytest.mark.parametrize("ranks", [list(range(8)), [7, 2, 5, 0, 6, 1, 4, 3]], ids=["ordered", "scattered"])
@pytest.mark.parametrize(
    "placements", [p for i, p in enumerate(itertools.product(THREE, repeat=3)) if i % 9 == 4], ids=str
)
def test_three_mesh_dimensions_and_ranks_in_any_order(
    group: None, shape: tuple[int, ...], ranks: list[int], placements: tuple[Placement, ...]
) -> None:
    """On a 2 x 2 x 2 mesh of any rank order, pieces rebuild torch's local tensor and sit at torch's own offsets."""
    whole = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    layouts = {}
    for rank in range(8):
        as_rank(rank, 8)
        mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(2, 2, 2))
        tensor = shard_on(whole, mesh, placements)
        layouts[f"trainer/a/{rank}"] = layout = Layout.from_tensors({"w": tensor})
        assert_torch_agrees(layout, tensor, whole)
    check_side(layouts)


def test_a_rank_outside_the_mesh_knows_the_tensor_and_holds_nothing(group: None) -> None:
    """A mesh of ranks 3 and 1: rank 1 is its second, rank 2 is not in it."""
    found = {}
    for rank in (1, 2, 3):
        as_rank(rank, 4)
        mesh = DeviceMesh("cpu", torch.tensor([3, 1]))
        local = torch.zeros(2 if rank == 3 else 1, 2) if rank != 2 else torch.zeros(0, 2)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(3, 2), stride=(2, 1))
        layout = Layout.from_tensors({"w": tensor})
        assert layout.tensors["w"] == ((3, 2), "float32")
        found[rank] = [p.box for p in layout.pieces()]
    assert found == {3: [Box((0, 0), (2, 2))], 1: [Box((2, 0), (3, 2))], 2: []}
