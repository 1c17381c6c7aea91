"""`SidePlan`: the result of `plan_sides`: totals, bounds, reasons, and programs on demand."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.content import Content
from refitd.plan.cost import Bounds, bound_seconds, estimate, gather_broadcast, near_bound, network_bounds
from refitd.plan.cutting import Cutting
from refitd.plan.flows import NET
from refitd.plan.loads import Loads, count_loads, links
from refitd.plan.topology import Topology


class SidePlan:
    def __init__(
        self, digest: str, topology: Topology, bucket_bytes: int, content: Content, cutting: Cutting, part: Ints
    ) -> None:
        self.digest, self.topology, self.bucket_bytes = digest, topology, bucket_bytes
        self.content, self.cutting, self.part = content, cutting, part

    @cached_property
    def loads(self) -> Loads:
        return count_loads(self.cutting, self.content.sets.table(), self.content.ranks)

    @cached_property
    def bounds(self) -> Bounds:
        c = self.content
        return network_bounds(c.lines, c.flows, c.lines.nbytes[c.flows.line], self.cutting, c.sets.table())
