"""``refitd bench``: how fast a refit is on this machine, next to what else would move the weights; planner, kernels.

``main(argv)`` is the whole interface; nothing here is imported by the rest of refitd.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

_OTHERS = {
    "plan": "refitd.bench.plan", "pack": "refitd.bench.pack", "scrape": "refitd.bench.scrape",
    "repair": "refitd.bench.repair", "mover": "refitd.bench.mover", "gpu": "refitd.bench.gpu_run",
    "pause": "refitd.bench.pause",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command line ``argv``; returns the exit status (0 good, 1 failed, 2 usage)."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # as the movers have it; read when numpy and torch are first imported
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _OTHERS:
        return int(importlib.import_module(_OTHERS[argv[0]]).main(argv[1:]))
    from refitd.bench.arguments import parse

    arguments = parse(argv)
    from refitd.bench.refit import run

    return run(arguments)
