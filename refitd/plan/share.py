"""Share bytes among ranks so that the busiest has least to do, in integers: every processor chooses alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.ranksets import SetTable

PASSES = 30
_GOOD = 200  # stop when the busiest rank has at most a 200th more than the bound


class Shares(NamedTuple):
    """``load`` (ranks,): bytes of each rank. ``share``: bytes of each member of each set, beside `SetTable.member`."""

    load: Ints
    share: Ints


def pour(demand: Ints, sets: SetTable, ranks: int, least: int, before: Ints | None = None) -> Shares:
    """Divide ``demand`` (sets,) among the members of each set, on top of what each rank has ``before``.

    Small sets first is exact where sets nest; otherwise it is repeated until the bound is near. A set uses no more
    members than it has shares of ``least`` bytes for.
    """
    load = np.zeros(ranks, np.int64) if before is None else before.copy()
    share = np.zeros(len(sets.member), np.int64)
    size = sets.size()
    single = np.flatnonzero((demand > 0) & (size == 1))
    np.add.at(load, sets.member[sets.first[single]], demand[single])
    share[sets.first[single]] = demand[single]
    several = np.flatnonzero((demand > 0) & (size > 1))
    several = several[np.lexsort((several, size[several]))]
    runs = [(int(sets.first[s]), int(sets.first[s + 1]), int(demand[s])) for s in several.tolist()]
    for number in range(PASSES if len(runs) > 1 else 1):
        changed = False
        for start, stop, total in runs:
            members = sets.member[start:stop]
            own = load[members] - share[start:stop]
            new = _fill(own, total, least)
            changed |= bool((new != share[start:stop]).any())
            share[start:stop] = new
            load[members] = own + new
        busiest = int(load.max(initial=0))
        if not changed or (number == 0 and busiest - bound(demand, sets, load) <= busiest // _GOOD):
            break
    return Shares(load, share)


def _fill(load: Ints, total: int, least: int) -> Ints:
    """Shares (n,) that lift the lowest loads to one level."""
    order = np.argsort(load, kind="stable")[: max(1, -(-total // least))]
    low = load[order]
    room = np.arange(1, len(low) + 1) * low - np.cumsum(low)  # what it takes to lift all before to this one
    count = int(np.searchsorted(room, total, side="right"))
    level, rest = divmod(total + int(low[:count].sum()), count)
    shares = np.zeros(len(load), np.int64)
    shares[order[:count]] = level - low[:count]
    shares[order[:rest]] += 1
    return shares


def bound(demand: Ints, sets: SetTable, load: Ints) -> int:
    """A least possible busiest load: for ranks T that carry t or more, what only they can carry, over their number."""
    used = np.flatnonzero(demand > 0)
    if not len(used):
        return 0
    lowest = np.minimum.reduceat(load[sets.member], sets.first[:-1])[used]
    order = np.argsort(-lowest, kind="stable")
    carried = np.cumsum(demand[used][order])
    levels = -np.sort(-load)
    inside = np.searchsorted(-levels, -lowest[order], side="right")  # ranks with at least that load
    return int((-(-carried // inside)).max())
