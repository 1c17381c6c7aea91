"""The proof of a factored plan can fail: every planted fault is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from side_makers import TINY, moe

from refitd.errors import ProofError
from refitd.plan import SidePlan, plan_sides
from refitd.plan.content import Content
from refitd.plan.cutting import Cutting, Segments
from refitd.plan.expand import Deliveries, deliveries, expand
from refitd.plan.flows import NET
from refitd.plan.proof_lines import prove_content, prove_cuts
from refitd.plan.proof_rows import prove_rows
from refitd.plan.rows import Rows, make_rows
from refitd.plan.side_plan import Core
from refitd.plan.side_program import by_address

NONE = np.zeros(0, np.int64)


@pytest.fixture(scope="module")
def plan() -> SidePlan:
    """A plan that has cuts, stripes, relays and several domains."""
    made = plan_sides(*moe(replace(TINY, node=4, domain=4, usable=4)), TINY)
    assert made.totals["relay_bytes"] > 0
    assert made.totals["peer_bytes"] > 0
    return made


def prove(plan: SidePlan, cutting: Cutting) -> None:
    content = plan.content
    sets = content.sets.table()
    prove_cuts(
        content.lines, cutting, sets, content.ranks, content.lines.nbytes * sets.size()[content.lines.needers], NONE
    )


def cut_places(cutting: Cutting) -> np.ndarray:
    """Segments that follow another of their parcel."""
    parcel = cutting.segments.parcel
    return np.flatnonzero(parcel[1:] == parcel[:-1]) + 1


def moved_cut(plan: SidePlan, s: Segments) -> Segments:
    s.start[cut_places(plan.cutting)[0]] += 1
    return s


def both_sides_of_a_cut(plan: SidePlan, s: Segments) -> Segments:
    last = np.flatnonzero(plan.cutting.segments.parcel == 0)[-1]
    s.stop[last] -= 1
    return s


def dropped(plan: SidePlan, s: Segments) -> Segments:
    return Segments(*(np.delete(column, cut_places(plan.cutting)[0]) for column in s))


def first_dropped(plan: SidePlan, s: Segments) -> Segments:
    return Segments(*(column[1:] for column in s))


def twice(plan: SidePlan, s: Segments) -> Segments:
    return Segments(*(np.insert(column, 1, column[0]) for column in s))


def wrong_needer(plan: SidePlan, s: Segments) -> Segments:
    s.dst[0] = (s.dst[0] + 1) % 16
    return s


def wrong_holder(plan: SidePlan, s: Segments) -> Segments:
    size = plan.content.sets.table().size()
    single = np.flatnonzero(size[plan.cutting.parcels.flows.holders[s.parcel]] == 1)[0]
    s.src[single] = (s.src[single] + 1 - 16) % 16 + 16
    return s


def no_beginning(plan: SidePlan, s: Segments) -> Segments:
    late = np.flatnonzero(plan.cutting.parcels.relay[s.parcel] == 1)[0]
    s.src[late] = s.dst[late]
    return s


@pytest.mark.parametrize(
    "mutate",
    [moved_cut, both_sides_of_a_cut, dropped, first_dropped, twice, wrong_needer, wrong_holder, no_beginning],
    ids=lambda f: f.__name__,
)
def test_a_planted_fault_in_the_segments_is_caught(
    plan: SidePlan, mutate: Callable[[SidePlan, Segments], Segments]
) -> None:
    """Each kind of wrong segment fails the proof; the segments as they were made do not."""
    prove(plan, plan.cutting)
    segments = Segments(*(column.copy() for column in plan.cutting.segments))
    with pytest.raises(ProofError):
        prove(plan, plan.cutting._replace(segments=mutate(plan, segments)))


def test_a_planted_fault_in_parcels_and_windows_is_caught(plan: SidePlan) -> None:
    """Lost parcels, flows to another domain, relays from elsewhere and windows that leave gaps fail the proof."""
    cutting, parcels, spans = plan.cutting, plan.cutting.parcels, plan.cutting.spans
    flows = parcels.flows
    late = np.flatnonzero(parcels.relay == 1)
    origin, needers, grain, length = (
        parcels.origin.copy(),
        flows.needers.copy(),
        spans.grain.copy(),
        spans.length.copy(),
    )
    origin[late[0]] = flows.place[late[0]]
    two = np.flatnonzero((flows.link == NET) & (flows.of > 1))[:2]
    needers[two] = needers[two[::-1]]
    grain[-1] -= 1
    length[0] -= 1
    wrong = [
        cutting._replace(parcels=parcels._replace(origin=origin)),
        cutting._replace(parcels=parcels._replace(flows=flows._replace(needers=needers))),
        cutting._replace(parcels=parcels._replace(flows=flows._replace(line=np.roll(flows.line, 1)))),
        cutting._replace(spans=spans._replace(grain=grain)),
        cutting._replace(spans=spans._replace(length=length)),
    ]
    for fault in wrong:
        with pytest.raises(ProofError):
            prove(plan, fault)


def contents(content: Content) -> dict[str, Content]:
    """What the sides have to do with each other, with one fault each."""
    classes, lines = content.classes, content.lines
    dst, combo, atom, lo, holders = (
        a.copy() for a in (classes.dst, classes.src_combo, classes.src_atom, classes.lo, lines.holders)
    )
    dst[0] = dst[1]
    combo[0] = combo[-1]
    atom[0] += 1
    lo[0, 0] += 1
    holders[0] += 1
    return {
        "duplicated instance": content._replace(classes=classes._replace(dst=dst)),
        "wrong class": content._replace(classes=classes._replace(src_combo=combo)),
        "wrong atom": content._replace(classes=classes._replace(src_atom=atom)),
        "smaller cell": content._replace(classes=classes._replace(lo=lo)),
        "wrong holders": content._replace(lines=lines._replace(holders=holders)),
        "dropped entry": content._replace(lines=lines._replace(entry_cell=lines.entry_cell[::-1])),
    }


@pytest.mark.parametrize(
    "fault", ["duplicated instance", "wrong class", "wrong atom", "smaller cell", "wrong holders", "dropped entry"]
)
def test_a_planted_fault_in_classes_and_lines_is_caught(plan: SidePlan, fault: str) -> None:
    """Each kind of wrong class, cell or line fails the proof of the content."""
    content = plan.content
    prove_content(content.classes, content.lines, content.sets.table())
    wrong = contents(content)[fault]
    with pytest.raises((ProofError, IndexError)):
        prove_content(wrong.classes, wrong.lines, content.sets.table())


def test_wrong_views_are_caught() -> None:
    """A destination view that ends beyond its storage, and two that share an address, fail the proof."""
    source, destination = moe(TINY)
    beyond, shared = destination.instances.copy(), destination.instances.copy()
    beyond[0, 4] += 1
    shared[1, 3] = shared[0, 3]
    for instances in (beyond, shared):
        wrong = replace(destination, instances=instances, keep=("none",))
        with pytest.raises((ProofError, Exception), match=r"leaves storage|share an address|expected a piece in it"):
            plan_sides(source, wrong, TINY)


def walk(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], Rows]:
    """Another column of what rows of many tensors have in common."""
    return lambda rows: rows._replace(walks=rows.walks._replace(**{name: change(getattr(rows.walks, name))}))


def row(name: str) -> Callable[[Rows], Rows]:
    """One more in the last row of a column."""

    def changed(rows: Rows) -> Rows:
        column = getattr(rows, name).copy()
        column[-1] += 1
        return rows._replace(**{name: column})

    return changed


def step(column: int) -> Callable[[Rows], Rows]:
    """One more in a step of the first walk of several rows and columns."""

    def changed(steps: np.ndarray) -> np.ndarray:
        steps = steps.copy()
        steps[np.flatnonzero((steps[:, 4:] > 1).all(axis=1))[0], column] += 1
        return steps

    return walk("steps", changed)


def take(rows: Rows, at: np.ndarray) -> Rows:
    return Rows(rows.walks, *(column[at] for column in rows[1:]))


def without_one(rows: Rows) -> Rows:
    """Without a row whose walk has others."""
    at = np.flatnonzero(rows.walk[1:] == rows.walk[:-1])[0]
    return take(rows, np.delete(np.arange(len(rows.want)), at))


ROW_FAULTS: dict[str, Callable[[Rows], Rows]] = {
    "source storage": row("src_storage"),
    "source offset": row("src_offset"),
    "destination storage": row("dst_storage"),
    "destination offset": row("dst_offset"),
    "source stride": step(0),
    "source step": step(1),
    "destination stride": step(2),
    "destination step": step(3),
    "more rows": step(4),
    "more columns": step(5),
    "dropped": without_one,
    "dropped with its walk": lambda rows: take(rows, np.flatnonzero(rows.walk != rows.walk[0])),
    "twice": lambda rows: take(rows, np.append(np.arange(len(rows.want)), 0)),
    "another tensor": lambda rows: rows._replace(want=np.roll(rows.want, 1)),
    "no tensor": lambda rows: rows._replace(want=rows.want - 10**6),
    "another walk": lambda rows: rows._replace(walk=np.roll(rows.walk, 1)),
    "another source piece": walk("src_piece", lambda piece: np.roll(piece, 7)),
    "another piece": walk("dst_piece", lambda piece: np.roll(piece, 7)),
    "another sender and receiver": walk("delivery", lambda delivery: np.roll(delivery, 7)),
    "another box": lambda rows: walk("hi", lambda hi: hi + 1)(walk("lo", lambda lo: lo + 1)(rows)),
    "a smaller box": walk("hi", lambda hi: hi - 1),
}


def rows_of(plan: SidePlan, number: int) -> tuple[Deliveries, Rows]:
    content = plan.content
    work = deliveries(plan.cutting, content.sets.table(), content.ranks, number)
    return work, make_rows(plan.ends, work, expand(content.lines, content.classes, plan.cutting, plan.part, work))


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_planted_fault_in_the_rows_of_a_rank_is_caught(plan: SidePlan, fault: str) -> None:
    """Each kind of wrong row fails the rank's own proof."""
    work, rows = rows_of(plan, 3)
    prove_rows(plan.ends, work, rows, by_address(rows), 3, whole=True)
    wrong = ROW_FAULTS[fault](rows)
    with pytest.raises(ProofError):
        prove_rows(plan.ends, work, wrong, by_address(wrong), 3, whole=True)


def test_the_proof_does_not_rely_on_the_order_of_rows(plan: SidePlan) -> None:
    """Any order of all rows will do; a row that is missing in it or is there twice is caught."""
    work, rows = rows_of(plan, 3)
    order = by_address(rows)
    prove_rows(plan.ends, work, rows, order[::-1], 3, whole=True)
    received = np.flatnonzero(work.dst[rows.walks.delivery[rows.walk]][order] == 3)
    shorter, repeated = np.delete(order, received[0]), order.copy()
    repeated[received[1]] = order[received[0]]
    for wrong in (shorter, repeated, np.append(order, order[received[0]])):
        with pytest.raises(ProofError, match="where they are put in order"):
            prove_rows(plan.ends, work, rows, wrong, 3, whole=True)


def test_a_core_can_be_proven_again(plan: SidePlan) -> None:
    """A plan made of the same parts has the same programs."""
    again = SidePlan(plan.digest, plan.topology, plan.bucket_bytes, Core(plan.content, plan.cutting, plan.part))
    assert again.program("engine/b/00003").to_bytes() == plan.program("engine/b/00003").to_bytes()
