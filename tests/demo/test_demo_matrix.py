"""The matrix of faults: which cases there are, and when a case is good."""

from __future__ import annotations

from typing import Any

import pytest

from refitd.demo.matrix import Case, cases, judge

GOOD = {"ok": True, "bit_exact": True, "torn": 0, "recovered": True, "reasons": []}
KILL = Case("offer-mover-KILL", ())
PLANT = Case("skip-trailer", (), planted=True)


def test_every_phase_meets_every_victim_and_signal() -> None:
    """Six phases, six victims, two signals, and two plants."""
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 6 * 6 * 2 + 2
    assert [case.name for case in cases("verify-node")] == ["verify-node-KILL", "verify-node-STOP"]


@pytest.mark.parametrize(
    ("case", "status", "change", "why"),
    [
        (KILL, 0, {}, ""),
        (KILL, 1, {"ok": False, "reasons": ["r0 died"]}, "r0 died"),
        (KILL, 1, {"ok": False}, "exit status 1"),
        (KILL, 0, {"torn": 2, "recovered": False}, "unexpected torn, recovered"),
        (PLANT, 1, {"ok": False, "torn": 1}, ""),
        (PLANT, 0, {}, "the planted fault was not noticed"),
    ],
)
def test_a_case_is_judged_by_what_it_promises(case: Case, status: int, change: dict[str, Any], why: str) -> None:
    """Faults must leave no trace; plants must leave one."""
    assert judge(case, status, GOOD | change) == why
