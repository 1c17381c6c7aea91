"""What the hook needs of a layout, and a layout made ready to be registered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Protocol

from refitd.errors import InputError


class Geometry(Protocol):
    """The part of `refitd.layout.Layout` that the hook uses."""

    @property
    def storages(self) -> Mapping[str, tuple[int, str]]:
        """Storage name -> (number of elements, dtype name)."""

    @property
    def keep(self) -> Iterable[str]:
        """Patterns of storages that the trainer does not own."""

    def to_bytes(self) -> bytes:
        """The layout as it is sent."""


def require_layout(layout: Geometry | None) -> Geometry:
    """Raises InputError before `register` was called."""
    if layout is None:
        raise InputError("layout", "a registered layout", "none")
    return layout


def moved(layout: Geometry | None, keep: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The storages that a refit reads or writes: all but those that match ``keep``. Raises InputError before register.

    The others are never lent and never overwritten.
    """
    patterns = list(keep)
    storages = require_layout(layout).storages
    return {name: about for name, about in storages.items() if not any(fnmatchcase(name, p) for p in patterns)}


def keep_of(layout: Geometry, keep: Iterable[str]) -> list[str]:
    """The patterns of the layout and of the caller, each once."""
    if isinstance(keep, str):
        raise InputError("keep", "a list of patterns", repr(keep))
    return list(dict.fromkeys([*layout.keep, *keep]))
