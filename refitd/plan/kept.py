"""The instances of a destination that a refit fills: all but those in storages that a rank keeps."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from refitd.layout.box import Bools
from refitd.layout.side import Pattern, Side


def wanted(side: Side) -> Side:
    """The side without the instances in storages that ``keep`` names (all ranks of a storage keep it, or none).

    Instances of patterns without pieces need nothing and are left out too.
    """
    filled = np.array([bool(_real(pattern).any()) for pattern in side.patterns], dtype=bool)
    used = filled[side.instances[:, 1]] & ~_kept(side)[side.instances[:, 3]]
    return replace(side, instances=side.instances[used])


def _real(pattern: Pattern) -> Bools:
    boxes = pattern.boxes[pattern.box]
    return (boxes[:, 0] < boxes[:, 1]).all(axis=1)


def _kept(side: Side) -> Bools:
    """Storages that are kept."""
    if not side.keep and not side.keeps:
        return np.zeros(len(side.storages), dtype=bool)
    keeps = [side.keep_of(side.groups[group][0]) if side.groups[group] else () for group in side.storage_group.tolist()]
    named = zip(side.storages, keeps, strict=True)
    return np.array([any(fnmatchcase(name, pattern) for pattern in keep) for name, keep in named], dtype=bool)
