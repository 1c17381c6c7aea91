"""Where each storage lies in a shadow: both ends derive it from the layout, so it is never sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from refitd.layout.dtypes import ITEMSIZE

ALIGNMENT = 64


class Shadow(Protocol):
    """Memory beside the live weights that a publication lands in."""

    def lend(self) -> contextlib.AbstractContextManager[tuple[Mapping[str, Any], Sequence[int]]]:
        """What ``register`` says of it, and its descriptors, which are valid inside."""


@contextlib.contextmanager
def lent(shadow: Shadow | None) -> Iterator[tuple[Mapping[str, Any], Sequence[int]]]:
    """As `Shadow.lend`; nothing where there is no shadow."""
    if shadow is None:
        yield {}, ()
    else:
        with shadow.lend() as found:
            yield found


def align(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def shadow_offsets(storages: Mapping[str, tuple[int, str]]) -> tuple[dict[str, tuple[int, int]], int]:
    """(offset, nbytes) of every storage in the layout's order, each offset 64-byte aligned, and the total in bytes.

    ``storages``: name -> (number of elements, dtype name), as `Layout.storages`. The total is at least 1.
    """
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, (numel, dtype) in storages.items():
        start, nbytes = align(end), numel * ITEMSIZE[dtype]
        places[name] = (start, nbytes)
        end = start + nbytes
    return places, max(end, 1)
