"""The factored way for `make_plan`: layouts of single ranks become sides, and nothing loops over their pieces.

It serves one lane, where all members and neighbours have one dtype a tensor, and what is left of its plan
(`SidePlan.left`). Ranks of several dtypes go the other way (`planner`), region by region.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from refitd.errors import LayoutError, MismatchError
from refitd.layout.box import Ints
from refitd.layout.layout import Fact, Layout
from refitd.layout.side import Side
from refitd.layout.side_factor import side_from_layouts
from refitd.plan.cells import GRID, Tangled, grid_size
from refitd.plan.classes import pad
from refitd.plan.ranksets import ends, stable_order
from refitd.plan.regions import MIN_CHUNK
from refitd.plan.side_plan import LeftPlan, SidePlan
from refitd.plan.sides import plan_sides
from refitd.plan.tables import Rank
from refitd.plan.topology import Link, Topology

PIECES = 20_000  # of all ranks together; below, the other way takes about a second, unless its grids are large

_LATENCY = 1_000
_LINK = Link(MIN_CHUNK * 10**9 // _LATENCY, _LATENCY)  # a share of `MIN_CHUNK` bytes is worth a message
_NODES = Topology("nodes", _LINK, _LINK, _LINK, 1, 1, 1)


def is_large(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    """Whether the factored way is worth it, and can be gone: for many pieces, and for few that cut each other into so
    many parts that their grids (`grid`) together have more than `GRID` cells times boxes.

    Follows from the layouts alone, and not from their order: every node finds the same.
    """
    return _one_dtype(members) and (_many(sources, members) or _grids_are_large([*sources, *members]))


def has_many_pieces(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    """Whether the factored way can be gone, and there are so many pieces that it is worth it for no other reason."""
    return _many(sources, members) and _one_dtype(members)


def _many(sources: Sequence[Rank], members: Sequence[Rank]) -> bool:
    return sum(len(rank.layout.instances) for rank in (*sources, *members)) >= PIECES


def _one_dtype(members: Sequence[Rank]) -> bool:
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


def _grids_are_large(ranks: Sequence[Rank]) -> bool:
    """Of tensors with the very same boxes, one counts: the other way plans them once."""
    total, seen = 0, set[bytes]()
    for _, boxes in _boxes_by_tensor(ranks):
        if (key := boxes.tobytes()) not in seen:
            seen.add(key)
            total += grid_size(boxes[:, 0], boxes[:, 1])
            if total > GRID:
                return True
    return False


def _boxes_by_tensor(ranks: Sequence[Rank]) -> Iterator[tuple[str, Ints]]:
    """Boxes (B, 2, D) of all ranks by the tensor's canonical name, in order of their names and ranks' keys."""
    ranks = sorted(ranks, key=lambda rank: rank.key)
    tied = {alias: name for rank in ranks for alias, name in rank.layout.tied.items()}
    number: dict[str, int] = {}
    tensors, blocks = [], []
    dims = max([1, *(rank.layout.patterns.shape[2] for rank in ranks)])
    for rank in ranks:
        columns = rank.layout.columns
        names = [number.setdefault(tied.get(name, name), len(number)) for name in rank.layout.tensors]
        tensors.append(np.array(names, np.int64)[columns.tensor])
        blocks.append(np.stack([pad(columns.lo, dims, 0), pad(columns.hi, dims, 1)], axis=1))
    tensor = np.concatenate([np.zeros(0, np.int64), *tensors])
    boxes = np.concatenate([np.zeros((0, 2, dims), np.int64), *blocks])
    order = stable_order(tensor)
    first = ends(np.bincount(tensor, minlength=len(number))).tolist()
    for name, at in sorted(number.items()):
        yield name, boxes[order[first[at] : first[at + 1]]]


def named(error: Tangled, ranks: Sequence[Rank]) -> Tangled:
    """The error with a tensor: where it knows a shape only, the tensor of that shape which is cut most."""
    if error.tensor is not None:
        return error
    shapes = {name: shape for rank in ranks for name, (shape, _) in rank.layout.tensors.items()}
    sizes = [(grid_size(boxes[:, 0], boxes[:, 1]), name) for name, boxes in _boxes_by_tensor(ranks)]
    found = [pair for pair in sizes if error.shape is None or shapes.get(pair[1]) == error.shape]
    return error.of(tensor=f"tensor {max(found or sizes)[1]}")


def plan_large(
    sources: Sequence[Rank], members: Sequence[Rank], neighbours: Sequence[Rank], bucket_bytes: int
) -> SidePlan:
    """The plan of a whole refit; each byte enters a node once, and not where a neighbour will have it. Raises what
    `make_plan` raises.

    Neighbours are planned for as if they were members, and are then taken to hold all that they need.
    """
    target = side_of([*members, *neighbours])
    try:
        plan = plan_sides(side_of(sources), target, _NODES, relays=False, bucket_bytes=max(bucket_bytes, 16))
    except Tangled as error:
        raise named(error, [*sources, *members, *neighbours]) from None
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
