"""NeMo RL's own geometry tests, and rows derived from its planner: shapes, meshes, placements, who sends what."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    deliver,
    inside,
    mesh,
    numbers,
    part,
    plan_of,
    planes,
    ranks_of,
)  # fmt: skip

from refitd.layout import Box, Layout, Piece
from refitd.plan import Rank, make_plan

Region = tuple[tuple[int, int], ...]


class Row(NamedTuple):
    """A row of the table. ``sent``: elements that each source rank sends over the network when all destinations share
    a domain; ``edges``: (source, destination, region) where there is no choice, else None."""

    name: str
    source: Mesh
    target: Mesh
    shape: tuple[int, ...]
    sent: list[int]
    edges: list[tuple[int, int, Region]] | None = None


def grid(first: int, shape: tuple[int, ...], *cuts: int | None) -> Mesh:
    return mesh(range(first, first + int(np.prod(shape))), *cuts, shape=shape)


GROWN = 256
A, C = (0, 4), (4, 8)
ROWS = [
    Row("gather TP2 to TP1", grid(0, (2,), 0), grid(2, (1,), R), (8, 4), [16, 16], [(0, 2, (A, A)), (1, 2, (C, A))]),
    Row("split TP1 to TP2", grid(0, (1,), R), grid(1, (2,), 0), (8, 4), [32], [(0, 1, (A, A)), (0, 2, (C, A))]),
    Row("DP dedup and striped", grid(0, (2,), 0), grid(2, (2, 2), R, 0), (8, 4), [16, 16]),
    Row("DP2 to TP2 col", grid(0, (2,), R), grid(2, (2,), 0), (8, 4), [16, 16]),
    Row("TP2 to TP4 col", grid(0, (2,), 0), grid(2, (4,), 0), (8, 4), [16, 16],
        [(0, 2, ((0, 2), A)), (0, 3, ((2, 4), A)), (1, 4, ((4, 6), A)), (1, 5, ((6, 8), A))]),
    Row("TP4 to TP2 col", grid(0, (4,), 0), grid(4, (2,), 0), (8, 4), [8, 8, 8, 8],
        [(0, 4, ((0, 2), A)), (1, 4, ((2, 4), A)), (2, 5, ((4, 6), A)), (3, 5, ((6, 8), A))]),
    Row("TP2 to TP4 row", grid(0, (2,), 1), grid(2, (4,), 1), (4, 8), [16, 16],
        [(0, 2, (A, (0, 2))), (0, 3, (A, (2, 4))), (1, 4, (A, (4, 6))), (1, 5, (A, (6, 8)))]),
    Row("TP2xDP2 to TP2xDP2 col", grid(0, (2, 2), R, 0), grid(4, (2, 2), R, 0), (8, 4), [8, 8, 8, 8]),
    Row("TP2xDP2 to TP2xDP2 row", grid(0, (2, 2), R, 1), grid(4, (2, 2), R, 1), (4, 8), [8, 8, 8, 8]),
    Row("TP2 to TP4xDP2 row", grid(0, (2,), 1), grid(2, (2, 4), R, 1), (4, 8), [16, 16]),
    Row("TP4 to TP2xDP2 row", grid(0, (4,), 1), grid(4, (2, 2), R, 1), (4, 8), [8, 8, 8, 8]),
    Row("EP2 to TP2 gate", grid(0, (2,), 0), grid(2, (2,), 1), (4, 8, 4), [64, 64],
        [(s, d, ((2 * s, 2 * s + 2), (4 * d - 8, 4 * d - 4), A)) for s in (0, 1) for d in (2, 3)]),
    Row("EP2 to TP2 down", grid(0, (2,), 0), grid(2, (2,), 2), (4, 4, 8), [64, 64],
        [(s, d, ((2 * s, 2 * s + 2), A, (4 * d - 8, 4 * d - 4))) for s in (0, 1) for d in (2, 3)]),
    Row("EP2 to TP2xDP2 gate", grid(0, (2,), 0), grid(2, (2, 2), R, 1), (4, 8, 4), [64, 64]),
    Row("EP2 to TP2xDP2 down", grid(0, (2,), 0), grid(2, (2, 2), R, 2), (4, 4, 8), [64, 64]),
    Row("EP4 to EP2xDP2", grid(0, (4,), 0), grid(4, (2, 2), R, 0), (8, 2, 2), [8, 8, 8, 8]),
    Row("EP2xEDP2 to EP4", grid(0, (2, 2), R, 0), grid(4, (4,), 0), (8, 2, 2), [8, 8, 8, 8]),
    Row("EP2xEDP2 to TP2xDP3", grid(0, (2, 2), R, 0), grid(4, (3, 2), R, 1), (4, 8, 4), [32, 32, 32, 32]),
    Row("DP8 to DP4 full", grid(0, (8,), R), grid(8, (4,), R), (8, 4), [4] * 8),
    Row("uneven 10, 4 to 3", grid(0, (4,), 0), grid(4, (3,), 0), (10, 2), [6, 6, 6, 2],
        [(0, 4, ((0, 3), (0, 2))), (1, 4, ((3, 4), (0, 2))), (1, 5, ((4, 6), (0, 2))), (2, 5, ((6, 8), (0, 2))),
         (2, 6, ((8, 9), (0, 2))), (3, 6, ((9, 10), (0, 2)))]),
    Row("uneven 5 over 4 to R", grid(0, (4,), 0), grid(4, (1,), R), (5, 2), [4, 4, 2, 0],
        [(0, 4, ((0, 2), (0, 2))), (1, 4, ((2, 4), (0, 2))), (2, 4, ((4, 5), (0, 2)))]),
    Row("two axes same dim", grid(0, (2, 3), 0, 0), grid(6, (1,), R), (10, 1), [2, 2, 1, 2, 2, 1],
        [(r, 6, ((a, b), (0, 1))) for r, (a, b) in enumerate([(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)])]),
    Row("S(-1)", grid(0, (2,), -1), grid(2, (1,), R), (4, 8), [16, 16], [(0, 2, (A, A)), (1, 2, (A, C))]),
    Row("mesh order 1 0", mesh([1, 0], 0), grid(2, (2,), 0), (8, 4), [16, 16], [(0, 3, (C, A)), (1, 2, (A, A))]),
    Row("scalar", grid(0, (1,), R), grid(1, (2,), R), (), [1]),
    Row("empty dim", grid(0, (2,), 0), grid(2, (1,), R), (0, 4), [0, 0], []),
]  # fmt: skip
BY_NAME = [pytest.param(row, id=row.name) for row in ROWS]


@pytest.mark.parametrize("row", BY_NAME)
def test_reshard_of_table_row(row: Row) -> None:
    """Each row of the rival's table delivers what gather-and-slice gives, element for element."""
    deliver(planes(row.shape), row.source, row.target)


