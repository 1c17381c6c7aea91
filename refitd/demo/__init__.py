"""``refitd demo``: trainers, engines, four daemons and a real etcd on one machine, and faults on demand.

``main(argv)`` is the whole interface; nothing here is imported by the rest of refitd.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command line ``argv``; returns the exit status (0 good, 1 failed, 2 usage)."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # read when numpy and torch are first imported; many processes share the cores
    from refitd.demo.driver import main as run

    return run(argv)
