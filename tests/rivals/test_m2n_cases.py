"""The cases of NCCL M2N's own test program: shapes, meshes of two axes, sharded dimensions and element sizes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from rival_meshes import (
    Mesh,
    R,
    arrays_of,
    box_of,
    carry_out,
    counters,
    deliver,
    mesh,
    numbers,
    plan_of,
    planes,
    ranks_of,
    side_of,
)  # fmt: skip

from refitd import MismatchError
from refitd.layout import Side
from refitd.layout.side import SideBuilder, StoragePattern
from refitd.layout.tp import dense_strides
from refitd.plan import plan_sides, topology

SD = [pytest.param(pair, id=f"sd{pair[0]}{pair[1]}") for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]
PL = [pytest.param(pair, id="-".join(pair)) for pair in itertools.product(("rs", "sr"), repeat=2)]
ESZ = [pytest.param(size, id=f"esz{size}") for size in (4, 2, 1)]


def side(first: int, shape: tuple[int, ...], placement: str, dim: int) -> Mesh:
    """A mesh of two axes with ``rs`` (replicated, sharded) or ``sr`` placements."""
    cuts = [R if letter == "r" else dim for letter in placement]
    return mesh(range(first, first + int(np.prod(shape))), *cuts, shape=shape)


def line(first: int, count: int, cut: int | None) -> Mesh:
    return mesh(range(first, first + count), cut)


@pytest.mark.parametrize("esz", ESZ)
def test_full_replication(esz: int) -> None:
    """(200, 200), replicated on both sides: where the rival lets source replica 0 send every copy, all of ours send
    (`test_m2n_limits`); each destination has the whole tensor."""
    deliver(planes((200, 200), esz), line(0, 3, R), line(3, 3, R))


@pytest.mark.parametrize("esz", ESZ)
@pytest.mark.parametrize("sd", SD)
def test_full_sharding(sd: tuple[int, int], esz: int) -> None:
    """(200, 200), one axis, sharded dimension by side; the element sizes as planes of 32-bit counters."""
    deliver(planes((200, 200), esz), line(0, 4, sd[0]), line(4, 4, sd[1]))


@pytest.mark.parametrize("pl", PL)
@pytest.mark.parametrize("sd", SD)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2)], ids=["m2x4", "m4x2", "m2x2"])
def test_2d_placement(sizes: tuple[int, int], sd: tuple[int, int], pl: tuple[str, str]) -> None:
    """(200, 200) bfloat16 over meshes of two axes, the size of the first by side."""
    world = 8 if max(sizes) == 4 else 4
    source, target = ((size, world // size) for size in sizes)
    deliver(planes((200, 200), 2), side(0, source, pl[0], sd[0]), side(world, target, pl[1], sd[1]))


@pytest.mark.parametrize("pl", PL)
@pytest.mark.parametrize("sd", SD)
@pytest.mark.parametrize("ranks", [(6, 2), (2, 6)], ids=["3to1", "1to3"])
def test_uneven_ratio(ranks: tuple[int, int], sd: tuple[int, int], pl: tuple[str, str]) -> None:
    """(240, 240), three times as many ranks on one side as on the other."""
    source, target = ((2, count // 2) for count in ranks)
    deliver(planes((240, 240)), side(0, source, pl[0], sd[0]), side(ranks[0], target, pl[1], sd[1]))


@pytest.mark.parametrize("pl", PL)
@pytest.mark.parametrize("sd", SD)
@pytest.mark.parametrize("shape", [(576, 576), (3072, 6144), (3072, 3072)], ids=["576", "3072x6144", "3072"])
def test_tensor_size(shape: tuple[int, int], sd: tuple[int, int], pl: tuple[str, str]) -> None:
    """Larger tensors over axes of 4: the values of whole rows differ, where the rival's repeat modulo 256 and swapped
    columns would pass."""
    pl_source, pl_target = (side(first, (4, 2), p, dim) for first, p, dim in zip((0, 8), pl, sd, strict=True))
    deliver(planes(shape), pl_source, pl_target)


@pytest.mark.parametrize(
    "sd", [(0, 0), (0, 1), (0, 2), (2, 0), (1, 0), (1, 1), (1, 2)], ids=lambda p: f"sd{p[0]}{p[1]}"
)
@pytest.mark.parametrize("shape", [(64, 128, 128), (128, 64, 64)], ids=str)
def test_nd_tensors(shape: tuple[int, ...], sd: tuple[int, int]) -> None:
    """Three dimensions, each cut against each."""
    deliver(planes(shape), line(0, 2, sd[0]), line(2, 4, sd[1]))


def test_staging_slot_pressure() -> None:
    """(64, 128, 128), S(0) to S(2), four ranks: buckets of 16 bytes and up instead of staging slots that fill up."""
    shape = (64, 128, 128)
    source, target = line(0, 2, 0), line(2, 2, 2)
    deliver(planes(shape), source, target)
    small = (4, 8, 8)
    whole = planes(small)
    sources, targets = ranks_of(whole, source), ranks_of(whole, target)
    plan = plan_sides(side_of(sources), side_of(targets), topology("h100-nvl8"), bucket_bytes=16)
    memory = arrays_of(targets, target, whole, filled=False)
    brought = carry_out(plan, arrays_of(sources, source, whole, filled=True), memory)
    assert {edge[:2]: len(ids) for edge, ids in brought.items()} == {(s, d): 64 for s in (0, 1) for d in (2, 3)}
    assert max(bucket.nbytes for rank in targets for bucket in plan.program(rank.key).buckets) == 8


@pytest.mark.parametrize("esz", ESZ)
def test_1d_full_sharding(esz: int) -> None:
    """8192 elements, S(0) to S(0)."""
    deliver(planes((8192,), esz), line(0, 4, 0), line(4, 2, 0))


@pytest.mark.parametrize("pl", PL)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2)], ids=["m2x4", "m4x2", "m2x2"])
def test_1d_2d_placement(sizes: tuple[int, int], pl: tuple[str, str]) -> None:
    """8192 elements over meshes of two axes."""
    world = 8 if max(sizes) == 4 else 4
    source, target = ((size, world // size) for size in sizes)
    deliver(planes((8192,)), side(0, source, pl[0], 0), side(world, target, pl[1], 0))


@pytest.mark.parametrize("pl", PL)
@pytest.mark.parametrize("ranks", [(6, 2), (2, 6)], ids=["3to1", "1to3"])
def test_1d_uneven(ranks: tuple[int, int], pl: tuple[str, str]) -> None:
    """16384 elements, which six shards do not divide: the rival's default path drops the rest without a word."""
    source, target = ((2, count // 2) for count in ranks)
    deliver(planes((16384,)), side(0, source, pl[0], 0), side(ranks[0], target, pl[1], 0))


@pytest.mark.parametrize("pl", PL)
@pytest.mark.parametrize("count", [16384, 1_048_576, 4_194_304])
def test_1d_tensor_size(count: int, pl: tuple[str, str]) -> None:
    """Vectors of 16 Ki to 4 Mi elements."""
    deliver(planes((count,)), side(0, (2, 4), pl[0], 0), side(8, (4, 2), pl[1], 0))


@pytest.mark.parametrize("pl", PL)
def test_cross_dim_regression_2d(pl: tuple[str, str]) -> None:
    """(200, 200), first axes of 2 and 4, rows to columns."""
    deliver(planes((200, 200)), side(0, (2, 4), pl[0], 0), side(8, (4, 2), pl[1], 1))


def test_cross_dim_regression_3d() -> None:
    """(64, 128, 128), S(0) to S(1)."""
    deliver(planes((64, 128, 128)), side(0, (2, 2), "rs", 0), side(4, (2, 2), "sr", 1))


def test_cross_dim_regression_of_256_ranks_moves_data() -> None:
    """[DP8, EP16] S(0) to [DP4, TP32] S(2): the meshes of 256 ranks with a tensor of (16, 6, 64)."""
    deliver(planes((16, 6, 64), 2), side(0, (8, 16), "rs", 0), side(128, (4, 32), "rs", 2))


def _factored(prefix: str, first: int, shape: tuple[int, ...], of: Mesh) -> Side:
    """A side of a large tensor, without memory for it: one pattern over all ranks, domains of 8."""
    from refitd.layout.side import Pattern

    places = topology("h100-nvl8").place(len(numbers(of)), prefix)
    builder = SideBuilder([(f"{prefix}/{n}", *place) for n, place in zip(numbers(of), places, strict=True)])
    boxes = [box_of(shape, of, n) for n in numbers(of)]
    unique = sorted(set(boxes))
    slot = np.arange(len(boxes))
    pattern = Pattern(
        shape, "bfloat16", len(boxes), np.array(unique), slot, np.array([unique.index(box) for box in boxes]),
        np.zeros_like(slot), np.array([dense_strides(box.shape) for box in boxes]),
    )  # fmt: skip
    group = builder.group(range(len(boxes)))
    storage = builder.storage(["w"], group, StoragePattern("bfloat16", np.array([box.volume for box in boxes])))
    builder.add(["w"], pattern, group, storage)
    assert first == numbers(of)[0]
    return builder.build()


def _index(box: Any, address: np.ndarray) -> np.ndarray:
    """The place in the whole tensor of addresses in a dense part of it."""
    return np.stack(np.unravel_index(address, box.shape), axis=1) + np.array(box.lo)


def test_cross_dim_regression_of_256_ranks_at_full_size() -> None:
    """(256, 7168, 2048) bfloat16, seven gigabytes: every move of some ranks begins and ends at the same places of the
    tensor on both sides, they add up to the part, and each domain takes one copy over the network."""
    shape = (256, 7168, 2048)
    source, target = side(0, (8, 16), "rs", 0), side(128, (4, 32), "rs", 2)
    plan = plan_sides(_factored("s", 0, shape, source), _factored("d", 128, shape, target), topology("h100-nvl8"))
    whole = int(np.prod(shape)) * 2
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"] == 4 * whole
    part = whole // 32
    for rank in (128, 177, 255):
        program = plan.program(f"d/{rank}")
        assert sum(bucket.nbytes for bucket in program.receives()) == part
        landing = box_of(shape, target, rank)
        for bucket in program.receives():
            moves = program.moves_of(bucket)
            number = int(bucket.src.split("/")[1])
            origin = box_of(shape, source, number) if bucket.src[0] == "s" else box_of(shape, target, number)
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                row, col = i * (moves[:, 8] - 1), j * (moves[:, 9] - 1)
                there = moves[:, 1] + row * moves[:, 2] + col * moves[:, 3]
                here = moves[:, 5] + row * moves[:, 6] + col * moves[:, 7]
                assert (_index(origin, there) == _index(landing, here)).all()


def test_tiny_contribution() -> None:
    """(4,) of one byte each, replicated: four elements, four planes."""
    deliver(planes((4,), 1), line(0, 2, R), line(2, 2, R))
    deliver(planes((4,), 1), line(0, 2, R), line(2, 2, 0))


def test_destination_first() -> None:
    """4096 elements, destinations with lower ranks than the sources (the rival's copy-engine path wants sources
    first)."""
    deliver(planes((4096,)), line(4, 4, 0), line(0, 4, 0))


@pytest.mark.parametrize("esz", [2, 1])
def test_two_ranks(esz: int) -> None:
    """4096 elements from one rank to one."""
    deliver(planes((4096,), esz), line(0, 1, 0), line(1, 1, 0))


def test_four_signals() -> None:
    """4 elements of bfloat16 over four ranks: two to two."""
    deliver(planes((4,), 2), line(0, 2, 0), line(2, 2, 0))


def test_streams_three_calls() -> None:
    """(64, 64) float32, three calls one after the other with other values: each call delivers its own."""
    for first in (1, 4097, 8193):
        whole = {"w": counters((64, 64), first).to(torch.float32)}
        deliver(whole, line(0, 2, 0), line(2, 2, 1))


def test_meshes_overlap() -> None:
    """The rival answers meshes that overlap with an error (`ncclInvalidArgument`); right is the data, as one rank may
    train and serve."""
    deliver(planes((8, 8)), line(0, 4, 0), line(2, 4, 1))


def test_a_group_with_a_bad_entry_names_it() -> None:
    """A group of three tensors with one that has another shape: the rival says entry 0 of 3, ours names the tensor and
    moves nothing."""
    good = {name: counters((4, 4), i * 16 + 1) for i, name in enumerate(("a", "b", "c"))}
    bad = good | {"b": counters((4, 5), 99)}
    with pytest.raises(MismatchError) as caught:
        plan_of(ranks_of(good, line(0, 2, 0), "s"), ranks_of(bad, line(2, 2, 0), "d"))
    assert [v.field for v in caught.value.violations] == ["tensor b"]
