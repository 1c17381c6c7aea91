"""NCCL for real, through `refitd.mover.nccl.nccl4py`: ranks on one card, each a host of its own for NCCL.

Runs where there is a CUDA device and nccl4py (``make test-gpu``).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("nccl.core", exc_type=ImportError)

from refitd.bench.repair import RANKS, Bench  # noqa: E402
from refitd.mover.nccl.repair import FRESH, SHRINK  # noqa: E402

pytestmark = pytest.mark.gpu


def alone(act: Callable[..., dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What ``act`` returns in a process of its own: its ranks are forks, which cannot use CUDA once a parent has."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(act, folder).result()


def start(folder: Path) -> dict[str, Any]:
    bench = Bench("cuda", 1, folder)
    with bench._ranks(RANKS) as ranks:
        bench._mend(ranks, FRESH, "start")
    return {"rows": {row.name: row.value for row in bench.rows}, "refused": bench.refused, "version": bench.version}


def kill(folder: Path) -> dict[str, Any]:
    bench = Bench("cuda", 1, folder)
    bench._after_kill(FRESH)
    bench._after_kill(SHRINK)
    return {"rows": {row.name: row.value for row in bench.rows}, "refused": bench.refused}


def test_a_communicator_is_made_and_bytes_go_round(tmp_path: Path) -> None:
    """Nonblocking init, a warm exchange, a transfer, abort."""
    found = alone(start, tmp_path)
    print(found)
    assert found["refused"] == {}


def test_survivors_of_a_kill_have_a_new_communicator(tmp_path: Path) -> None:
    """By fresh init; what shrink says after a network death is recorded, and does not stop them."""
    found = alone(kill, tmp_path)
    print(found)
    assert "repair_cuda_init_killed" in found["rows"]
