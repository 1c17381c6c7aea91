"""The demo under faults, with real daemons, movers, clients and a real etcd: one case a victim and signal."""

from __future__ import annotations

import pytest

from refitd.demo.matrix import Outcome, cases, run

# Phases are spread over the victims; `make faults` runs every combination.
CASES = [
    "transfer-trainer-KILL", "offer-trainer-STOP",
    "prepare-engine-KILL", "apply-engine-STOP",
    "transfer-mover-KILL", "transfer-mover-STOP",
    "verify-daemon-KILL", "transfer-daemon-STOP",
    "commit-node-KILL", "verify-node-STOP",
    "transfer-sources-KILL", "offer-sources-STOP",
]  # fmt: skip


def _run(name: str) -> Outcome:
    (case,) = cases(name)
    return run(case, refits=4)


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("name", CASES)
def test_a_refit_ends_well_despite(name: str) -> None:
    """Every live replica commits, the victim returns and catches up, nothing is torn, nobody else dies."""
    outcome = _run(name)
    assert (outcome.name, outcome.why, outcome.torn) == (name, "", 0)


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("plant", ["skip-trailer", "early-apply"])
def test_a_planted_fault_is_caught(plant: str) -> None:
    """Weights that were served without being verified are seen as torn: the check can fail."""
    outcome = _run(plant)
    assert (outcome.why, (outcome.torn or 0) >= 1) == ("", True)
