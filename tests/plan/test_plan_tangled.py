"""Few pieces whose edges cut each other into very many cells: planned, or refused by name, without a grid of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import dense
from side_helpers import World, carry_out, expected, memory, worlds

from refitd.errors import MismatchError, PlanError
from refitd.layout import Box, Layout, box
from refitd.layout.box import difference
from refitd.layout.fronts.flat import Rules, flat_shard
from refitd.plan import Plan, Rank, cells, covered, forms, large, make_plan, regions
from refitd.plan.planner import BoxPlan
from refitd.plan.side_plan import SidePlan
from refitd.testing import split_layout

pytestmark = pytest.mark.timeout(300)

REAL = (128, 1536, 2048)  # a fused expert tensor
SMALL = (128, 12, 32)  # the same with shards that end inside rows, too
BEFORE = 77  # elements of another tensor in the buffer


def flat_side(shape: tuple[int, ...], count: int, dtype: str = "bfloat16") -> list[Rank]:
    """FSDP1 shards: consecutive runs of elements, up to five boxes each."""
    plain = split_layout({"a": ((BEFORE,), dtype), "w": (shape, dtype)}, 0, 1)
    rules = Rules(reverse=False, align=1, pad=1)
    return [
        Rank(f"s/{i:03}", f"s{i // 8}", f"s{i // 8}", flat_shard(plain, list(plain.storages), i, count, rules))
        for i in range(count)
    ]


def engine(shape: tuple[int, ...], dtype: str = "bfloat16", key: str = "d") -> list[Rank]:
    """Eight ranks with sixteen experts each."""
    return [Rank(f"{key}/{i}", key, key, split_layout({"w": (shape, dtype)}, i, 8)) for i in range(8)]


def one(key: str, layout: Layout) -> list[Rank]:
    return [Rank(key, key[0], key[0], layout)]


def boxes_of(shape: tuple[int, ...], boxes: list[Box], dtype: str = "float32") -> Layout:
    """No memory is made of ``shape``."""
    pieces = [dense("w", part, f"w.{i}") for i, part in enumerate(boxes)]
    return Layout.from_pieces({"w": (shape, dtype)}, {p.storage: (p.box.volume, dtype) for p in pieces}, pieces)


def diagonal(count: int = 40, dims: int = 5) -> tuple[tuple[int, ...], list[Box]]:
    return (2 * count,) * dims, [Box((2 * i,) * dims, (2 * i + 1,) * dims) for i in range(count)]


def slabs(count: int, dims: int) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes across the whole tensor, along every dimension: all cells of their grid differ in what they lie in."""
    shape = (2 * count,) * dims
    return shape, [
        Box(tuple(2 * i * (e == d) for e in range(dims)), tuple(2 * i + 1 if e == d else shape[e] for e in range(dims)))
        for d in range(dims)
        for i in range(count)
    ]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Cells times boxes of every grid that is made meanwhile; none may be over the bound."""
    made: list[int] = []

    def grid(lo: np.ndarray, hi: np.ndarray) -> box.Grid:
        made.append(cells.grid_size(lo, hi))
        assert made[-1] <= cells.GRID
        found = box.grid(lo, hi)
        assert found.inside.size == made[-1]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "grid", grid)
        patch.setattr(forms, "grid", grid)
        yield made


def size_of(ranks: list[Rank]) -> int:
    return sum(cells.grid_size(boxes[:, 0], boxes[:, 1]) for _, boxes in large._boxes_by_tensor(ranks))


def delivered(plan: Plan, shape: tuple[int, ...], sources: list[Rank], members: list[Rank]) -> None:
    """Every element of each member has the value of the whole tensor."""
    shapes = {"a": (BEFORE,), "w": shape}
    dtype = next(iter(sources[0].layout.tensors.values()))[1]
    arrays = memory(shapes, dtype, sources, members)
    carry_out([plan.program(rank.key) for rank in members], arrays, packed=True)
    for rank in members:
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == expected(shapes, dtype, rank)


def test_96_flat_shards_of_an_expert_tensor() -> None:
    """A grid of them has 38 million cells times boxes."""
    sources, members = flat_side(REAL, 96), engine(REAL)
    assert size_of([*sources, *members]) > 16 * cells.GRID
    with counted() as made:
        assert covered(sources, members)
        assert not covered(sources[:50] + sources[51:], members)
        plan = make_plan(sources, members)
        totals = dict(plan.totals)
        with pytest.raises(PlanError, match=r"tensor w: no source holds .*, which d/4 needs"):
            make_plan(sources[:50] + sources[51:], members)
    assert isinstance(plan, SidePlan)
    assert sum(made) <= cells.GRID
    assert totals["network_bytes"] == totals["network_bytes_min"] == 2 * 128 * 1536 * 2048
    got = {rank.key: sum(b.nbytes for b in plan.program(rank.key).receives()) for rank in members}
    assert set(got.values()) == {2 * 16 * 1536 * 2048}
    assert plan.digest == make_plan(sources[::-1], members[::-1]).digest


@pytest.mark.parametrize(("dtypes", "way"), [(["float32"], SidePlan), (["float32", "bfloat16"], BoxPlan)])
def test_flat_shards_arrive_element_by_element(dtypes: list[str], way: type) -> None:
    """With members of several dtypes the factored way cannot be gone."""
    sources = flat_side(SMALL, 96, "float32")
    members = [rank for dtype in dtypes for rank in engine(SMALL, dtype, dtype)]
    assert size_of([*sources, *members]) > cells.GRID
    with counted():
        assert covered(sources, members)
        plan = make_plan(sources, members, bucket_bytes=1 << 16)
        delivered(plan, SMALL, sources, members)
    assert isinstance(plan, way)
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"]
    assert plan.totals["network_bytes"] == 128 * 12 * 32 * (4 if len(dtypes) == 1 else 6)


def test_replicas_that_are_cut_differently() -> None:
    """Shards of 96 and of 80 ranks, whose atoms are swept."""
    sources = flat_side(SMALL, 96, "float32")
    sources += [rank._replace(key=f"s2{rank.key}") for rank in flat_side(SMALL, 80, "float32")]
    with counted():
        assert covered(sources, engine(SMALL, "float32"))
        plan = make_plan(sources, engine(SMALL, "float32"), bucket_bytes=1 << 16)
        delivered(plan, SMALL, sources, engine(SMALL, "float32"))
    assert isinstance(plan, SidePlan)
    assert plan.totals["network_bytes"] == 4 * 128 * 12 * 32


def test_a_small_lane_goes_the_way_that_it_went() -> None:
    """Digests of before there was any bound."""
    plan = make_plan(flat_side(SMALL, 16), engine(SMALL))
    assert isinstance(plan, BoxPlan)
    with pytest.MonkeyPatch.context() as patch:
        for module in (large, regions, forms):
            patch.setattr(module, "GRID", 1 << 62)
        assert make_plan(flat_side(SMALL, 16), engine(SMALL)).digest == plan.digest


def test_one_element_of_a_diagonal() -> None:
    """Its grid has 10^11 cells times boxes."""
    shape, boxes = diagonal()
    sources, members = one("s/0", boxes_of(shape, boxes)), one("d/0", boxes_of(shape, boxes[7:8]))
    both = [*members, *one("e/0", boxes_of(shape, boxes[7:8], "bfloat16"))]
    assert size_of([*sources, *members]) > 10**11
    with counted():
        assert covered(sources, members)
        assert covered(sources, both)
        plan, boxed = make_plan(sources, members), make_plan(sources, both)
        whole = make_plan(sources, one("d/0", sources[0].layout))
    moves = plan.program("d/0")
    (bucket,) = moves.receives()
    assert [(b.src, b.dst, b.nbytes) for b in plan.buckets] == [("s/0", "d/0", 4)]
    assert [moves.storages[m[0]].name for m in moves.moves_of(bucket).tolist()] == ["w.7"]
    assert isinstance(boxed, BoxPlan)
    assert sorted((b.src, b.dst, b.nbytes) for b in boxed.buckets) == [("s/0", "d/0", 4), ("s/0", "e/0", 2)]
    assert whole.totals["network_bytes"] == 4 * len(boxes)


def test_what_is_beside_a_diagonal_is_missing() -> None:
    shape, boxes = diagonal()
    sources = one("s/0", boxes_of(shape, boxes))
    members = one("d/0", boxes_of(shape, [Box((15,) * 5, (16,) * 5)]))
    with counted():
        assert not covered(sources, members)
        with pytest.raises(PlanError, match=r"tensor w: no source holds \[15, 15, 15, 15, 15\] to \[16, .*, which d/0"):
            make_plan(sources, members)


@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "bfloat16"]])
def test_boxes_of_more_parts_than_are_planned_are_refused(dtypes: list[str]) -> None:
    """By name, and with nothing allocated for them: 40 slabs along each of five dimensions."""
    shape, boxes = slabs(40, 5)
    sources, whole = one("s/0", boxes_of(shape, boxes)), Box((0,) * 5, (1,) * 5)
    members = [rank for i, dtype in enumerate(dtypes) for rank in one(f"d/{i}", boxes_of(shape, [whole], dtype))]
    with counted():
        with pytest.raises(PlanError, match=r"^tensor w: expected boxes that cut .* at most 1048576 parts"):
            make_plan(sources, members)
        with pytest.raises(MismatchError) as caught:
            covered(sources, members)
    assert [violation.field for violation in caught.value.violations] == ["tensor w"]


def test_sides_that_are_simple_by_themselves_are_compared_by_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns have as many parts in common as the tensor has elements."""
    monkeypatch.setattr(cells, "PAIRS", 1000)
    rows, columns = ([Box((i, 0), (i + 1, 30)) for i in range(30)], [Box((0, i), (30, i + 1)) for i in range(30)])
    members = one("d/0", boxes_of((30, 30), columns))
    assert covered(one("s/0", boxes_of((30, 30), rows)), members)
    assert not covered(one("s/0", boxes_of((30, 30), rows[1:])), members)