@pytest.mark.parametrize("row", BY_NAME)
def test_one_copy_crosses_and_all_replicas_send(row: Row) -> None:
    """The rival sends from the first holder alone in several rows (DP2 to TP2, EP2xEDP2 to EP4) or stripes only where
    sizes divide (not TP2xDP3); right is one copy over the network, in equal parts from every rank that holds it, once
    the tensor is worth a message from each (here 256 times as wide as in the table)."""
    wider = GROWN if row.shape else 1
    whole = planes((*row.shape[:-1], row.shape[-1] * wider) if row.shape else ())
    sources, targets = ranks_of(whole, row.source), ranks_of(whole, row.target, domain="engine")
    plan = plan_of(sources, targets)
    memory = arrays_of(targets, row.target, whole, filled=False)
    brought = carry_out(plan, arrays_of(sources, row.source, whole, filled=True), memory)
    for rank, wanted in zip(targets, numbers(row.target), strict=True):
        assert memory[rank.key]["w"].tolist() == part(whole["w"], row.target, wanted).reshape(-1).tolist()
    sent = dict.fromkeys(sorted(numbers(row.source)), 0)
    for (src, _, link), ids in brought.items():
        if link == "network":
            sent[src] += len(ids)
    assert list(sent.values()) == [wider * count for count in row.sent]
    nbytes = 4 * wider * sum(row.sent)
    assert plan.totals["network_bytes"] == plan.totals["network_bytes_min"] == nbytes == 4 * whole["w"].numel()
    made = make_plan(sources, targets)
    assert made.totals["network_bytes"] == made.totals["network_bytes_min"] == nbytes


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if row.edges is not None])
def test_edges_of_table_row(row: Row) -> None:
    """Where every region has one holder and one needer, the edges and their regions are exactly those of the table."""
    whole = planes(row.shape)
    expected: dict[tuple[int, int, str], set[int]] = {}
    for src, dst, region in row.edges or []:
        expected[src, dst, "network"] = inside(row.shape, *region)
    sources, targets = ranks_of(whole, row.source, "s"), ranks_of(whole, row.target, "d")
    for plan in (plan_of(sources, targets), make_plan(sources, targets)):
        memory = arrays_of(targets, row.target, whole, filled=False)
        assert carry_out(plan, arrays_of(sources, row.source, whole, filled=True), memory) == expected


