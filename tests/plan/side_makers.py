"""Sides of regular models, made with `SideBuilder`: column and row cuts, replicas, pipeline stages and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from refitd.layout.side import Pattern, Side, SideBuilder, StoragePattern
from refitd.layout.tp import dense_strides
from refitd.plan import Topology, topology
from refitd.plan.topology import Link

TINY = replace(topology("h100-nvl8"), network=Link(10**9, 1))  # every byte is worth a share


def cut_pattern(shape: tuple[int, ...], dtype: str, ways: int, dim: int | None, copies: int = 1) -> tuple[Pattern, int]:
    """``shape`` in ``ways`` even parts along ``dim`` (None: whole), ``copies`` times over; and the elements of a
    part."""
    local, slots = list(shape), ways * copies
    boxes = [[[0] * len(shape), list(shape)]] if dim is None else []
    if dim is not None:
        local[dim] //= ways
        for i in range(ways):
            lo, hi = [0] * len(shape), list(shape)
            lo[dim], hi[dim] = i * local[dim], (i + 1) * local[dim]
            boxes.append([lo, hi])
    slot = np.arange(slots)
    box = slot % ways if dim is not None else np.zeros_like(slot)
    strides = np.tile(np.array(dense_strides(tuple(local)), np.int64), (slots, 1))
    pattern = Pattern(shape, dtype, slots, np.array(boxes, np.int64), slot, box, np.zeros_like(slot), strides)
    return pattern, int(np.prod(local))


Cut = tuple[Sequence[str], tuple[int, ...], "int | None", Sequence[int], int]


def side(
    topology: Topology, prefix: str, count: int, tensors: Sequence[Cut],
    dtype: str = "bfloat16", order: Sequence[int] | None = None,
) -> Side:  # fmt: skip
    """A side of ``count`` ranks. Tensors: names, shape, the dimension that is cut, ranks, ways; a storage for each.

    ``order``: the order in which ranks are given to the builder; the side is the same.
    """
    places = topology.place(count, prefix.replace("/", "-"))
    listed = list(order if order is not None else range(count))
    at = {rank: i for i, rank in enumerate(listed)}
    builder = SideBuilder([(f"{prefix}/{rank:05d}", *places[rank]) for rank in listed])
    for names, shape, dim, ranks, ways in tensors:
        pattern, numel = cut_pattern(shape, dtype, ways, dim, len(ranks) // ways)
        group = builder.group([at[rank] for rank in ranks])
        storage = builder.storage(names, group, StoragePattern(dtype, np.full(len(ranks), numel)))
        builder.add(names, pattern, group, storage)
    return builder.build()


def moe(
    topology: Topology, layers: int = 6, experts: int = 8, stages: int = 2, tp: int = 4, dp: int = 4
) -> tuple[Side, Side]:
    """Pipeline stages of unequal depth and expert parallelism to tensor parallel replicas: sources that are not
    even."""
    ep, hidden, inner = 8, 256, 128
    edges = [0, layers // 3, layers] if stages == 2 else [layers * s // stages for s in range(stages + 1)]
    source, destination = [], []
    everywhere = range(tp * dp)
    for stage in range(stages):
        mine = range(edges[stage], edges[stage + 1])
        group = range(stage * ep, (stage + 1) * ep)
        for name, shape, dim in (("o", (hidden, 512), 1), ("norm", (hidden,), None), ("q", (512, hidden), 0)):
            names = [f"layers.{i}.{name}" for i in mine]
            source.append((names, shape, None, group, ep))
            destination.append((names, shape, dim, everywhere, tp))
        for rank in range(ep):
            own = range(rank * experts // ep, (rank + 1) * experts // ep)
            for name, shape, dim in (("up", (inner, hidden), 0), ("down", (hidden, inner), 1)):
                names = [f"layers.{i}.experts.{e}.{name}" for i in mine for e in own]
                source.append((names, shape, None, [stage * ep + rank], 1))
                destination.append((names, shape, dim, everywhere, tp))
    return side(topology, "trainer/a", stages * ep, source), side(topology, "engine/b", tp * dp, destination)
