"""Whether ranks hold between them what others need: the first step of a plan, for who needs to know no more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from refitd.errors import InputError, MismatchError, PlanError
from refitd.layout.box import Bools, Ints
from refitd.layout.side import Side
from refitd.layout.sides import check_match, facts_of, source_name, wanted
from refitd.plan.canon import number_ranks
from refitd.plan.cells import Tangled, meeting, sweep
from refitd.plan.classes import classify, source_tensors
from refitd.plan.forms import atoms
from refitd.plan.kept import wanted as fillable
from refitd.plan.large import has_many_pieces, named, side_of
from refitd.plan.ranksets import RankSets, product
from refitd.plan.tables import MEMBER, Rank, build_table


def covered(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    """Whether every element that ``members`` need has a holder among ``sources``.

    A tensor that no source has is as good as one that is held in part: with pipeline stages each rank has tensors of
    its own. Raises MismatchError where the sides differ otherwise, which no other holder would mend, and where boxes
    of a tensor cut each other into more parts than are planned, which more holders would not mend either: `make_plan`
    says the same of them as PlanError.
    """
    try:
        if has_many_pieces(sources, members):
            return _covered_by_sides(side_of(sources), side_of(members))
        return _covered_by_boxes(sources, members)
    except Tangled as error:
        fault = named(error, [*sources, *members])
        raise MismatchError([InputError(str(fault.tensor), fault.expected, fault.got)]) from None


def _covered_by_boxes(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    if _absent(sources, members):
        return False
    check_match({r.key: r.layout for r in sources}, {r.key: r.layout for r in members})
    table, known = build_table(sources, (), members), dict[tuple[bytes, ...], bool]()
    needs = table.roles[table.rank] == MEMBER
    for group, (first, last) in enumerate(pairwise(table.start.tolist())):
        lo, hi, mask = table.lo[first:last], table.hi[first:last], needs[first:last]
        key = lo.tobytes(), hi.tobytes(), mask.tobytes()
        if key not in known:
            known[key] = _whole(lo, hi, mask, table.groups[group])
        if not known[key]:
            return False
    return True


def _absent(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    """Whether no source knows a tensor, by its name or an alias of it, that some member needs."""
    names = facts_of({r.key: r.layout for r in sources})
    wanting = {r.key: r.layout for r in members}
    needed = {piece.tensor for layout in wanting.values() for piece in wanted(layout)}
    return any(source_name(name, wanting, names) is None for name in needed)


def _covered_by_sides(source: Side, destination: Side) -> bool:
    ranks, needed = number_ranks(source, destination), np.unique(fillable(destination).instances[:, 0])
    if (source_tensors(source, destination, needed) < 0).any():
        return False
    try:
        classify(source, destination, ranks, RankSets(len(ranks.keys)))
    except Tangled:  # nothing is known of it
        raise
    except PlanError:
        return False
    return True


def _whole(lo: Ints, hi: Ints, needs: Bools, tensor: str) -> bool:
    """Whether every cell of boxes ``lo``, ``hi`` (B, D) that a box in ``needs`` (B,) has is also in another one.

    Raises Tangled, by name of the ``tensor``.
    """
    try:
        swept = sweep(lo, hi)
    except Tangled:  # each side by itself may have few parts
        return _fills(lo, hi, needs, tensor)
    needed, held = np.zeros(len(swept.lo), dtype=bool), np.zeros(len(swept.lo), dtype=bool)
    mask = needs[swept.box]
    needed[swept.cell[mask]] = True
    held[swept.cell[~mask]] = True
    return bool((held | ~needed).all())


def _fills(lo: Ints, hi: Ints, needs: Bools, tensor: str) -> bool:
    """The same by volumes: whether what others have in common with each atom that is needed fills it."""
    try:
        (low, high, _, _), (held_low, held_high, _, _) = (atoms(lo[side], hi[side]) for side in (needs, ~needs))
        need, have = meeting(low, high, held_low, held_high)
    except Tangled as error:
        raise error.of(tensor=f"tensor {tensor}") from None
    filled = np.zeros(len(low), np.int64)
    np.add.at(filled, need, product(np.minimum(high[need], held_high[have]) - np.maximum(low[need], held_low[have])))
    return bool((filled == product(high - low)).all())
