"""`make_plan`: from holders, needers and where they run to a proven plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from refitd.errors import InputError, MismatchError, PlanError
from refitd.layout import Box, check_match
from refitd.layout.box import Ints
from refitd.plan.base import Plan
from refitd.plan.buckets import fill
from refitd.plan.held import Held
from refitd.plan.large import is_large, plan_large
from refitd.plan.moves import Moves, expand
from refitd.plan.program import LINKS, Bucket, Program
from refitd.plan.proof import prove
from refitd.plan.regions import Regions, make_regions, places_of
from refitd.plan.route import route
from refitd.plan.tables import MEMBER, NEIGHBOUR, SOURCE, Rank, Table, build_table, held_boxes

BUCKET_BYTES = 4 << 20
MIN_BUCKET_BYTES = 8  # one element of the widest dtype


@dataclass(frozen=True, eq=False)
class BoxPlan:
    """A `Plan` of explicit boxes, all of whose moves are made with it."""

    digest: str
    totals: Mapping[str, int]
    reasons: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    _table: Table = field(repr=False)
    _moves: Moves = field(repr=False)
    _bucket_bytes: int = BUCKET_BYTES

    @property
    def ranks(self) -> tuple[str, ...]:
        """Keys of all ranks that the plan was made for."""
        return tuple(rank.key for rank in self._table.ranks)

    def program(self, rank: str) -> Program:
        """What ``rank`` does. Raises InputError for a rank that the plan does not know."""
        self._require(rank)
        mine = [b for b in self.buckets if b.dst == rank or (b.src == rank and b.link == LINKS[0])]
        picked = [np.arange(b.first, b.last) for b in mine]
        moves = self._moves.table[np.concatenate([*picked, np.zeros(0, np.int64)]).astype(np.int64)]
        used = np.unique(moves[:, [0, 4]])
        moves[:, 0], moves[:, 4] = np.searchsorted(used, moves[:, 0]), np.searchsorted(used, moves[:, 4])
        ends = np.cumsum([b.last - b.first for b in mine]).tolist()
        buckets = [b._replace(first=end - (b.last - b.first), last=end) for b, end in zip(mine, ends, strict=True)]
        storages = tuple(self._table.storages[i] for i in used.tolist())
        moves.flags.writeable = False
        return Program(rank, self.digest, tuple(buckets), moves, storages)

    def held(self, rank: str, buckets: Iterable[int]) -> Held:
        """What ``rank`` has once these of its buckets are verified. Raises InputError for buckets of others."""
        self._require(rank)
        boxes: dict[str, list[Box]] = {}
        for number in sorted(set(buckets)):
            if not 0 <= number < len(self.buckets) or self.buckets[number].dst != rank:
                raise InputError("bucket ids", f"buckets that {rank} receives", str(number))
            for move in range(self.buckets[number].first, self.buckets[number].last):
                name, box = self._filled(move)
                boxes.setdefault(name, []).append(box)
        return Held(boxes)

    def left(self, held: Mapping[str, Held]) -> Plan:
        """The plan of the same ranks without what they hold already, by key. Raises what `make_plan` raises."""
        roles = self._table.roles.tolist()
        sources, neighbours, members = (
            [rank for rank, role in zip(self._table.ranks, roles, strict=True) if role == wanted]
            for wanted in (SOURCE, NEIGHBOUR, MEMBER)
        )
        return make_plan(sources, members, neighbours, held, self._bucket_bytes) if held else self

    def _filled(self, move: int) -> tuple[str, Box]:
        row = int(self._moves.dst[move])
        dims = int(self._table.dims[np.searchsorted(self._table.start, row, side="right") - 1])
        lo, hi = self._moves.lo[move, :dims].tolist(), self._moves.hi[move, :dims].tolist()
        return self._table.names[int(self._table.name[row])], Box(tuple(lo), tuple(hi))

    def _require(self, rank: str) -> None:
        if rank not in self.ranks:
            raise InputError("rank", "a rank of this plan", rank)


def make_plan(
    sources: Sequence[Rank],
    members: Sequence[Rank],
    neighbours: Sequence[Rank] = (),
    held: Mapping[str, Held] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Plan and prove. ``sources`` hold the publication; ``members`` need it; ``neighbours`` will hold it once verified.

    ``held``: member key -> what it need not receive. Raises InputError (keys, bucket size), MismatchError (the sides
    differ), PlanError (a region without holder), ProofError (never, unless the planner is wrong).
    """
    _require_inputs(sources, members, neighbours, bucket_bytes)
    held = dict(held or {})
    near = {(r.domain, r.node) for r in members}
    neighbours = [r for r in neighbours if (r.domain, r.node) in near]
    if is_large(sources, [*members, *neighbours]):
        # what no source holds, a mate may; what a neighbour alone needs is no fault of this lane's
        faults = (PlanError, MismatchError) if neighbours else (PlanError,) if held else ()
        with suppress(*faults):
            plan = plan_large(sources, members, neighbours, bucket_bytes)
            return plan.left(held) if held else plan
    check_match({r.key: r.layout for r in sources}, {r.key: r.layout for r in members})
    table = build_table(sources, neighbours, members)
    regions = _regions(table, held, bucket_bytes)
    moves, buckets = fill(table, expand(table, route(table, regions)), bucket_bytes)
    prove(table, moves, buckets, held, bucket_bytes)
    totals = _totals(buckets, sum(region.network_min for region in regions))
    return BoxPlan(
        _digest(table, moves, buckets), totals, _reasons(table, buckets, totals), buckets, table, moves, bucket_bytes
    )


