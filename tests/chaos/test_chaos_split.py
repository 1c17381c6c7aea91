"""Which points lie between verify and the last apply, and which faults come at them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.demo.chaos.book import Mark
from refitd.demo.chaos.split import APART, CUT_OFF, Cast, Split, _window

CAST = Cast(
    cast("Any", {"lead": SimpleNamespace(pid=1), "other": SimpleNamespace(pid=2)}),
    cast("Any", {"lead": SimpleNamespace(pid=5), "other": SimpleNamespace(pid=6)}),
    {"lead": 3, "other": 4},
)


def fact(pid: int, name: str, lane: str = "") -> dict[str, Any]:
    return {"pid": pid, "name": name} | ({"lane": lane} if lane else {})


def test_the_window_is_from_the_first_verify_to_the_last_applied() -> None:
    """Of this replica's parties only, each point once; before and after it, and other lanes' words, do not count."""
    seen = [
        fact(5, "effect:write acks"), fact(6, "verify", "r1"), fact(6, "verify", "r0"), fact(6, "effect:write acks"),
        fact(9, "effect:answer"), fact(5, "verify", "r0"), fact(6, "effect:write acks"), fact(5, "commit", "r0"),
        fact(3, "effect:word of a mover done"), fact(1, "apply"), fact(1, "effect:request applied"),
        fact(2, "effect:request applied"), fact(5, "effect:written commits"),
    ]  # fmt: skip
    assert _window(seen, "r0", CAST) == [
        ("other daemon", "verify"), ("other daemon", "effect:write acks"), ("lead daemon", "verify"),
        ("lead daemon", "commit"), ("lead mover", "effect:word of a mover done"), ("lead engine", "apply"),
        ("lead engine", "effect:request applied"), ("other engine", "effect:request applied"),
    ]  # fmt: skip
    assert _window(seen[:11], "r2", CAST) == []


def test_every_party_is_killed_at_every_point_and_the_nodes_are_cut_apart() -> None:
    """Past the lease only at the phases."""
    split = Split(cast("Any", SimpleNamespace()), Path("/none"))
    split.points["r0"] = [("lead daemon", "commit"), ("lead daemon", "effect:written commits")]
    faults = [case.fault for case in split.cases() if case.point == "commit"]
    assert faults == [
        "kill lead engine", "kill other engine", "kill lead mover", "kill other mover", "kill lead daemon",
        "kill other daemon", APART, CUT_OFF,
    ]  # fmt: skip
    assert [case.fault for case in split.cases() if case.point != "commit"] == faults[:-1]


@pytest.mark.parametrize(
    ("told", "serves", "lend", "there"),
    [
        (True, True, [True, True], True),
        (True, True, [True, False], False),
        (True, False, [True, True], False),
        (False, True, [True, True], False),
    ],
    ids=["whole", "a rank whose daemon came anew", "nobody serves it", "trainers never heard"],
)
def test_what_is_there_is_what_somebody_serves_and_lends(
    told: bool, serves: bool, lend: list[bool], there: bool
) -> None:
    mark = Mark(1, 260)
    ranks = [{"key": f"engine/r0/{rank}", "lends": lends} for rank, lends in enumerate(lend)]
    daemon = SimpleNamespace(status=lambda: {"ranks": ranks})
    engines = [SimpleNamespace(rank=rank, daemon=daemon) for rank in range(2)]
    world = SimpleNamespace(
        book=SimpleNamespace(told={mark} if told else set()),
        holders=lambda _mark: ["r0"] if serves else [],
        scene=SimpleNamespace(replicas=[SimpleNamespace(name="r0", engines=engines)]),
    )
    split = Split(cast("Any", SimpleNamespace(world=world)), Path("/none"))
    assert split._there_is(mark) is there
