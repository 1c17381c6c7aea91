"""What is left of a rank's grains when ranks hold boxes already: nothing that a receiver holds; and what another rank
of its node holds comes from there.

The whole plan says who brings a byte into a node (its *entry*) and who reads it there from the entry. A receiver's own
boxes are taken out of what it gets. Of the rest, what the entry holds is read from it as planned; what only another
rank of the same set holds is read from that one, in stage 1, by the entry too, so that nothing enters a node that is in
it. Sender and receiver of a message know what all ranks hold and find the same.

Neighbours of a lane are ranks of its plan that hold all that they need.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from refitd.errors import ProofError
from refitd.layout import Box
from refitd.layout.box import Bools, Ints, difference
from refitd.plan.canon import Ranks
from refitd.plan.cutting import Parcels
from refitd.plan.ends import Ends
from refitd.plan.expand import Deliveries, Grains
from refitd.plan.flows import NEAR_PEER, NET
from refitd.plan.held import Held
from refitd.plan.ranksets import SetTable, distinct, ends, product, ragged
from refitd.plan.rows import Rows


class Boxes(NamedTuple):
    """Boxes ``lo``, ``hi`` (N, D) that one rank holds, by want: those of want w are ``first[w]:first[w + 1]``."""

    first: Ints
    lo: Ints
    hi: Ints

    def common(self, want: Ints, lo: Ints, hi: Ints) -> Ints:
        """Elements of each box ``lo``, ``hi`` of ``want`` that are held."""
        run, place = ragged(self.first[want + 1] - self.first[want])
        row = self.first[want][run] + place
        extent = np.minimum(hi[run], self.hi[row]) - np.maximum(lo[run], self.lo[row])
        total = np.zeros(len(want), np.int64)
        np.add.at(total, run, product(np.maximum(extent, 0)))
        return total

    def of(self, want: int) -> list[Box]:
        """The boxes of one want."""
        at = slice(int(self.first[want]), int(self.first[want + 1]))
        return [Box(tuple(a), tuple(b)) for a, b in zip(self.lo[at].tolist(), self.hi[at].tolist(), strict=True)]


class Holdings:
    """What ranks hold, by number of the plan, in the wants of ``laid``; of each rank when it is first asked for.

    ``lenders``: keys of ranks that hold all their pieces.
    """

    def __init__(self, laid: Ends, ranks: Ranks, held: Mapping[str, Held], lenders: Collection[str] = ()) -> None:
        self._laid, self._classes, self.ranks = laid, laid.classes, ranks
        self._held, self._lenders = held, lenders
        self._known: dict[int, Boxes | None] = {}

    def of(self, rank: int) -> Boxes | None:
        """The boxes of a rank, or None where it holds nothing."""
        if rank not in self._known:
            key = self.ranks.keys[rank]
            held = self._held.get(key)
            if key in self._lenders:
                self._known[rank] = self._all(rank)
            else:
                self._known[rank] = self._boxes(held) if held and len(held.tensor) else None
        return self._known[rank]

    def _all(self, rank: int) -> Boxes:
        want, piece = _pieces(self._laid, rank)
        order = np.argsort(want, kind="stable")
        at = piece[order]
        return self._by_want(want[order], self._laid.lo[at], self._laid.hi[at])

    def _by_want(self, want: Ints, lo: Ints, hi: Ints) -> Boxes:
        dims = self._classes.lo.shape[1]
        return Boxes(ends(np.bincount(want, minlength=len(self._classes.dst))), lo[:, :dims], hi[:, :dims])

    def _boxes(self, held: Held) -> Boxes:
        laid = self._classes.destination
        numbers = np.full(len(laid.side.tensors) + 1, -1, np.int64)
        numbers[laid.tensor[self._classes.dst]] = np.arange(len(self._classes.dst))
        want = numbers[laid.side.tensors.where(held.names)][held.tensor]
        row = np.flatnonzero(want >= 0)
        row = row[np.argsort(want[row], kind="stable")]
        return self._by_want(want[row], held.lo[row], held.hi[row])


class _Items(NamedTuple):
    """Boxes of grains, one by one: which grain, which box, its want and bounds, who receives it."""

    grain: Ints
    box: Ints
    want: Ints
    lo: Ints
    hi: Ints
    dst: Ints

    def take(self, at: Ints) -> _Items:
        return _Items(*(column[at] for column in self))


def left(
    holdings: Holdings, sets: SetTable, parcels: Parcels, work: Deliveries, grains: Grains, rank: int
) -> tuple[Deliveries, Grains]:
    """The deliveries and grains of ``rank`` without what is held."""
    items = _items(work, grains)
    own = _common(holdings, items, items.dst)
    whole = product(items.hi - items.lo)
    near, mate = _in_the_node(holdings, sets, parcels, work, grains, items)
    loose, gone = (own > 0) | near, own == whole
    touched = np.zeros(len(grains.unit), dtype=bool)
    touched[items.grain[loose | gone]] = True
    again = touched[items.grain] & ~gone
    moved = again & (own == 0) & near & (mate >= 0)
    parts = _Parts(holdings, sets, parcels, work, grains)
    parts.whole(items, np.flatnonzero(again & ~loose))
    parts.whole(items, np.flatnonzero(moved), mate)
    for at in np.flatnonzero(again & loose & ~moved).tolist():
        parts.add(items, at)
    return parts.joined(np.flatnonzero(~touched), rank)


def _items(work: Deliveries, grains: Grains) -> _Items:
    count = np.bincount(grains.box_unit, minlength=int(grains.unit.max(initial=-1)) + 1)
    grain, place = ragged(count[grains.unit])
    box = ends(count)[grains.unit[grain]] + place
    return _Items(grain, box, grains.want[grain], grains.lo[box], grains.hi[box], work.dst[grains.delivery[box]])


def _common(holdings: Holdings, items: _Items, rank: Ints) -> Ints:
    """Elements of each item that ``rank`` (of each) holds."""
    total = np.zeros(len(rank), np.int64)
    for number in distinct(rank).tolist():
        boxes, mine = holdings.of(number), np.flatnonzero(rank == number)
        if boxes is not None:
            total[mine] = boxes.common(items.want[mine], items.lo[mine], items.hi[mine])
    return total


def _in_the_node(
    holdings: Holdings, sets: SetTable, parcels: Parcels, work: Deliveries, grains: Grains, items: _Items
) -> tuple[Bools, Ints]:
    """Items of which ranks that also need them hold something, other than the receiver, and than the sender alone; and
    the first of these ranks that holds the whole item, or -1."""
    delivery = grains.delivery[items.box]
    number = parcels.flows.needers[work.parcel[delivery]]
    entering = (parcels.flows.link[work.parcel[delivery]] == NET) & (sets.size()[number] > 1)
    at = np.flatnonzero(entering)
    run, place = ragged(sets.size()[number[at]])
    mate = sets.member[sets.first[number[at]][run] + place]
    here = holdings.ranks.node[mate] == holdings.ranks.node[items.dst[at[run]]]
    other = np.flatnonzero(here & (mate != items.dst[at[run]]) & (mate != work.src[delivery[at[run]]]))
    found, first = np.zeros(len(items.grain), dtype=bool), np.full(len(items.grain), -1, np.int64)
    mate, item = mate[other], at[run[other]]
    theirs = items.take(item)
    common = _common(holdings, theirs, mate)
    found[item[common > 0]] = True
    full = np.flatnonzero(common == product(theirs.hi - theirs.lo))[::-1]
    first[item[full]] = mate[full]
    sender = np.flatnonzero(found & (work.spread[delivery] > 0))
    pieces = items.take(sender)
    all_of_it = _common(holdings, pieces, work.src[delivery[sender]]) == product(pieces.hi - pieces.lo)
    found[sender[all_of_it]] = False
    return found, first


class _Parts:
    """Grains that stay as they are, and parts of others, each of which becomes a unit of its own."""

    def __init__(self, holdings: Holdings, sets: SetTable, parcels: Parcels, work: Deliveries, grains: Grains) -> None:
        self._holdings, self._sets, self._parcels = holdings, sets, parcels
        self._work, self._grains = work, grains
        self._extra: dict[tuple[int, int], int] = {}  # (delivery, rank that it is read from instead): its number
        self._rows: list[tuple[int, int, int, int]] = []  # grain, box, delivery, stage
        self._lo: list[tuple[int, ...]] = []
        self._hi: list[tuple[int, ...]] = []
        self._wholes: list[tuple[Ints, Ints, Ints]] = []  # rows, lo, hi

    def whole(self, items: _Items, at: Ints, mate: Ints | None = None) -> None:
        """Items ``at`` as they are: as planned, or read from a ``mate`` (of each item) instead, in stage 1."""
        delivery, stage = self._grains.delivery[items.box[at]], self._grains.stage[items.grain[at]]
        if mate is not None:
            count = len(self._holdings.ranks.keys)
            pairs, which = np.unique(delivery * count + mate[at], return_inverse=True)
            numbers = [self._number(*divmod(pair, count)) for pair in pairs.tolist()]
            delivery, stage = np.array(numbers, np.int64)[which], np.ones(len(at), np.int64)
        rows = np.stack([items.grain[at], items.box[at], delivery, stage], axis=1)
        self._wholes.append((rows, items.lo[at], items.hi[at]))

    def _number(self, delivery: int, mate: int) -> int:
        return self._extra.setdefault((delivery, mate), len(self._work.src) + len(self._extra))

    def add(self, items: _Items, at: int) -> None:
        """What is left of item ``at``, of which something is held somewhere."""
        box, want = int(items.box[at]), int(items.want[at])
        whole = Box(tuple(items.lo[at].tolist()), tuple(items.hi[at].tolist()))
        delivery, stage = int(self._grains.delivery[box]), int(self._grains.stage[int(items.grain[at])])
        row = int(items.grain[at]), box
        rest = difference(whole, self._boxes(int(items.dst[at]), want))
        planned, elsewhere = self._shared(rest, delivery, want, int(items.dst[at]))
        self._keep(row, delivery, stage, planned)
        for mate, parts in elsewhere:
            self._keep(row, self._number(delivery, mate), 1, parts)

    def _shared(
        self, rest: list[Box], delivery: int, want: int, dst: int
    ) -> tuple[list[Box], list[tuple[int, list[Box]]]]:
        """``rest`` as planned, and from which other ranks of the set."""
        parcel, src = int(self._work.parcel[delivery]), int(self._work.src[delivery])
        if int(self._parcels.flows.link[parcel]) != NET:
            return rest, []
        kept: list[Box] = []
        if int(self._work.spread[delivery]):
            kept, rest = _divide(rest, self._boxes(src, want))
        elsewhere, node = [], self._holdings.ranks.node
        for mate in self._sets.of(int(self._parcels.flows.needers[parcel])).tolist():
            if mate not in (src, dst) and node[mate] == node[dst]:
                found, rest = _divide(rest, self._boxes(mate, want))
                if found:
                    elsewhere.append((mate, found))
        return kept + rest, elsewhere

    def _boxes(self, rank: int, want: int) -> list[Box]:
        boxes = self._holdings.of(rank)
        return boxes.of(want) if boxes is not None else []

    def _keep(self, row: tuple[int, int], delivery: int, stage: int, boxes: list[Box]) -> None:
        self._rows += [(*row, delivery, stage)] * len(boxes)
        self._lo += [box.lo for box in boxes]
        self._hi += [box.hi for box in boxes]

    def joined(self, stay: Ints, rank: int) -> tuple[Deliveries, Grains]:
        """All deliveries, and the grains that are left: those that ``stay``, and the parts that concern ``rank``."""
        grains, work = self._grains, self._more()
        rows, dims = np.array(self._rows, np.int64).reshape(-1, 4), grains.lo.shape[1]
        lo, hi = (np.array(side, np.int64).reshape(len(rows), dims) for side in (self._lo, self._hi))
        rows, lo, hi = (np.concatenate(column) for column in zip((rows, lo, hi), *self._wholes, strict=True))
        mine = (work.src[rows[:, 2]] == rank) | (work.dst[rows[:, 2]] == rank)
        rows, lo, hi = rows[mine], lo[mine], hi[mine]
        units = distinct(grains.unit[stay])
        boxes = np.flatnonzero(np.isin(grains.box_unit, units))
        number = len(units) + np.arange(len(rows))
        return work, Grains(
            np.concatenate([np.searchsorted(units, grains.unit[stay]), number]),
            np.concatenate([grains.want[stay], grains.want[rows[:, 0]]]),
            np.concatenate([grains.phase[stay], grains.phase[rows[:, 0]]]),
            np.concatenate([grains.stage[stay], rows[:, 3]]),
            np.concatenate([np.searchsorted(units, grains.box_unit[boxes]), number]),
            np.concatenate([grains.delivery[boxes], rows[:, 2]]),
            np.concatenate([grains.entry[boxes], grains.entry[rows[:, 1]]]),
            np.concatenate([grains.lo[boxes], lo]),
            np.concatenate([grains.hi[boxes], hi]),
        )

    def _more(self) -> Deliveries:
        """With those from other ranks of a set than planned."""
        at = np.array([delivery for delivery, _ in self._extra], np.int64)
        mates, ones = np.array([mate for _, mate in self._extra], np.int64), np.ones(len(at), np.int64)
        more = self._work.take(at)._replace(src=mates, link=ones * NEAR_PEER, spread=ones, held=ones)
        return Deliveries(*(np.concatenate(pair) for pair in zip(self._work, more, strict=True)))


def _divide(boxes: list[Box], others: list[Box]) -> tuple[list[Box], list[Box]]:
    """The parts of ``boxes`` that are in ``others`` (disjoint), and those that are not."""
    common = [part for box in boxes for other in others if (part := box.intersect(other)) is not None]
    return common, [part for box in boxes for part in difference(box, others)]


def prove_left(laid: Ends, holdings: Holdings, work: Deliveries, rows: Rows, rank: int, planned: int) -> None:
    """Raise ProofError unless what ``rank`` holds and what it receives are its pieces, each element once; and unless
    those hold it that it reads from in deliveries after the first ``planned`` ones."""
    walks, boxes = rows.walks, holdings.of(rank)
    mine = np.flatnonzero((work.dst[walks.delivery] == rank)[rows.walk])
    walk, want = rows.walk[mine], rows.want[mine]
    lo, hi, source = walks.lo[walk], walks.hi[walk], work.src[walks.delivery[walk]]
    got = np.zeros(laid.wants, np.int64)
    np.add.at(got, want, product(hi - lo))
    if boxes is not None:
        if boxes.common(want, lo, hi).any():
            raise ProofError("a rank is to receive what it holds")
        tensor, piece = _pieces(laid, rank)
        np.add.at(got, tensor, boxes.common(tensor, laid.lo[piece], laid.hi[piece]))
    if (got != _due(laid, rank)).any():
        raise ProofError("what a rank holds and receives is not what it needs")
    extra = walks.delivery[walk] >= planned
    for mate in distinct(source[extra]).tolist():
        theirs, at = holdings.of(mate), np.flatnonzero((source == mate) & extra)
        if theirs is None or (theirs.common(want[at], lo[at], hi[at]) != product(hi[at] - lo[at])).any():
            raise ProofError("a rank is to read from another what that does not hold")


def _due(laid: Ends, rank: int) -> Ints:
    """Elements of each want that ``rank`` has pieces for."""
    combo, piece, holder = laid.held
    mine, due = np.flatnonzero(holder == rank), np.zeros(len(laid.form), np.int64)
    np.add.at(due, combo[mine], laid.volume[piece[mine]])
    needed: Ints = due[laid.combo[laid.wants :]]
    return needed


def _pieces(laid: Ends, rank: int) -> tuple[Ints, Ints]:
    """Wants and pieces of ``rank``, as columns."""
    combo, piece, holder = laid.held
    mine, own = np.flatnonzero(holder == rank), laid.combo[laid.wants :]
    order = np.argsort(own, kind="stable")
    first, last = (np.searchsorted(own[order], combo[mine], side=side) for side in ("left", "right"))
    run, place = ragged(last - first)
    return order[first[run] + place], piece[mine][run]
