"""Run a `Table`: by one Triton kernel where that is possible, else by torch, with the same results.

Memory is named by addresses: the caller keeps it alive, and mapped, until the work is done.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.kernels.fallback import run_torch
from refitd.mover.kernels.starts import Event, Start, current_stream, start_of
from refitd.mover.kernels.table import SUMS, Table

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
        slots = -(-len(table.buckets) // SUMS) * SUMS
        self._sums = torch.zeros(slots, dtype=torch.int64, device=device)  # zero whenever nothing is under way
        self._host = torch.zeros(slots, dtype=torch.int64, pin_memory=self._sums.is_cuda)
        self._found: NDArray[np.uint64] = self._host.numpy().view(np.uint64)[: len(table.buckets)]
        self._there = Event() if self._sums.is_cuda else None
        self._starts: dict[bool, tuple[Start, ...]] = {}

    def run(self, sums: bool = True) -> None:
        """Start the work on torch's current stream; ``sums`` says whether checksums are wanted."""
        if self.backend == "torch":
            self._run_torch(sums)
            return
        stream = current_stream(self._sums.device.index) if self._there is not None else 0
        starts = self._starts.get(sums)
        if starts is None:
            self._run_triton(sums)
        else:  # finding the kernels again would take longer than to start them
            for start in starts:
                start(stream)
        if sums and self._there is not None:
            self._there.record(stream)

    def checksums(self) -> dict[int, int]:
        """Checksums by bucket id of the last run; waits for its work."""
        if self._there is not None:
            self._there.wait()
        return dict(zip(self.table.buckets, self._found.tolist(), strict=True))

    def _run_torch(self, sums: bool) -> None:
        run_torch(self.table, self.device, self._sums if sums else None)
        if sums:
            self._host.copy_(self._sums)
            self._sums.zero_()
            if self._there is not None:
                self._there.record(current_stream(self._sums.device.index))

    def _run_triton(self, sums: bool) -> None:
        """By Triton, which finds or compiles the kernels, and then ours to start again; its interpreter has none."""
        import torch

        kernels, arguments = load_kernels(), self._arguments(sums)
        warps, grid = CAST_WARPS if arguments["CAST"] else WARPS, len(self._tiles)
        made = [(kernels.move[grid, 1, 1](**arguments, num_warps=warps), grid, list(arguments.values()))]
        if sums:
            grid, tensors = len(self._sums) // SUMS, [one.view(torch.uint64) for one in (self._sums, self._host)]
            made.append((kernels.hand_over[grid, 1, 1](*tensors, num_warps=1), grid, tensors))
        if all(compiled is not None for compiled, _grid, _arguments in made):
            self._starts[sums] = tuple(start_of(*one) for one in made)

    def _arguments(self, sums: bool) -> dict[str, Any]:
        """Of the kernel, in its order."""
        import torch

        cast = self.table.dtypes[0] != self.table.dtypes[1]
        names = self.table.dtypes if cast else (_UINT[ITEMSIZE[self.table.dtypes[1]]],) * 2
        src, dst = (getattr(load_kernels().language, name) for name in names)
        return {
            "rows": self._rows, "tiles": self._tiles, "sums": self._sums.view(torch.uint64), "SRC": src, "DST": dst,
            "CAST": cast, "KINDS": self.kinds, "STORE": self.table.store, "SUM": sums,
        }  # fmt: skip


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


class _Kernels(NamedTuple):
    move: Any
    hand_over: Any
    touch: Any
    language: Any


@cache
def load_kernels() -> _Kernels:
    """Triton's, which is imported with them."""
    import triton.language

    from refitd.mover.kernels.triton_kernel import hand_over, move, touch

    return _Kernels(move, hand_over, touch, triton.language)
