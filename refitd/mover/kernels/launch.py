"""Run a `Table`: by one Triton kernel where that is possible, else by torch, with the same results.

Memory is named by addresses: the caller keeps it alive, and mapped, until the work is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.kernels.fallback import run_torch
from refitd.mover.kernels.table import Table

if TYPE_CHECKING:
    import torch

WARPS, CAST_WARPS = 4, 8  # a program's; of 1024 to 4096 words by 4 or 8 warps, the best on an H200
_UINT = {8: "uint64", 4: "uint32", 2: "uint16", 1: "uint8"}


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A table on its device, to be run as often as its memory stays where it is.

    ``backend`` is ``triton`` or ``torch``. ``sums`` (int64, one a bucket, on the device) holds the bit patterns of the
    buckets' checksums once the work of a `run` is done.
    """

    table: Table
    backend: str
    device: Any
    sums: torch.Tensor
    _rows: torch.Tensor
    _tiles: torch.Tensor
    kinds: int

    def run(self, sums: bool = True) -> None:
        """Start the work on torch's current stream; ``sums`` says whether checksums are wanted."""
        if sums:
            self.sums.zero_()
        if self.backend == "torch":
            run_torch(self.table, self.device, self.sums if sums else None)
        else:
            self._run_triton(sums)

    def checksums(self) -> dict[int, int]:
        """Checksums by bucket id; waits for the work that was started before."""
        values = self.sums.cpu().numpy().view(np.uint64).tolist()
        return dict(zip(self.table.buckets, values, strict=True))

    def _run_triton(self, sums: bool) -> None:
        kernel, language = _kernel()
        cast = self.table.dtypes[0] != self.table.dtypes[1]
        names = self.table.dtypes if cast else (_UINT[ITEMSIZE[self.table.dtypes[1]]],) * 2
        src, dst = (getattr(language, name) for name in names)
        kernel[(len(self._tiles),)](
            self._rows, self._tiles, _as_unsigned(self.sums), SRC=src, DST=dst, CAST=cast,
            KINDS=self.kinds, STORE=self.table.store, SUM=sums, num_warps=CAST_WARPS if cast else WARPS,
        )  # fmt: skip


def prepare(table: Table, device: Any, backend: str | None = None, kinds: int = 0) -> Launch:
    """Copy ``table`` to ``device``. ``backend`` is `best_backend` unless it is given.

    ``kinds``: of rows (as `Table.kinds`) that the kernel shall have beside those of ``table``. For each other set of
    kinds, pair of dtypes and use of sums, Triton compiles another kernel.
    """
    import torch

    rows, tiles = (torch.from_numpy(part).to(device) for part in (table.rows, table.tiles))
    sums = torch.zeros(len(table.buckets), dtype=torch.int64, device=device)
    return Launch(table, backend or best_backend(device), device, sums, rows, tiles, kinds | table.kinds)


def best_backend(device: Any) -> str:
    """``triton`` for a CUDA device where it is installed, else ``torch``."""
    import torch

    return "triton" if torch.device(device).type == "cuda" and find_spec("triton") is not None else "torch"


@cache
def _kernel() -> tuple[Any, Any]:
    import triton.language

    from refitd.mover.kernels.triton_kernel import move

    return move, triton.language


def _as_unsigned(sums: torch.Tensor) -> torch.Tensor:
    import torch

    return sums.view(torch.uint64)
