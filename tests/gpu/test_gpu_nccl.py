"""NCCL for real, through `refitd.mover.nccl.nccl4py`: ranks on one card, each a host of its own for NCCL.

Runs where there is a CUDA device and nccl4py (``make test-gpu``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("nccl.core", exc_type=ImportError)

from refitd.bench.repair import RANKS, Bench  # noqa: E402
from refitd.mover.nccl.repair import FRESH, SHRINK  # noqa: E402

pytestmark = pytest.mark.gpu


def test_a_communicator_is_made_and_bytes_go_round(tmp_path: Path) -> None:
    """Nonblocking init, a warm exchange, a transfer, abort."""
    bench = Bench("cuda", 1, tmp_path)
    with bench._ranks(RANKS) as ranks:
        bench._mend(ranks, FRESH, "start")
    print({row.name: row.value for row in bench.rows}, bench.version)
    assert bench.refused == {}


def test_survivors_of_a_kill_have_a_new_communicator(tmp_path: Path) -> None:
    """By fresh init; what shrink says after a network death is recorded, and does not stop them."""
    bench = Bench("cuda", 1, tmp_path)
    bench._after_kill(FRESH)
    bench._after_kill(SHRINK)
    print({row.name: row.value for row in bench.rows}, bench.refused)
    assert "repair_cuda_init_killed" in {row.name for row in bench.rows}
