"""All checks of a node, in the order in which a person would look."""

from __future__ import annotations

from collections.abc import Callable

from refitd.operate.doctor import gpu_checks, node_checks
from refitd.operate.doctor.check import Check
from refitd.operate.doctor.facts import Facts

CHECKS: tuple[Callable[[Facts], Check], ...] = (
    gpu_checks.driver, gpu_checks.compute_mode, gpu_checks.nvlink, gpu_checks.nccl, gpu_checks.processes,
    gpu_checks.containers, node_checks.path, node_checks.store, node_checks.clock, node_checks.memlock,
    node_checks.nofile, node_checks.shm, node_checks.socket, gpu_checks.shared_rate,
)  # fmt: skip


def examine(facts: Facts) -> list[Check]:
    """Judge everything. Never raises for what was found."""
    return [*(check(facts) for check in CHECKS), *node_checks.bandwidth(facts)]
