"""Run a `Table`: by one Triton kernel where that is possible, else by torch, with the same results.

Memory is named by addresses: the caller keeps it alive, and mapped, until the work is done.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.kernels.fallback import run_torch
from refitd.mover.kernels.table import Table

if TYPE_CHECKING:
    import torch

WARPS, CAST_WARPS = 4, 8  # a program's; of 1024 to 4096 words by 4 or 8 warps, the best on an H200
_UINT = {8: "uint64", 4: "uint32", 2: "uint16", 1: "uint8"}


class Launch:
    """A table on its device, to be run as often as its memory stays where it is, always on one stream.

    ``backend`` is ``triton`` or ``torch``.
    """

    def __init__(self, table: Table, device: Any, backend: str, kinds: int) -> None:
        """Copies ``table`` to ``device``; ``kinds``: those of rows that the kernel has."""
        import torch

        self.table, self.device, self.backend, self.kinds = table, device, backend, kinds
        self._rows, self._tiles = (torch.from_numpy(part).to(device) for part in (table.rows, table.tiles))
        self._sums = torch.zeros(len(table.buckets), dtype=torch.int64, device=device)
        self._unsigned = self._sums.view(torch.uint64)
        self._readback = _Readback(self._sums) if self._sums.is_cuda else None
        self._clean = True  # the sums are zero, or will be before what is started next
        self._compiled: dict[bool, Any] = {}

    def run(self, sums: bool = True) -> None:
        """Start the work on torch's current stream; ``sums`` says whether checksums are wanted."""
        if sums:
            if not self._clean:
                self._sums.zero_()
            self._clean = False
        if self.backend == "torch":
            run_torch(self.table, self.device, self._sums if sums else None)
        else:
            self._run_triton(sums)

    def checksums(self) -> dict[int, int]:
        """Checksums by bucket id of the last run; waits for its work."""
        if self._readback is None:
            values = self._sums.numpy()
        else:
            values = self._readback.fetch(anew=not self._clean)
            self._clean = True
        return dict(zip(self.table.buckets, values.view(np.uint64).tolist(), strict=True))

    def _run_triton(self, sums: bool) -> None:
        grid, arguments = (len(self._tiles), 1, 1), self._arguments(sums)
        compiled = self._compiled.get(sums)
        if compiled is not None:  # finding it again would take longer than to start it
            compiled[grid](*arguments.values())
            return
        warps = CAST_WARPS if arguments["CAST"] else WARPS
        self._compiled[sums] = _kernel()[0][grid](**arguments, num_warps=warps)  # the interpreter compiles nothing

    def _arguments(self, sums: bool) -> dict[str, Any]:
        """Of the kernel, in its order."""
        cast = self.table.dtypes[0] != self.table.dtypes[1]
        names = self.table.dtypes if cast else (_UINT[ITEMSIZE[self.table.dtypes[1]]],) * 2
        src, dst = (getattr(_kernel()[1], name) for name in names)
        return {
            "rows": self._rows, "tiles": self._tiles, "sums": self._unsigned, "SRC": src, "DST": dst, "CAST": cast,
            "KINDS": self.kinds, "STORE": self.table.store, "SUM": sums,
        }  # fmt: skip


class _Readback:
    """Brings sums to pinned memory of the host, and makes them zero for the next run while nobody waits for that."""

    def __init__(self, sums: torch.Tensor) -> None:
        import torch

        self._sums, self._host = sums, torch.empty_like(sums, device="cpu", pin_memory=True)
        event: Any = torch.cuda.Event
        self._there = event()

    def fetch(self, anew: bool) -> NDArray[np.int64]:
        """What the work that was started before has summed; with ``anew`` false, what was fetched last."""
        if anew:
            self._host.copy_(self._sums, non_blocking=True)
            self._there.record()
            self._sums.zero_()
            self._there.synchronize()
        values: NDArray[np.int64] = self._host.numpy()
        return values


def prepare(table: Table, device: Any, backend: str | None = None, kinds: int = 0) -> Launch:
    """Copy ``table`` to ``device``. ``backend`` is `best_backend` unless it is given.

    ``kinds``: of rows (as `Table.kinds`) that the kernel shall have beside those of ``table``. For each other set of
    kinds, pair of dtypes and use of sums, Triton compiles another kernel.
    """
    return Launch(table, device, backend or best_backend(device), kinds | table.kinds)


def best_backend(device: Any) -> str:
    """``triton`` for a CUDA device where it is installed, else ``torch``."""
    import torch

    return "triton" if torch.device(device).type == "cuda" and find_spec("triton") is not None else "torch"


@cache
def _kernel() -> tuple[Any, Any]:
    import triton.language

    from refitd.mover.kernels.triton_kernel import move

    return move, triton.language
