"""What the rivals refuse, leave unchecked or do badly: each limit of theirs as a case that must come out right here."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from rival_meshes import (
    Mesh,
    R,
    arrays_of,
    bits,
    box_of,
    carry_out,
    counters,
    deliver,
    layout_of,
    mesh,
    numbers,
    part,
    plan_of,
    planes,
    ranks_of,
    side_of,
)  # fmt: skip

from refitd import InputError, Layout, MismatchError, reshard
from refitd.layout import Box, Piece
from refitd.plan import Rank, copy, lose, make_plan, plan_sides, topology


def grid(first: int, shape: tuple[int, ...], *cuts: int | None) -> Mesh:
    return mesh(range(first, first + int(np.prod(shape))), *cuts, shape=shape)


ROWS, COLS = grid(0, (2,), 0), grid(50, (3,), 1)


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        pytest.param(grid(0, (2, 2), 0, 1), grid(9, (2, 3), 1, 0), (7, 9), id="two axes, two dims"),
        pytest.param(grid(0, (2, 3), 0, 0), grid(9, (3, 2), 0, 0), (17, 3), id="two axes, one dim, uneven"),
        pytest.param(grid(0, (2, 2, 2), 0, R, 1), grid(9, (2, 2, 3), 1, 0, R), (9, 10), id="3-D meshes"),
        pytest.param(grid(0, (2, 2, 2, 2), 0, 0, 1, 0), grid(20, (2, 3, 2), 1, 0, 0), (19, 7), id="4-D mesh"),
        pytest.param(mesh([7, 2, 11], 0), mesh([[30, 4], [17, 5]], R, 1), (10, 6), id="ranks neither run nor sorted"),
        pytest.param(mesh([[3, 0], [2, 1]], 1, 0), mesh([9, 4], 1), (6, 10), id="mesh not row-major"),
        pytest.param(grid(0, (2,), R), grid(2, (3,), R), (5, 5), id="2 replicas to 3"),
        pytest.param(grid(0, (3, 2), R, 0), grid(6, (2, 5), R, 1), (8, 11), id="3 replicas to 2, uneven"),
        pytest.param(grid(0, (4,), 0), grid(4, (4,), 1), (5, 6), id="empty shards on both sides"),
        pytest.param(grid(0, (6,), 0), grid(6, (8,), 0), (4, 5), id="more ranks than rows"),
        pytest.param(grid(0, (3,), 1), grid(3, (2,), 0), (4, 0, 6), id="size-0 dim in the middle"),
        pytest.param(grid(0, (3,), 0), grid(3, (1,), R), (1,), id="one element over three"),
        pytest.param(grid(0, (1,), R), grid(1, (4,), R), (), id="scalar to four"),
        pytest.param(grid(0, (48,), 0), grid(48, (72,), 0), (144, 2), id="48 sources, 72 targets"),
        pytest.param(grid(0, (40,), 0), grid(40, (2,), 1), (40, 4), id="40 sources for one shard"),
    ],
)  # fmt: skip
def test_layouts_that_the_rival_refuses(source: Mesh, target: Mesh, shape: tuple[int, ...]) -> None:
    """M2N refuses two sharded axes, three mesh axes, gaps in rank lists, uneven or empty shards and more than 16 to 64
    peers; right is the data, through the reference, the explicit planner and the factored one."""
    whole = planes(shape)
    deliver(whole, source, target)
    sources, targets = ranks_of(whole, source, "s"), ranks_of(whole, target, "d", domain="engine")
    for plan in (plan_of(sources, targets), make_plan(sources, targets)):
        memory = arrays_of(targets, target, whole, filled=False)
        carry_out(plan, arrays_of(sources, source, whole, filled=True), memory)
        for rank, number in zip(targets, numbers(target), strict=True):
            assert memory[rank.key]["w"].tolist() == part(whole["w"], target, number).reshape(-1).tolist()
        assert plan.totals["network_bytes"] == 4 * whole["w"].numel()


@pytest.mark.parametrize(
    "shape", [(3, 4, 5, 6), (2, 3, 2, 5, 4), (3, 2, 2, 3, 2, 4), (2,) * 7, (2, 3, 2, 1, 2, 2, 3, 2)]
)
def test_tensors_of_four_to_eight_dimensions(shape: tuple[int, ...]) -> None:
    """M2N stops at three dimensions; right is any of them cut against any other, uneven sizes included."""
    last = len(shape) - 1
    for a, b in ((0, last), (last, 0), (1, last - 1), (last // 2, last // 2)):
        deliver(planes(shape), grid(0, (2,), a), grid(2, (3,), b))
    deliver(planes(shape), grid(0, (2, 2), 0, last), grid(4, (2, 2), 1, last - 1))


def test_nine_dimensions_are_refused() -> None:
    """Beyond eight dimensions the layout itself is refused, with the tensor and its shape."""
    with pytest.raises(InputError, match=r"tensor w: shape: expected up to 8 sizes.*got \(1, 1, 1, 1, 1, 1, 1, 1, 1\)"):
        Layout.from_pieces({"w": ((1,) * 9, "int32")}, {}, [])


@pytest.mark.parametrize(("rows", "ways"), list(itertools.product((1, 5, 10, 13), (2, 3, 4, 7))))
def test_shards_that_do_not_divide_lose_nothing(rows: int, ways: int) -> None:
    """M2N's default path divides with the remainder dropped; right is every row, whatever is left over on a side."""
    deliver(planes((rows, 3)), grid(0, (ways,), 0), grid(ways, (2,), 0))
    deliver(planes((rows, 3)), grid(0, (2,), 0), grid(2, (ways,), 0))


