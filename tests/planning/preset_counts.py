"""What presets must move and what a loss takes away, counted from the sides alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from refitd.layout.dtypes import ITEMSIZE
from refitd.layout.side import Pattern, Side

Boxes = dict[int, set[int]]


def kinds(side: Side) -> Iterator[tuple[Pattern, tuple[int, ...], int]]:
    """(pattern, group, number of tensors) of every kind of tensor. Each tensor has one instance."""
    assert len(np.unique(side.instances[:, 0])) == len(side.instances) == len(side.tensors)
    rows, counts = np.unique(side.instances[:, 1:3], axis=0, return_counts=True)
    for (pattern, group), count in zip(rows.tolist(), counts.tolist(), strict=True):
        yield side.patterns[pattern], side.groups[group], count


def volumes(pattern: Pattern) -> np.ndarray:
    """Elements of each box; the boxes of a pattern tile the tensor."""
    found = (pattern.boxes[:, 1] - pattern.boxes[:, 0]).prod(axis=1)
    assert found.sum() == np.prod(pattern.shape)
    return found


def bytes_by_domain(side: Side) -> dict[str, int]:
    """The unique bytes that the ranks of each domain have together."""
    total = dict.fromkeys(side.domains, 0)
    for pattern, group, count in kinds(side):
        boxes: dict[str, set[int]] = {}
        for slot, box in zip(pattern.slot.tolist(), pattern.box.tolist(), strict=True):
            boxes.setdefault(side.domains[group[slot]], set()).add(box)
        size = volumes(pattern) * ITEMSIZE[pattern.dtype]
        for domain, found in boxes.items():
            total[domain] += count * int(size[sorted(found)].sum())
    return total


def sole_bytes(source: Side, lost: set[int], itemsize: int) -> int:
    """Bytes (at ``itemsize`` an element) that ranks ``lost`` of a source hold and no other rank does."""
    total = 0
    for pattern, group, count in kinds(source):
        holders: Boxes = {}
        for slot, box in zip(pattern.slot.tolist(), pattern.box.tolist(), strict=True):
            holders.setdefault(box, set()).add(group[slot])
        size = volumes(pattern)
        gone = [box for box, ranks in holders.items() if ranks <= lost]
        total += count * int(size[gone].sum()) * itemsize if gone else 0
    return total
