"""Read a little of what a launch will move, shortly before it: a card that was idle is then awake.

The first work of a process on a card that another process has used, and the first reads of memory behind NVLink, take
longer than a small refit. Nothing is done with what is read, so it does not matter who writes there meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refitd.layout.codec import Ints
from refitd.mover.kernels.launch import best_backend, load_kernels
from refitd.mover.kernels.starts import Event, Start, current_stream, start_of
from refitd.mover.kernels.table import SAMPLES, Table, samples

PROGRAMS = 132  # an H200's multiprocessors: each has translations of its own


class Touch:
    """Compiled and loaded when it is made, which reads nothing; then run as often as the memory stays where it is."""

    def __init__(self, tables: Sequence[Table], device: Any) -> None:
        import torch

        self._places = torch.from_numpy(_spread([samples(table) for table in tables if len(table.tiles)])).to(device)
        self.found = torch.zeros(SAMPLES, dtype=torch.uint8, device=device)
        self._there = Event() if self.found.is_cuda else None
        self._start = self._made()

    def run(self) -> None:
        """Read, on torch's current stream, and wait for it. Raises RuntimeError where the device fails."""
        stream = current_stream(self.found.device.index) if self._there is not None else 0
        self._start(stream)
        if self._there is not None:
            self._there.record(stream)
            self._there.wait()

    def _made(self) -> Start:
        kernel, arguments = load_kernels().touch, (self._places, self.found)
        compiled = kernel[0, 1, 1](*arguments, num_warps=4)
        if compiled is None:  # Triton's interpreter compiles nothing
            return lambda _stream: kernel[1, 1, 1](*arguments, num_warps=4)
        return start_of(compiled, PROGRAMS, arguments)


def touch(tables: Sequence[Table], device: Any) -> Touch | None:
    """For what ``tables`` move; None for a device whose work is not done by kernels."""
    return Touch(tables, device) if best_backend(device) == "triton" else None


def _spread(found: Sequence[Ints]) -> Ints:
    """`SAMPLES` of all of them, evenly."""
    if not found:
        return np.zeros(SAMPLES, np.int64)
    every = np.concatenate(found)
    chosen: Ints = every[np.linspace(0, len(every) - 1, SAMPLES).astype(int)]
    return chosen