def test_overlapping_meshes() -> None:
    """[0, 1] to [1, 2], rank 1 on both sides (M2N refuses it, NeMo RL copies locally): rank 1 sends 4:8 on and takes
    0:4; with the same mesh on both sides every byte is a local copy."""
    source, target, shape = mesh([0, 1], 0), mesh([1, 2], 0), (8, 4)
    whole = planes(shape)
    sources, targets = ranks_of(whole, source), ranks_of(whole, target)
    memory = arrays_of(targets, target, whole, filled=False)
    brought = carry_out(plan_of(sources, targets), arrays_of(sources, source, whole, filled=True), memory)
    assert brought == {(0, 1, "network"): inside(shape, A, A), (1, 2, "network"): inside(shape, C, A)}
    deliver(whole, source, target)
    same = plan_of(ranks_of(whole, source), ranks_of(whole, source))
    assert same.totals["network_bytes"] == 0
    assert same.totals["local_bytes"] == 4 * 32


def test_a_rank_on_both_sides_serves_itself_and_others() -> None:
    """Replicas on ranks 0 to 3, destinations 2 to 5: rank 2 and 3 copy their own and only 4 and 5 receive."""
    source, target, shape = mesh([0, 1, 2, 3], R), mesh([2, 3, 4, 5], R), (6, 2)
    whole = planes(shape)
    sources, targets = ranks_of(whole, source), ranks_of(whole, target)
    memory = arrays_of(targets, target, whole, filled=False)
    brought = carry_out(plan_of(sources, targets), arrays_of(sources, source, whole, filled=True), memory)
    assert brought[2, 2, "local"] == brought[3, 3, "local"] == inside(shape, (0, 6), (0, 2))
    assert {(dst, link) for _, dst, link in brought} == {(2, "local"), (3, "local"), (4, "network"), (5, "network")}
    assert all((held["w"] == np.arange(1, 13)).all() for held in memory.values())


