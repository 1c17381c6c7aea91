"""The instances of a destination that a refit fills: all but those in storages that a rank keeps."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from refitd.layout.box import Bools, Ints
from refitd.layout.side import Pattern, Side


def wanted(side: Side) -> Side:
    """The side without the pieces in storages that ``keep`` names, on the ranks where it names them.

    Instances of patterns without pieces need nothing and are left out.
    """
    filled = np.array([bool(_real(pattern).any()) for pattern in side.patterns], dtype=bool)
    side = replace(side, instances=side.instances[filled[side.instances[:, 1]]])
    if not side.keeps:
        return replace(side, instances=side.instances[~_matching(side.storages, side.keep)[side.instances[:, 3]]])
    kinds = sorted(set(side.keeps))
    masks = {kind: _matching(side.storages, kind) for kind in kinds}
    touched = np.array([masks[kind] for kind in kinds]).any(axis=0)[side.instances[:, 3]]
    patterns, rows = list(side.patterns), [side.instances[~touched]]
    for row in side.instances[touched]:
        group = side.groups[int(row[2])]
        mine = np.array([not masks[side.keeps[rank]][row[3]] for rank in group], dtype=bool)
        if mine.any():
            rows.append(row[None].copy())
            if not mine.all():
                rows[-1][0, 1] = len(patterns)
                patterns.append(_without(side.patterns[int(row[1])], mine))
    return replace(side, instances=np.concatenate(rows), patterns=tuple(patterns))


def _real(pattern: Pattern) -> Bools:
    boxes = pattern.boxes[pattern.box]
    return (boxes[:, 0] < boxes[:, 1]).all(axis=1)


def _matching(names: tuple[str, ...], keep: tuple[str, ...]) -> Bools:
    if not keep:
        return np.zeros(len(names), dtype=bool)
    found = {name: any(fnmatchcase(name, pattern) for pattern in keep) for name in set(names)}
    return np.array([found[name] for name in names], dtype=bool)


def _without(pattern: Pattern, slots: Bools) -> Pattern:
    stays: Ints = np.flatnonzero(slots[pattern.slot])
    return replace(
        pattern, slot=pattern.slot[stays], box=pattern.box[stays], offset=pattern.offset[stays],
        strides=pattern.strides[stays],
    )  # fmt: skip
