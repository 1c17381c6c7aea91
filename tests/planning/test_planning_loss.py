"""Loss of a source node of DeepSeek-V3 on the way."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from preset_counts import sole_bytes

from refitd.plan import SidePlan, lose, plan_sides
from refitd.planning.cases import Sides, preset_case

NODE = 8


@cache
def whole() -> tuple[Sides, SidePlan]:
    sides, topology = preset_case("deepseek-v3-h100")
    return sides, plan_sides(*sides, topology)


@cache
def alone(first: int) -> int:
    """Bytes that the node whose ranks begin at ``first`` alone holds."""
    return sole_bytes(whole()[0][0], set(range(first, first + NODE)), itemsize=2)


def orders(lost: frozenset[str]) -> Counter[tuple[int, int, int]]:
    """(grains, bytes of a grain, domains that get it) of all runs that only ``lost`` hold; how many there are of each.

    Each of the domains begins a run at its own grain, in equal distances, and goes round.
    """
    plan = whole()[1]
    lines, ranks = plan.content.lines, plan.content.ranks
    sets = plan.content.sets.table()
    found: Counter[tuple[int, int, int]] = Counter()
    for line, (holders, needers) in enumerate(zip(lines.holders.tolist(), lines.needers.tolist(), strict=True)):
        if {ranks.keys[rank] for rank in sets.of(holders).tolist()} <= lost:
            domains = len({int(ranks.domain[rank]) for rank in sets.of(needers).tolist()})
            for entry in range(int(lines.first[line]), int(lines.first[line + 1])):
                grain = int(lines.cell_bytes[entry]) // int(lines.parts[entry])
                found[int(lines.grains[entry]), grain, domains] += 1
    return found


def absent(grains: int, domains: int, at: float) -> int:
    """Grains that have landed in no domain when each has its first ``at`` of them."""
    landed = np.zeros(grains, dtype=bool)
    done = -(-grains * round(at * 1000) // 1000)
    for place in range(domains):
        landed[(grains * place // domains + np.arange(done)) % grains] = True
    return int((~landed).sum())


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_only_what_no_live_rank_holds_is_gone(at: float) -> None:
    """For each of the 32 source nodes the unrecoverable bytes are those that landed nowhere; none from half-way on.

    The two nodes of the first stage, which has no experts, hold nothing alone.
    """
    (source, _), plan = whole()
    for first in range(0, len(source.ranks), NODE):
        lost = source.ranks[first : first + NODE]
        runs = orders(frozenset(lost))
        held = sum(grains * size * times for (grains, size, _), times in runs.items())
        assert held == alone(first)
        gone = sum(absent(grains, domains, at) * size * times for (grains, size, domains), times in runs.items())
        assert lose(plan, lost, at).totals["unrecoverable_bytes"] == gone
        assert (gone == 0) == (at >= 0.5 or not held)
        assert gone <= held * 0.25


def test_all_is_gone_that_a_node_alone_held_when_nothing_had_landed() -> None:
    """Lost at the very beginning, a source node takes its sole-held bytes with it, and a destination node nothing."""
    (source, destination), plan = whole()
    first = 2 * NODE
    held = alone(first)
    assert lose(plan, source.ranks[first : first + NODE], 0.0).totals["unrecoverable_bytes"] == held > 0
    rest = lose(plan, destination.ranks[:NODE], 0.0).totals
    assert rest["unrecoverable_bytes"] == 0
    domains, matrix = plan.links()
    entering = int(matrix[:, domains.index(destination.domains[0])].sum())
    assert rest["remaining_bytes"] == plan.totals["remaining_bytes"] - entering
