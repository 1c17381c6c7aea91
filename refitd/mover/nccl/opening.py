"""Where a mover gets its NCCL from: one place, so that a fake one can take it."""

from __future__ import annotations

from refitd.mover.nccl.library import Library


def open_library(host: str) -> Library:
    """This process's NCCL (``host``: as for `Nccl`). Raises CommunicatorError where it is missing or too old."""
    from refitd.mover.nccl.nccl4py import Nccl

    return Nccl(host)