@settings(max_examples=40, deadline=None)
@given(worlds(), st.booleans(), st.sampled_from([16, 1 << 20]))
def test_sweeping_delivers_what_a_grid_does(world: World, factored: bool, bucket_bytes: int) -> None:
    shapes, dtype, sources, members = world
    before = make_plan(sources, members, bucket_bytes=bucket_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "GRID", -1 if factored else 1 << 62)
        patch.setattr(regions, "GRID", 1)
        patch.setattr(forms, "GRID", 1)
        plan = make_plan(sources, members, bucket_bytes=bucket_bytes)
        arrays = memory(shapes, dtype, sources, members)
        carry_out([plan.program(rank.key) for rank in members], arrays, packed=True)
    assert isinstance(plan, SidePlan if factored else BoxPlan)
    assert {link: plan.totals[link] for link in before.totals} == dict(before.totals)
    for rank in members:
        assert {n: a.tobytes() for n, a in arrays[rank.key].items()} == expected(shapes, dtype, rank)


@settings(max_examples=40, deadline=None)
@given(worlds(), st.data())
def test_what_is_held_is_swept_too(world: World, data: st.DataObject) -> None:
    _, _, sources, members = world
    first = make_plan(sources, members, bucket_bytes=64)
    mine = [b.id for b in first.buckets if b.dst == members[0].key]
    held = {members[0].key: first.held(members[0].key, data.draw(st.sets(st.sampled_from(mine))) if mine else [])}
    totals = make_plan(sources, members, held=held).totals
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "GRID", 1 << 62)
        patch.setattr(regions, "GRID", 1)
        assert make_plan(sources, members, held=held).totals == totals


