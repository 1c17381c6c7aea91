"""The factored way for `make_plan`: layouts of single ranks become sides, and nothing loops over their pieces.

It serves one lane, where all members and neighbours have one dtype a tensor, and what is left of its plan
(`SidePlan.left`). Ranks of several dtypes go the other way (`planner`), region by region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from refitd.errors import LayoutError, MismatchError
from refitd.layout.layout import Fact, Layout
from refitd.layout.side import Side
from refitd.layout.side_factor import side_from_layouts
from refitd.plan.regions import MIN_CHUNK
from refitd.plan.side_plan import LeftPlan, SidePlan
from refitd.plan.sides import plan_sides
from refitd.plan.tables import Rank
from refitd.plan.topology import Link, Topology

PIECES = 20_000  # of all ranks together; below, the other way takes less than a second

_LATENCY = 1_000
_LINK = Link(MIN_CHUNK * 10**9 // _LATENCY, _LATENCY)  # a share of `MIN_CHUNK` bytes is worth a message
_NODES = Topology("nodes", _LINK, _LINK, _LINK, 1, 1, 1)


def is_large(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    """Whether the factored way is worth it, and can be gone."""
    if sum(len(rank.layout.instances) for rank in (*sources, *members)) < PIECES:
        return False
    dtypes: dict[str, str] = {}
    seen: list[Mapping[str, Fact]] = []
    for rank in members:
        if rank.layout.tensors in seen:  # most ranks know the same tensors
            continue
        seen.append(rank.layout.tensors)
        for name, (_, dtype) in rank.layout.tensors.items():
            if dtypes.setdefault(name, dtype) != dtype:
                return False
    return True


def plan_large(
    sources: Sequence[Rank], members: Sequence[Rank], neighbours: Sequence[Rank], bucket_bytes: int
) -> SidePlan:
    """The plan of a whole refit; each byte enters a node once, and not where a neighbour will have it. Raises what
    `make_plan` raises.

    Neighbours are planned for as if they were members, and are then taken to hold all that they need.
    """
    target = side_of([*members, *neighbours])
    plan = plan_sides(side_of(sources), target, _NODES, relays=False, bucket_bytes=max(bucket_bytes, 16))
    return LeftPlan(plan, {}, tuple(rank.key for rank in neighbours)) if neighbours else plan


class _Same(NamedTuple):
    """A rank; equal to another of the same key and place and the very same layout."""

    key: str
    node: str
    domain: str
    number: int
    layout: Layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self[:4] == other[:4]

    def __hash__(self) -> int:
        return hash(self[:4])


def side_of(ranks: Sequence[Rank]) -> Side:
    """Ranks in the order of their keys; every node of a domain is a domain of its own, as movers read only in a
    node."""
    ordered = sorted(ranks, key=lambda rank: rank.key)
    return _known(tuple(_Same(r.key, r.node, r.domain, id(r.layout), r.layout) for r in ordered))


@lru_cache(maxsize=4)
def _known(ranks: tuple[_Same, ...]) -> Side:
    """Factored once for as long as the ranks are the same: when a source is lost, the destination is what it was."""
    places = {rank.key: (rank.node, f"{rank.domain}/{rank.node}") for rank in ranks}
    try:
        return side_from_layouts({rank.key: rank.layout for rank in ranks}, places)
    except LayoutError as error:
        raise MismatchError(error.violations) from None
