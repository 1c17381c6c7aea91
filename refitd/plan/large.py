"""The factored way for `make_plan`: layouts of single ranks become sides, and nothing loops over their pieces.

It serves a whole refit of one lane, where all members have one dtype a tensor. A remainder, a joiner with neighbours
and ranks of several dtypes go the other way (`planner`), region by region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from refitd.errors import LayoutError, MismatchError
from refitd.layout.side import Side
from refitd.layout.side_factor import side_from_layouts
from refitd.plan.regions import MIN_CHUNK
from refitd.plan.side_plan import SidePlan
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
    for rank in members:
        for name, (_, dtype) in rank.layout.tensors.items():
            if dtypes.setdefault(name, dtype) != dtype:
                return False
    return True


def plan_large(sources: Sequence[Rank], members: Sequence[Rank], bucket_bytes: int) -> SidePlan:
    """The plan of a whole refit; each byte enters a node once. Raises what `make_plan` raises."""
    return plan_sides(_side(sources), _side(members), _NODES, relays=False, bucket_bytes=max(bucket_bytes, 16))


def _side(ranks: Sequence[Rank]) -> Side:
    """Ranks in the order of their keys; every node of a domain is a domain of its own, as movers read only in a
    node."""
    ordered: Mapping[str, Rank] = {rank.key: rank for rank in sorted(ranks, key=lambda rank: rank.key)}
    places = {key: (rank.node, f"{rank.domain}/{rank.node}") for key, rank in ordered.items()}
    try:
        return side_from_layouts({key: rank.layout for key, rank in ordered.items()}, places)
    except LayoutError as error:
        raise MismatchError(error.violations) from None
