"""Memory of simulated ranks: small arrays, each element of which says of which weights and which place it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from refitd.hook.memfd import create_memory
from refitd.hook.page import ControlPage
from refitd.layout import Layout

if TYPE_CHECKING:
    from .client import SimClient

Ints = NDArray[np.int64]
WEIGHTS = 1 << 20  # an element is weights * WEIGHTS + its place in the model
GARBAGE = -1
_templates: dict[str, dict[str, Ints]] = {}


def identity(fd: int) -> tuple[int, int]:
    """What stays the same of a descriptor however often it is duplicated. (0, 0) for what is no file."""
    if fd < 0:
        return 0, 0
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def start(tensor: str) -> int:
    """The place of a tensor's first element, which is the same on ranks that know other tensors than these."""
    return (ord(tensor) - ord("a")) << 12


def template(layout: Layout) -> dict[str, Ints]:
    """For every storage, the place in the model of each element."""
    if layout.digest not in _templates:
        storages = {name: np.full(numel, GARBAGE, np.int64) for name, (numel, _dtype) in layout.storages.items()}
        for piece in layout.pieces():
            shape = layout.tensors[piece.tensor][0]
            whole = (np.arange(int(np.prod(shape))) + start(piece.tensor)).reshape(shape)
            box = whole[tuple(slice(lo, hi) for lo, hi in zip(piece.box.lo, piece.box.hi, strict=True))]
            view = np.lib.stride_tricks.as_strided(
                storages[piece.storage][piece.offset :], box.shape, [stride * 8 for stride in piece.strides]
            )
            view[...] = box
        _templates[layout.digest] = storages
    return _templates[layout.digest]


class SimMemory:
    """One allocation of a client: arrays by storage name, known to the daemon as a descriptor."""

    def __init__(self, owner: SimClient, page: ControlPage, layout: Layout, nbytes: int = 0) -> None:
        self.owner, self.page, self.layout = owner, page, layout
        self.arrays: dict[str, Ints] = {name: np.full_like(array, GARBAGE) for name, array in template(layout).items()}
        self.nbytes = nbytes or max(8 * sum(array.size for array in self.arrays.values()), 1)
        self.fd = create_memory("sim", self.nbytes)

    def fill(self, weights: int, first: bool = True, second: bool = True) -> None:
        """Put weights in; half of each storage at a time where asked to."""
        for name, places in template(self.layout).items():
            half = places.size // 2
            if first:
                self.arrays[name][:half] = places[:half] + weights * WEIGHTS
            if second:
                self.arrays[name][half:] = places[half:] + weights * WEIGHTS

    def is_whole(self, weights: int) -> bool:
        """Whether every element is that of these weights, at its place."""
        return all(
            np.array_equal(self.arrays[name], places + weights * WEIGHTS)
            for name, places in template(self.layout).items()
        )

    def contents(self) -> dict[str, Any]:
        """Which weights each storage holds elements of, for messages."""
        return {name: sorted({int(v) // WEIGHTS for v in array}) for name, array in self.arrays.items()}

    def load(self, other: SimMemory) -> None:
        for name, array in other.arrays.items():
            self.arrays[name][...] = array

    def described(self) -> list[dict[str, Any]]:
        """As publish and receive carry it: all storages one after another in one file."""
        found, offset = [], 0
        for name, array in self.arrays.items():
            found.append({"name": name, "fd": 0, "offset": offset, "nbytes": array.nbytes})
            offset += array.nbytes
        return found

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Mount:
    """A memory as one mover has it mapped."""

    memory: SimMemory
    word_index: int
    writable: bool

    @property
    def word(self) -> int:
        """The loan word now; a page that its owner unmapped reads as no word at all."""
        return -1 if self.memory.page.closed else self.memory.page.read(self.word_index)
