"""The proof of what is left of a plan can fail: every planted fault is caught, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from side_makers import TINY, moe

from refitd.errors import ProofError
from refitd.plan import SidePlan, plan_sides
from refitd.plan.expand import Deliveries, deliveries, expand
from refitd.plan.left import Boxes, Holdings, left, prove_left
from refitd.plan.proof_rows import prove_rows
from refitd.plan.rows import Rows, make_rows
from refitd.plan.side_program import by_address

KEY, MATE = "engine/b/00003", "engine/b/00007"  # one node; the same shard of two replicas
COUNT, HELD, EMPTY = (
    "what a rank holds and receives is not what it needs",
    "a rank is to receive what it holds",
    "a rank is to read from another what that does not hold",
)


class Case(NamedTuple):
    """What ``KEY`` is to do in a plan of which it holds a third, and ``MATE`` every second bucket."""

    plan: SidePlan
    holdings: Holdings
    rank: int
    mate: int
    planned: int
    work: Deliveries
    rows: Rows

    def prove(self) -> None:
        prove_rows(self.plan.ends, self.work, self.rows, by_address(self.rows), self.rank, whole=False)
        self.prove_left()

    def prove_left(self) -> None:
        prove_left(self.plan.ends, self.holdings, self.work, self.rows, self.rank, self.planned)

    def received(self) -> np.ndarray:
        return np.flatnonzero(self.work.dst[self.rows.walks.delivery[self.rows.walk]] == self.rank)

    def only(self, at: np.ndarray) -> Case:
        return self._replace(rows=Rows(self.rows.walks, *(column[at] for column in self.rows[1:])))

    def walks(self, **columns: np.ndarray) -> Case:
        return self._replace(rows=self.rows._replace(walks=self.rows.walks._replace(**columns)))


@pytest.fixture(scope="module")
def case() -> Case:
    topology = replace(TINY, node=8, domain=8, usable=8)
    plan = plan_sides(*moe(topology), topology, relays=False, bucket_bytes=1 << 13)
    ids = {key: [b.id for b in plan.program(key).receives()] for key in (KEY, MATE)}
    held = {KEY: plan.held(KEY, ids[KEY][::3]), MATE: plan.held(MATE, ids[MATE][::2])}
    content = plan.content
    rank, mate = content.ranks.numbers([KEY, MATE]).tolist()
    holdings, sets = Holdings(plan.ends, content.ranks, held), content.sets.table()
    work = deliveries(plan.cutting, sets, content.ranks, rank)
    grains = expand(content.lines, content.classes, plan.cutting, plan.part, work)
    rest, grains = left(holdings, sets, plan.cutting.parcels, work, grains, rank)
    made = Case(plan, holdings, rank, mate, len(work.src), rest, make_rows(plan.ends, rest, grains))
    assert len(rest.src) > len(work.src)  # some are read from the mate instead
    return made


def _held(case: Case, of: int, change: Callable[[Boxes], Boxes]) -> Case:
    """With other boxes held by a rank."""
    holdings = Holdings(case.plan.ends, case.plan.content.ranks, {})
    holdings._known = {**case.holdings._known, of: change(case.holdings.of(of))}
    return case._replace(holdings=holdings)


def moved_cut(case: Case) -> Case:
    """A box begins one later and ends one later, where it is wide enough to."""
    lo, hi, walk = case.rows.walks.lo.copy(), case.rows.walks.hi.copy(), case.rows.walk[case.received()[0]]
    hi[walk, np.argmax(hi[walk] - lo[walk])] -= 1
    return case.walks(lo=lo, hi=hi)


def cut_into_what_is_held(case: Case) -> Case:
    """All boxes grow to their pieces: they take in what the rank holds."""
    walks, ends = case.rows.walks, case.plan.ends
    dims = walks.lo.shape[1]
    return case.walks(lo=ends.lo[walks.dst_piece, :dims], hi=ends.hi[walks.dst_piece, :dims])


def wrong_needer(case: Case) -> Case:
    dst = case.work.dst.copy()
    dst[case.rows.walks.delivery[case.rows.walk[case.received()[0]]]] = case.mate
    return case._replace(work=case.work._replace(dst=dst))


def wrong_holder(case: Case) -> Case:
    """What the mate holds is to be read from a rank that holds nothing."""
    src = case.work.src.copy()
    src[case.planned :] = (case.rank + 1) % 8
    return case._replace(work=case.work._replace(src=src))


def mate_lost_it(case: Case) -> Case:
    return _held(case, case.mate, lambda boxes: boxes._replace(hi=boxes.lo.copy()))


def dropped_segment(case: Case) -> Case:
    return case.only(np.delete(np.arange(len(case.rows.want)), case.received()[0]))


def duplicated_instance(case: Case) -> Case:
    return case.only(np.append(np.arange(len(case.rows.want)), case.received()[0]))


def another_instance(case: Case) -> Case:
    """The row of one tensor is given to another of the same shape."""
    want, (first, *_) = case.rows.want.copy(), case.received()
    want[first] = next(w for w in want[case.received()] if w != want[first])
    return case._replace(rows=case.rows._replace(want=want))


def wrong_view_of_what_is_held(case: Case) -> Case:
    """The rank is taken to hold its boxes one row on."""

    step = np.array([1, 0])

    def on(boxes: Boxes) -> Boxes:
        return boxes._replace(lo=boxes.lo + step, hi=boxes.hi + step)

    return _held(case, case.rank, on)


def held_is_forgotten(case: Case) -> Case:
    return _held(case, case.rank, lambda boxes: boxes._replace(hi=boxes.lo.copy()))


FAULTS = {
    moved_cut: COUNT,
    cut_into_what_is_held: HELD,
    wrong_needer: COUNT,
    wrong_holder: EMPTY,
    mate_lost_it: EMPTY,
    dropped_segment: COUNT,
    duplicated_instance: COUNT,
    another_instance: f"{COUNT}|{HELD}",
    wrong_view_of_what_is_held: f"{COUNT}|{HELD}",
    held_is_forgotten: COUNT,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_in_what_is_left_is_caught(case: Case, fault: Callable[[Case], Case]) -> None:
    """Each kind of wrong remainder fails the proof of what is left alone; the remainder as it was made does not."""
    case.prove()
    with pytest.raises(ProofError, match=FAULTS[fault]):
        fault(case).prove_left()


@pytest.mark.parametrize("column", ["src_storage", "src_offset", "dst_storage", "dst_offset"])
def test_a_wrong_view_of_what_is_left_is_caught(case: Case, column: str) -> None:
    """A row of the remainder that starts elsewhere in either rank's memory fails the proof of rows."""
    wrong = getattr(case.rows, column).copy()
    wrong[case.received()[0]] += 1
    with pytest.raises(ProofError):
        case._replace(rows=case.rows._replace(**{column: wrong})).prove()