@st.composite
def some_boxes(draw: st.DrawFn, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes of which some may be empty."""
    pairs = st.tuples(st.integers(0, 6), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))
    rows = draw(st.lists(st.lists(pairs, min_size=dims, max_size=dims), max_size=9))
    table = np.array(rows, np.int64).reshape(len(rows), dims, 2)
    return table[:, :, 0], table[:, :, 1]


def as_boxes(lo: np.ndarray, hi: np.ndarray) -> list[Box]:
    return [Box(tuple(a), tuple(b)) for a, b in zip(lo.tolist(), hi.tolist(), strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3).flatmap(lambda dims: st.tuples(some_boxes(dims), some_boxes(dims))), st.booleans())
def test_boxes_are_compared_as_one_by_one(sides: tuple[tuple[np.ndarray, np.ndarray], ...], swept: bool) -> None:
    """However they are looked for."""
    (lo, hi), (other_lo, other_hi) = sides
    mine, others = as_boxes(lo, hi), as_boxes(other_lo, other_hi)
    met = [(i, j) for i, a in enumerate(mine) for j, b in enumerate(others) if a.intersect(b)]
    with pytest.MonkeyPatch.context() as patch:
        if swept:
            patch.setattr(cells, "_LOOK", -1)
            patch.setattr(cells, "_FEW", -1)
        assert list(zip(*(column.tolist() for column in cells.meeting(*sides[0], *sides[1])), strict=True)) == met
        alone = not any(a.intersect(b) for i, a in enumerate(mine) for b in mine[:i])
        assert cells.apart(lo, hi) is alone
        for number, part in enumerate(mine):
            if part.volume and (rest := difference(part, others)):
                found = cells.gap(lo[number], hi[number], other_lo, other_hi)
                assert found.volume
                assert part.intersect(found) == found
                assert not any(found.intersect(other) for other in others)
                assert swept or found == rest[0]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3).flatmap(some_boxes), st.integers(1, 4))
def test_cells_are_inside_or_outside_of_every_box(boxes: tuple[np.ndarray, np.ndarray], block: int) -> None:
    lo, hi = boxes
    swept = cells.sweep(lo, hi)
    found, known = as_boxes(swept.lo, swept.hi), as_boxes(lo, hi)
    assert found == sorted(found)
    assert cells.apart(swept.lo, swept.hi)
    inside = [(i, j) for i, a in enumerate(found) for j, b in enumerate(known) if a.intersect(b)]
    assert all(found[i].intersect(known[j]) == found[i] for i, j in inside)
    assert list(zip(swept.cell.tolist(), swept.box.tolist(), strict=True)) == inside
    for number, part in enumerate(known):
        assert sum(found[i].volume for i, j in inside if j == number) == part.volume
    sets = swept.sets()
    for cell, number in enumerate(sets.label.tolist()):
        mine = sets.box[sets.first[number] : sets.first[number + 1]].tolist()
        assert mine == [j for i, j in inside if i == cell]
    low, high, label = cells.joined(swept.lo, swept.hi, swept.lo[:, 0] // block)
    assert cells.apart(low, high)
    assert sum(part.volume for part in as_boxes(low, high)) == sum(part.volume for part in found)
    at, parts = cells.meeting(low, high, swept.lo, swept.hi)
    assert len(parts) == len(found)
    assert (label[at] == swept.lo[parts, 0] // block).all()