def _require_inputs(
    sources: Sequence[Rank], members: Sequence[Rank], neighbours: Sequence[Rank], bucket_bytes: int
) -> None:
    keys = [rank.key for rank in (*sources, *members, *neighbours)]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise InputError("rank keys", "each rank once", ", ".join(twice))
    if type(bucket_bytes) is not int or bucket_bytes < MIN_BUCKET_BYTES:
        raise InputError("bucket_bytes", f"an int of at least {MIN_BUCKET_BYTES}", repr(bucket_bytes))


def _regions(table: Table, held: Mapping[str, Held], bucket_bytes: int) -> list[Regions]:
    """Regions of every group; groups of equal geometry on equal ranks share theirs."""
    places = places_of(table)
    known: dict[tuple[bytes, ...], Regions] = {}
    result = []
    empty = np.zeros((0, 2, table.lo.shape[1]), np.int64)
    for group in range(len(table.groups)):
        rows = slice(int(table.start[group]), int(table.start[group + 1]))
        own = [held_boxes(table, held, row) if held else empty for row in range(rows.start, rows.stop)]
        columns: list[Ints] = [table.rank[rows], table.dtype[rows], table.lo[rows], table.hi[rows], *own]
        key = tuple(column.tobytes() for column in columns)
        if key not in known:
            known[key] = make_regions(table, rows, own, places, bucket_bytes)
        result.append(known[key])
    return result


def _totals(buckets: Sequence[Bucket], network_min: int) -> dict[str, int]:
    totals = {f"{link}_bytes": sum(b.nbytes for b in buckets if b.link == link) for link in LINKS}
    return {**totals, "network_bytes_min": network_min}


def _digest(table: Table, moves: Moves, buckets: Sequence[Bucket]) -> str:
    """Over integers and names only: the same on every processor."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([[r.key for r in table.ranks], table.storages, buckets], separators=(",", ":")).encode())
    digest.update(np.ascontiguousarray(moves.table, "<i8").tobytes())
    return digest.hexdigest()


def _reasons(table: Table, buckets: Sequence[Bucket], totals: Mapping[str, int]) -> tuple[str, ...]:
    members = int((table.roles == MEMBER).sum())
    senders = len({b.src for b in buckets if b.link == LINKS[0]})
    over = totals["network_bytes"] - totals["network_bytes_min"]
    reasons = [
        f"{len(buckets)} buckets for {members} members, sent by {senders} ranks over the network",
        f"network {totals['network_bytes']} bytes, {over} over the minimum: each byte enters a node once",
    ]
    unused = sorted({name for r in table.ranks for name in r.layout.tensors} - {*table.groups, *table.names})
    if unused:
        some = ", ".join(islice(unused, 5))
        reasons.append(f"{len(unused)} tensors of the sources are needed by no member: {some}")
    return tuple(reasons)
