"""Weights that are drawn rather than trained: any step of any run at once, and no two alike."""

from __future__ import annotations

import torch

from refitd.demo.weights import Weights

_STEPS = 1_000_000  # more than any run takes


class Drawn:
    """The weights of run ``number``, step after step: the same in every process. In place, like a training."""

    def __init__(self, start: Weights, number: int, step: int = 0) -> None:
        """Takes over ``start`` (float tensors are drawn anew at each step, the others stay)."""
        self.weights, self.step, self._number = start, step, number

    def advance(self, step: int) -> float:
        """Go to ``step``. There is no loss: nan."""
        self.step = step
        generator = torch.Generator().manual_seed(self._number * _STEPS + step)
        for weight in self.weights.values():
            if weight.is_floating_point():
                weight.normal_(0.0, 0.02, generator=generator)
        return float("nan")