@pytest.mark.parametrize(
    ("size", "of", "expected"),
    [
        pytest.param(10, grid(0, (4,), 0), [(0, 3), (3, 6), (6, 9), (9, 10)], id="10 over 4"),
        pytest.param(10, grid(0, (2, 3), 0, 0), [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)], id="10 over 2x3"),
        pytest.param(5, grid(0, (4,), 0), [(0, 2), (2, 4), (4, 5), (0, 0)], id="5 over 4"),
        pytest.param(3, grid(0, (8,), 0), [(0, 1), (1, 2), (2, 3), *[(0, 0)] * 5], id="3 over 8"),
    ],
)
def test_uneven_shards(size: int, of: Mesh, expected: list[tuple[int, int]]) -> None:
    """The rival's three implementations cut 10 over 4 in three ways (M2N refuses, its oracle gives 3, 3, 2, 2); right
    is torch's own cut, with empty shards at the end, both as source and as destination."""
    cut = [box_of((size, 3), of, rank) for rank in numbers(of)]
    assert [(box.lo[0], box.hi[0]) for box in cut] == expected
    whole, other = planes((size, 3)), mesh([90, 91, 92], 1)
    deliver(whole, of, other)
    deliver(whole, other, of)


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [((0, 4), (2, 6), (2, 4)), ((0, 2), (2, 4), None)],
    ids=["0:4 and 2:6", "0:2 and 2:4 touch"],
)
def test_intersections(mine: Any, other: Any, expected: Any) -> None:
    """Ranges that touch have nothing in common: (0, 2) and (2, 4) exchange nothing and leave no empty bucket."""
    shape = (8,)
    whole = planes(shape)
    lay = {k: _only(shape, k) for k in (mine, other, (0, 8))}
    sources = [_rank("s/0", lay[mine]), _rank("s/1", lay[0, 8])]
    plan = make_plan(sources, [_rank("d/2", lay[other])])
    memory = {"d/2": {"w": np.zeros(other[1] - other[0], np.int32)}}
    held = {"s/0": {"w": whole["w"][slice(*mine)].numpy()}, "s/1": {"w": whole["w"].numpy()}}
    brought = carry_out(plan, held, memory)
    assert memory["d/2"]["w"].tolist() == whole["w"][slice(*other)].tolist()
    from_first = brought.get((0, 2, "network"), set())
    assert from_first <= (inside(shape, expected) if expected else set())


def _only(shape: tuple[int, ...], edges: tuple[int, int]) -> Layout:
    box = Box((edges[0],), (edges[1],))
    return Layout.from_pieces({"w": (shape, "int32")}, {"w": (box.volume, "int32")}, [Piece("w", box, "w", 0, (1,))])


def _rank(key: str, layout: Layout) -> Rank:
    return Rank(key, key, key, layout)


def test_local_slices_of_an_overlap() -> None:
    """Overlap (2:4, 3:6) in the owner of (1:5, 2:8) is (1:3, 1:4) of its memory: the moves address exactly that."""
    facts = {"w": ((6, 9), "int32")}
    owner = Layout.from_pieces(facts, {"w": (24, "int32")}, [Piece("w", Box((1, 2), (5, 8)), "w", 0, (6, 1))])
    wants = Layout.from_pieces(facts, {"w": (6, "int32")}, [Piece("w", Box((2, 3), (4, 6)), "w", 0, (3, 1))])
    program = make_plan([_rank("s/0", owner)], [_rank("d/1", wants)]).program("d/1")
    local = np.arange(24).reshape(4, 6)
    (row,) = program.moves.tolist()
    _, offset, down, along, _, start, dst_down, dst_along, rows, cols = row
    read = [[offset + i * down + j * along for j in range(cols)] for i in range(rows)]
    assert read == local[1:3, 1:4].tolist()
    assert (start, dst_down, dst_along) == (0, 3, 1)


@pytest.mark.parametrize("way", [plan_of, make_plan])
def test_order_of_ranks_does_not_matter(way: Any) -> None:
    """The rival keeps sends and receives matched by iteration order alone; right is that every edge brings the same
    elements whatever order the ranks are given in."""
    source, target = grid(0, (4,), 0), grid(4, (3,), 1)
    whole = planes((10, 6))
    sources, targets = ranks_of(whole, source, "s"), ranks_of(whole, target, "d")
    found = []
    for step in (1, -1):
        memory = arrays_of(targets, target, whole, filled=False)
        found.append(
            carry_out(way(sources[::step], targets[::step]), arrays_of(sources, source, whole, filled=True), memory)
        )
    assert found[0] == found[1]
    assert len(found[0]) == 12


def test_values_of_every_dtype_pass_unchanged() -> None:
    """NaN payloads, infinities and negative zeros arrive bit by bit: bytes are moved, values are not looked at."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    deliver({"w": words}, grid(0, (3,), 0), grid(3, (2, 2), 1, 0))
    assert len(set(bits(words).view(torch.int16).tolist())) == 1 << 16
