"""The proof can fail: every planted fault is caught."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from plan_helpers import distinct, ranks, simple

from refitd.errors import PlanError, ProofError
from refitd.layout import Box
from refitd.plan import Held, Plan, make_plan
from refitd.plan.moves import Moves
from refitd.plan.planner import BUCKET_BYTES
from refitd.plan.proof import prove

WHOLE = distinct({"w": (8, 6), "v": (12,)})


def plan() -> Plan:
    """Four row shards of w (two of v) to two destinations that both need everything, on one node."""
    sources = [
        simple(WHOLE, {"w": [Box((2 * i, 0), (2 * i + 2, 6))], "v": [Box((6 * (i % 2),), (6 * (i % 2) + 6,))]})
        for i in range(4)
    ]
    whole = {"w": [Box((0, 0), (8, 3)), Box((0, 3), (8, 6))], "v": [Box((0,), (12,))]}
    members = [simple(WHOLE, whole), simple(WHOLE, whole)]
    return make_plan(ranks("trainer/s", sources, ["a", "b", "c", "d"]), ranks("engine/d", members, ["x", "x"]))


def entering(moves: Moves, rows: int = 2) -> int:
    return int(np.flatnonzero((moves.stage == 0) & (moves.table[:, 8] == rows))[0])


def moved_cut(p: Plan, m: Moves) -> None:
    at = entering(m)
    m.table[at, 8] -= 1
    m.hi[at, 0] -= 1


def grown_move(p: Plan, m: Moves) -> None:
    m.table[entering(m), 9] += 1


def wrong_source_view(p: Plan, m: Moves) -> None:
    m.table[entering(m), 2] += 1


def wrong_destination_view(p: Plan, m: Moves) -> None:
    m.table[entering(m), 6] -= 1


def wrong_source_offset(p: Plan, m: Moves) -> None:
    m.table[entering(m), 1] += 1


def wrong_destination_offset(p: Plan, m: Moves) -> None:
    m.table[entering(m), 5] += 1


def wrong_storage(p: Plan, m: Moves) -> None:
    m.table[entering(m), 0] += 1


def wrong_holder(p: Plan, m: Moves) -> None:
    """Reads the box from the source that has the rows below."""
    at, table = entering(m), p._table
    others = np.flatnonzero((table.roles[table.rank] == 0) & (table.name == -1) & (table.rank != table.rank[m.src[at]]))
    m.src[at] = next(r for r in others if table.hi[r, 1] == 6)


def swapped_boxes(p: Plan, m: Moves) -> None:
    """Two moves of one shape exchange their sources."""
    a, b = [i for i in np.flatnonzero((m.stage == 0) & (m.table[:, 8] == 2)) if m.lo[i, 1] == 0][:2]
    m.table[[a, b], :4], m.src[[a, b]] = m.table[[b, a], :4], m.src[[b, a]]


def passed_on_too_early(p: Plan, m: Moves) -> None:
    m.stage[:] = 0


def passed_on_what_never_landed(p: Plan, m: Moves) -> None:
    m.chunk[np.flatnonzero(m.stage == 1)[0]] += 1


def wrong_piece(p: Plan, m: Moves) -> None:
    m.dst[entering(m)] = len(p._table.rank)


MUTATIONS = [
    moved_cut, grown_move, wrong_source_view, wrong_destination_view, wrong_source_offset, wrong_destination_offset,
    wrong_storage, wrong_holder, swapped_boxes, passed_on_too_early, passed_on_what_never_landed, wrong_piece,
]  # fmt: skip


def prove_again(p: Plan, moves: Moves, buckets=None, held=None, bucket_bytes: int = BUCKET_BYTES) -> None:
    prove(p._table, moves, p.buckets if buckets is None else buckets, held or {}, bucket_bytes)


def copied(p: Plan) -> Moves:
    return Moves(*(column.copy() for column in p._moves))


def test_the_unchanged_plan_is_proven() -> None:
    """The proof accepts the plan that the planner made, which uses both stages."""
    p = plan()
    prove_again(p, copied(p))
    assert {b.stage for b in p.buckets} == {0, 1}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_planted_fault_in_a_move_is_caught(mutate: Callable[[Plan, Moves], None]) -> None:
    """Each kind of wrong move fails the proof."""
    p = plan()
    moves = copied(p)
    mutate(p, moves)
    with pytest.raises(ProofError):
        prove_again(p, moves)


@pytest.mark.parametrize("order", [lambda n: np.arange(1, n), lambda n: np.append(np.arange(n), n - 1)])
def test_dropped_and_duplicated_moves_are_caught(order: Callable[[int], np.ndarray]) -> None:
    """A plan that leaves a move out, or has it twice, is refused even when its buckets are adjusted to fit."""
    p = plan()
    rows = order(len(p._moves.src))
    moves = p._moves.take(rows)
    with pytest.raises(ProofError, match="not written exactly once"):
        prove_again(p, moves)


def test_buckets_must_partition_the_moves_and_tell_the_truth() -> None:
    """A missing bucket, a wrong size, link, stage or order, and a bucket over the limit are refused."""
    p = plan()
    first, *rest = p.buckets
    wrong = [
        rest,
        p.buckets[:-1],
        (first._replace(nbytes=first.nbytes + 4), *rest),
        (first._replace(link="peer"), *rest),
        (first._replace(stage=1), *rest),
        (first._replace(src=p.buckets[-1].dst), *rest),
        (p.buckets[1], first, *p.buckets[2:]),
    ]
    for buckets in wrong:
        with pytest.raises(ProofError):
            prove_again(p, copied(p), tuple(buckets))
    with pytest.raises(ProofError):
        prove_again(p, copied(p), bucket_bytes=first.nbytes - 1)


def test_a_region_both_held_and_sent_is_caught() -> None:
    """Held regions count as written: sending one again is an error."""
    p = plan()
    with pytest.raises(ProofError, match="not written exactly once"):
        prove_again(p, copied(p), held={"engine/d/0": Held({"v": [Box((0,), (1,))]})})


def test_a_region_without_holder_is_named() -> None:
    """No plan is made where a source is missing, and the error names tensor, region and needer."""
    sources = [simple(WHOLE, {"w": [Box((0, 0), (8, 6))], "v": [Box((0,), (5,)), Box((6,), (12,))]})]
    members = [simple(WHOLE, {"v": [Box((0,), (12,))]})]
    with pytest.raises(PlanError, match=r"tensor v: no source holds \[5.* to \[6.* engine/d/0"):
        make_plan(ranks("trainer/s", sources, ["a"]), ranks("engine/d", members, ["x"]))
