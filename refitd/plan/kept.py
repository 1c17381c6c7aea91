"""The instances of a destination that a refit fills: all but those in storages that a rank keeps."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from refitd.errors import InputError, MismatchError
from refitd.layout.box import Bools, Ints
from refitd.layout.side import Pattern, Side


def wanted(side: Side) -> Side:
    """The side without the instances in storages that ``keep`` names (all ranks of a storage keep it, or none).

    Instances of patterns without pieces need nothing and are left out too. Raises MismatchError for storages that
    nothing fills.
    """
    filled = np.array([bool(_real(pattern).any()) for pattern in side.patterns], dtype=bool)
    kept = _kept(side)
    used = filled[side.instances[:, 1]] & ~kept[side.instances[:, 3]]
    _require_filled(side, kept, side.instances[used, 3])
    return replace(side, instances=side.instances[used])


def _require_filled(side: Side, kept: Bools, used: Ints) -> None:
    """Raise MismatchError for storages that nothing fills and no ``keep`` names."""
    empty = ~kept
    empty[used] = False
    elements = np.array([bool(pattern.numel.any()) for pattern in side.storage_patterns], dtype=bool)
    bad = np.flatnonzero(empty & elements[side.storage_pattern]) if len(side.storages) else used[:0]
    if len(bad):
        expected = "a piece in it, or a keep pattern that names it"
        raise MismatchError([InputError(f"storage {side.storages[i]}", expected, "neither") for i in bad.tolist()])


def _real(pattern: Pattern) -> Bools:
    boxes = pattern.boxes[pattern.box]
    real: Bools = np.all(boxes[:, 0] < boxes[:, 1], axis=1)
    return real


def _kept(side: Side) -> Bools:
    """Storages that are kept."""
    if not side.keep and not side.keeps:
        return np.zeros(len(side.storages), dtype=bool)
    keeps = [side.keep_of(side.groups[group][0]) if side.groups[group] else () for group in side.storage_group.tolist()]
    named = zip(side.storages, keeps, strict=True)
    return np.array([any(fnmatchcase(name, pattern) for pattern in keep) for name, keep in named], dtype=bool)