@pytest.mark.parametrize("other", [(8, 5), (4, 8), (8, 4, 1), (32,)], ids=str)
def test_global_shapes_that_differ_raise(other: tuple[int, ...]) -> None:
    """M2N copies between tensors of different global shape without a check; right is an error with both shapes, and
    nothing moved, even where the numbers of elements agree."""
    sources = [layout_of({"w": counters((8, 4))}, ROWS, n) for n in numbers(ROWS)]
    last = {"w": counters(other)}
    targets = [layout_of(last, mesh([9], R), 9)]
    shards = [{"w": part(counters((8, 4)), ROWS, n).reshape(-1)} for n in numbers(ROWS)]
    with pytest.raises(MismatchError) as caught:
        reshard(sources, targets, shards)
    assert "tensor w" in str(caught.value)
    assert "(8, 4)" in str(caught.value)
    assert str(other) in str(caught.value)


@pytest.mark.parametrize(
    "dtype", ["bool", "int16", "int8", "uint8", "uint64", "float16", "float8_e4m3fn", "float8_e8m0fnu"]
)
def test_dtypes_that_the_rival_lacks_or_has(dtype: str) -> None:
    """bool, int16 and e8m0 have no name in M2N; right is that bytes of any width arrive unchanged."""
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (13 * 11 * size,), dtype=torch.uint8, generator=generator)
    deliver({"w": raw.view(kind).reshape(13, 11)}, grid(0, (3,), 0), grid(3, (2, 2), 1, 0))


@pytest.mark.parametrize("dtype", ["complex64", "float4_e2m1fn_x2"])
def test_dtypes_that_are_not_known_are_refused(dtype: str) -> None:
    """Complex numbers and packed fp4 are refused by name when the layout is made (view them as bytes)."""
    with pytest.raises(InputError, match=f"tensor w: dtype: expected a dtype that refitd knows, got {dtype}"):
        Layout.from_tensors({"w": torch.zeros(2, dtype=getattr(torch, dtype))})


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32"), ("bfloat16", "float32"),
     ("float16", "float32")],
)  # fmt: skip
def test_casts_on_the_way(source: str, target: str) -> None:
    """Both rivals want equal dtypes (M2N moves bytes, NeMo RL raises on another wire dtype); right is torch's own
    rounding, uneven shards and ties included."""
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1e30, -0.0, float("inf")], dtype=torch.float64)
    numbers_ = torch.cat([ties, torch.arange(1, 72, dtype=torch.float64) * 1.00390625 / 7])
    whole = {"w": numbers_.to(getattr(torch, source)).reshape(7, 11)}
    deliver(whole, grid(0, (3,), 0), grid(3, (2,), 1), dtype=target)


