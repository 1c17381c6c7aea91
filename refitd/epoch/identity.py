"""Results that are kept for as long as the very same object is asked about: for long tuples that many lanes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(Generic[K, V]):
    """A function of one immutable object that remembers its last ``size`` results."""

    def __init__(self, compute: Callable[[K], V], size: int = 512) -> None:
        self._compute, self._size = compute, size
        self._known: dict[int, tuple[K, V]] = {}  # the object is kept, so that its id stays its own

    def __call__(self, value: K) -> V:
        found = self._known.get(id(value))
        if found is None:
            while len(self._known) >= self._size:
                del self._known[next(iter(self._known))]
            found = self._known[id(value)] = value, self._compute(value)
        return found[1]
