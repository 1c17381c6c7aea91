"""Transports against the reference: what `reshard` delivers in memory, lanes deliver over sockets and shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mover_rig import ENGINES, TRAINERS

from refitd.layout import Box, Layout
from refitd.layout.tp import dense, replicated, row_parallel
from refitd.plan import Rank, StorageRef, make_plan, reshard

SHAPE, BIAS = (12, 10), (7,)


def _layout(dtype, weight, bias):
    pieces = [dense("w", weight, "w"), dense("b", bias, "b")]
    storages = {"w": (weight.volume, dtype), "b": (bias.volume, dtype)}
    return Layout.from_pieces({"w": (SHAPE, dtype), "b": (BIAS, dtype)}, storages, pieces)


SOURCES = [
    _layout("float32", Box((0, 0), (5, 10)), Box((0,), (4,))),
    _layout("float32", Box((5, 0), (12, 10)), Box((4,), (7,))),
]
MEMBERS = [_layout("bfloat16", row_parallel(SHAPE, rank, 2), replicated(BIAS)) for rank in range(2)]


class Planned:
    """A real plan in the shape of a sketch: two trainers on one node, two engine ranks on another (or the same)."""

    def __init__(self, source_node):
        sources = [Rank(key, source_node, source_node, lay) for key, lay in zip(TRAINERS, SOURCES, strict=True)]
        members = [Rank(key, "b", "b", layout) for key, layout in zip(ENGINES, MEMBERS, strict=True)]
        self.plan = make_plan(sources, members, bucket_bytes=64)
        self.storages = [
            StorageRef(rank.key, name, dtype, numel)
            for rank in (*sources, *members)
            for name, (numel, dtype) in rank.layout.storages.items()
        ]

    def program(self, rank):
        return self.plan.program(rank)


@pytest.mark.parametrize("verify", ["trailer", "reread"])
@pytest.mark.parametrize("source_node", ["a", "b"])
def test_lanes_deliver_what_the_reference_delivers(rig, source_node, verify):
    """Casts, uneven cuts, and spreading inside a domain end bit-exact, with the bytes that the plan promised."""
    lane = rig(Planned(source_node))
    rng = np.random.default_rng(3)
    for key in TRAINERS:
        for array in lane.lent[key].arrays.values():
            array[:] = rng.standard_normal(array.size)
    lane.build()
    lane.built()
    lane.run(verify=verify)
    for key, mate in (ENGINES, ENGINES[::-1]):
        lane.parties[mate].wait_landed()
        lane.parties[key].lane.ready(1, mate, lane.lent[mate].page.loan_word)
    received = [lane.parties[key].wait_for("done")["rx"] for key in ENGINES]
    totals = lane.sketch.plan.totals
    assert sum(rx.get("network", 0) for rx in received) == totals["network_bytes"] == totals["network_bytes_min"]
    assert sum(rx.get("peer", 0) for rx in received) == totals["peer_bytes"]
    shards = [{name: array.copy() for name, array in lane.lent[key].arrays.items()} for key in TRAINERS]
    for key, expected in zip(ENGINES, reshard(SOURCES, MEMBERS, shards), strict=True):
        for name, tensor in expected.items():
            np.testing.assert_array_equal(lane.lent[key].arrays[name], tensor.view(torch.uint16).numpy())