@pytest.mark.parametrize(
    ("source", "target"),
    [("bfloat16", "float16"), ("float16", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"),
     ("float32", "float64"), ("int32", "int64"), ("float8_e4m3fn", "float8_e5m2")],
)  # fmt: skip
def test_casts_that_lose_meaning_are_refused(source: str, target: str) -> None:
    """M2N would copy bytes of one dtype into another of equal size; right is an error with tensor, ranks and dtypes."""
    whole = {"w": torch.zeros(4, 4, dtype=getattr(torch, source))}
    with pytest.raises(MismatchError) as caught:
        make_plan(ranks_of(whole, ROWS, "s"), ranks_of(whole, COLS, "d", dtype=target))
    expected = f"tensor w: expected a dtype that {source} of s/0 may be cast to, got {target} on d/50"
    assert str(caught.value) == expected


@pytest.mark.parametrize("views", ["transposed", "every second", "window"])
def test_views_that_are_not_contiguous(views: str) -> None:
    """M2N's C interface carries no strides, so a view goes out as if it were dense; right are the view's own elements,
    and on the way in nothing between them is touched."""
    made = {
        "transposed": lambda: counters((6, 8)).t(),
        "every second": lambda: counters((16, 6))[::2],
        "window": lambda: counters((12, 10))[3:11, 2:8],
    }
    source = made[views]()
    target = torch.zeros(8, 6, dtype=torch.int32)
    (got,) = reshard([Layout.from_tensors({"w": source})], [Layout.from_tensors({"w": target})], [{"w": source}])
    assert got["w"].reshape(8, 6).tolist() == source.tolist()
    dense = counters((8, 6))
    (back,) = reshard([Layout.from_tensors({"w": dense})], [Layout.from_tensors({"w": source})], [{"w": dense}])
    assert back["w"].as_strided((8, 6), source.stride()).tolist() == dense.tolist()
    assert int((back["w"] != 0).sum()) == 48


@pytest.mark.parametrize(
    ("source", "target", "shape", "most"),
    [
        pytest.param(grid(0, (4,), R), grid(4, (4,), R), (512, 512), 4 * 512 * 512 // 4, id="4 replicas to 4"),
        pytest.param(grid(0, (2, 4), R, 0), grid(8, (8, 4), R, 0), (512, 512), 4 * 512 * 512 // 8, id="TP4 DP2 to DP8"),
        pytest.param(grid(0, (16,), R), grid(16, (4, 8), R, 0), (512, 512), 4 * 512 * 512 // 16, id="16 to TP8 DP4"),
        pytest.param(grid(0, (3,), R), grid(3, (2,), R), (512, 768), 4 * 512 * 768 // 3, id="3 replicas to 2"),
    ],
)
def test_every_source_replica_sends_its_share(source: Mesh, target: Mesh, shape: tuple[int, int], most: int) -> None:
    """In one destination domain M2N lets source replica 0 send every copy; right is that one copy leaves the sources,
    cut in equal shares over all that hold it, and the destinations pass it on among themselves."""
    whole = planes(shape)
    plan = plan_of(ranks_of(whole, source, "s"), ranks_of(whole, target, "d", domain="engine"))
    sent = [int(plan.loads.egress[plan.ranks.index(f"s/{n}")]) for n in numbers(source)]
    assert sum(sent) == 4 * shape[0] * shape[1] == plan.totals["network_bytes"]
    assert most <= max(sent) <= most + most // 100 + 64
    assert plan.totals["relay_bytes"] == 0


def test_each_domain_takes_one_copy_whatever_its_size() -> None:
    """M2N takes the greatest common divisor of the ranks a node, so that nodes of 8 and 7 count as 15 domains; right is
    one copy for each domain, of 8 and of 7 ranks alike."""
    whole = planes((480, 64))
    source = grid(0, (2, 2), R, 0)
    targets = ranks_of(whole, grid(10, (8,), R), "d", domain="a") + ranks_of(whole, grid(20, (7,), R), "d", domain="b")
    plan = plan_of(ranks_of(whole, source, "s"), targets)
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"] == 2 * 4 * 480 * 64


def test_a_second_transfer_after_a_rank_is_lost() -> None:
    """M2N has no way back after a peer died; right is a plan of the remainder: with a replica left all of it comes, and
    what only the lost rank had is named in bytes."""
    whole = planes((64, 32))
    target = grid(10, (2,), 1)
    for source, lost, gone in ((grid(0, (2, 2), R, 0), "s/0", 0), (grid(0, (4,), 0), "s/1", 4 * 16 * 32)):
        plan = plan_of(ranks_of(whole, source, "s"), ranks_of(whole, target, "d", domain="engine"))
        rest = lose(plan, [lost], 0)
        assert rest.unrecoverable == rest.totals["unrecoverable_bytes"] == gone
        assert rest.totals["network_bytes"] == 4 * 64 * 32 - gone
        assert lost not in {bucket.src for n in numbers(target) for bucket in rest.program(f"d/{n}").receives()}


def test_growth_takes_what_is_there() -> None:
    """M2N cannot grow; right is a plan for a joiner in which neighbours of its node that hold the version serve it."""
    whole = planes((32, 16))
    sources, old = ranks_of(whole, grid(0, (2,), 0), "s"), ranks_of(whole, grid(5, (2,), 1), "d", domain="engine")
    joiner = ranks_of(whole, grid(8, (2,), 1), "d", domain="engine")
    plan = make_plan(sources, joiner, neighbours=old)
    assert plan.totals["network_bytes"] == 0
    memory = arrays_of(joiner, grid(8, (2,), 1), whole, filled=False)
    held = arrays_of([*sources], grid(0, (2,), 0), whole, filled=True)
    held |= arrays_of(old, grid(5, (2,), 1), whole, filled=True)
    for rank in joiner:
        program = plan.program(rank.key)
        for bucket in program.receives():
            copy(program, bucket, held[bucket.src], memory[rank.key])
    for number in (8, 9):
        expected = part(whole["w"], grid(8, (2,), 1), number).reshape(-1).tolist()
        assert memory[f"d/{number}"]["w"].tolist() == expected


def test_a_rank_of_more_than_two_gigabytes() -> None:
    """M2N's slot ends at 2 GiB a rank and tensor, and its staging hangs at 4 GiB; right is a plan of any size, here
    8 GiB a rank, with every address beyond 32 bits counted right."""
    shape = (4, 1 << 32)
    facts, cut = {"w": (shape, "uint8")}, 1 << 33
    halves = [Box((0, 0), (2, 1 << 32)), Box((2, 0), (4, 1 << 32))]
    columns = [Box((0, 0), (4, 1 << 31)), Box((0, 1 << 31), (4, 1 << 32))]
    src = [Layout.from_pieces(facts, {"w": (cut, "uint8")}, [Piece("w", b, "w", 0, (1 << 32, 1))]) for b in halves]
    dst = [Layout.from_pieces(facts, {"w": (cut, "uint8")}, [Piece("w", b, "w", 0, (1 << 31, 1))]) for b in columns]
    plan = plan_sides(
        side_of(Rank(f"s/{i}", f"s{i}", f"s{i}", lay) for i, lay in enumerate(src)),
        side_of(Rank(f"d/{i}", "d", "d", lay) for i, lay in enumerate(dst)),
        topology("h100-nvl8"), bucket_bytes=1 << 30,
    )  # fmt: skip
    assert plan.totals["network_bytes"] == 1 << 34
    moves = plan.program("d/1").moves
    ends = moves[:, 1] + (moves[:, 8] - 1) * moves[:, 2] + (moves[:, 9] - 1) * moves[:, 3]
    assert (int(ends.max()), int(moves[:, 1].min())) == (cut - 1, 1 << 31)
    assert int((moves[:, 8] * moves[:, 9]).sum()) == cut


def test_strided_shards() -> None:
    """`_StridedShard` (FSDP over TP on one dimension) is a TypeError in M2N and NotImplementedError in NeMo RL; right
    are two runs of rows on a rank, taken from where they lie."""
    whole = counters((12, 3))
    facts = {"w": ((12, 3), "int32")}
    runs = [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]
    sources, shards = [], []
    for mine in runs:
        pieces = [Piece("w", Box((a, 0), (b, 3)), "w", 9 * i, (3, 1)) for i, (a, b) in enumerate(mine)]
        sources.append(Layout.from_pieces(facts, {"w": (18, "int32")}, pieces))
        shards.append({"w": torch.cat([whole[a:b] for a, b in mine]).reshape(-1)})
    targets = [layout_of({"w": whole}, COLS, n) for n in numbers(COLS)]
    for number, got in zip(numbers(COLS), reshard(sources, targets, shards), strict=True):
        assert got["w"].tolist() == part(whole, COLS, number).reshape(-1).tolist()
    assert box_of((12, 3), COLS, 50) == Box((0, 0), (12, 1))
    assert bits(whole).unique().numel() == 36
