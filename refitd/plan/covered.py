"""Whether ranks hold between them what others need: the first step of a plan, for who needs to know no more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refitd.errors import PlanError
from refitd.layout.box import Bools, Ints, grid
from refitd.layout.side import Side
from refitd.layout.sides import check_match, facts_of, source_name, wanted
from refitd.plan.canon import number_ranks
from refitd.plan.classes import classify, source_tensors
from refitd.plan.kept import wanted as fillable
from refitd.plan.large import is_large, side_of
from refitd.plan.ranksets import RankSets
from refitd.plan.tables import MEMBER, Rank, build_table


def covered(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    """Whether every element that ``members`` need has a holder among ``sources``.

    A tensor that no source has is as good as one that is held in part: with pipeline stages each rank has tensors of
    its own. Raises MismatchError where the sides differ otherwise, which no other holder would mend.
    """
    if is_large(sources, members):
        return _covered_by_sides(side_of(sources), side_of(members))
    if _absent(sources, members):
        return False
    check_match({r.key: r.layout for r in sources}, {r.key: r.layout for r in members})
    table, known = build_table(sources, (), members), dict[tuple[bytes, ...], bool]()
    needs = table.roles[table.rank] == MEMBER
    for first, last in zip(table.start[:-1].tolist(), table.start[1:].tolist(), strict=True):
        lo, hi, mask = table.lo[first:last], table.hi[first:last], needs[first:last]
        key = lo.tobytes(), hi.tobytes(), mask.tobytes()
        if key not in known:
            known[key] = _whole(lo, hi, mask)
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
    except PlanError:
        return False
    return True


def _whole(lo: Ints, hi: Ints, needs: Bools) -> bool:
    """Whether every cell of boxes ``lo``, ``hi`` (B, D) that a box in ``needs`` (B,) has is also in another one."""
    inside = grid(lo, hi).inside
    return bool((inside[:, ~needs].any(axis=1) | ~inside[:, needs].any(axis=1)).all())
