"""With relays or directly: the plan is what the cost model says is faster, and its reasons say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from side_makers import moe

from refitd.plan import plan_sides, topology

HOSTS = topology("h100-nvl8")


@pytest.mark.parametrize("hosts", [8, 4, 2])
@pytest.mark.parametrize("layers", [3, 12, 60])
@pytest.mark.parametrize("dp", [4, 8])
def test_a_small_uneven_model_is_never_slower_than_going_directly(hosts: int, layers: int, dp: int) -> None:
    """Stages of unequal depth, where relays would even out the sources: they are taken only where that is faster."""
    links = replace(HOSTS, node=hosts, domain=hosts, usable=hosts)
    source, destination = moe(links, layers=layers, dp=dp)
    plan, direct = plan_sides(source, destination, links), plan_sides(source, destination, links, relays=False)
    assert plan.report["est_seconds"] <= direct.report["est_seconds"]
    assert plan.times is not None
    assert bool(plan.totals["relay_bytes"]) == (plan.times[0] < plan.times[1])


def test_the_reason_names_both_times() -> None:
    """A model of 19 MB goes directly, one of 763 MB by relays; either reason has the time of the way not taken."""
    links = replace(HOSTS, node=4, domain=4, usable=4)
    small, large = (plan_sides(*moe(links, layers=layers, dp=dp), links) for layers, dp in ((3, 4), (60, 8)))
    for plan, words in (
        (small, "no relays: their messages and hops would take {} us, where going directly takes {} us"),
        (large, "; directly it would take {1} us, so {0} us"),
    ):
        assert plan.times is not None
        assert any(words.format(*(ns // 1000 for ns in plan.times)) in reason for reason in plan.reasons)
    assert small.totals["relay_bytes"] == 0 < large.totals["relay_bytes"]
