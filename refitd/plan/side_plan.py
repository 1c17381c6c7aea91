"""`SidePlan`: the result of `plan_sides`: totals, bounds, reasons, and programs on demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from refitd.errors import InputError
from refitd.layout import Box
from refitd.layout.box import Ints
from refitd.plan.content import Content
from refitd.plan.cost import Bounds, bound_seconds, estimate, gather_broadcast, near_bound, network_bounds
from refitd.plan.cutting import Cutting
from refitd.plan.expand import PieceIndex, deliveries, expand
from refitd.plan.flows import NET
from refitd.plan.held import Held
from refitd.plan.loads import Loads, count_loads, links
from refitd.plan.program import Bucket, Program
from refitd.plan.proof_rows import prove_rows
from refitd.plan.ranksets import distinct
from refitd.plan.rows import Ends, Rows, limited, make_rows
from refitd.plan.side_program import ITEM, Numbering, make_program, order_rows
from refitd.plan.topology import Topology


@dataclass(frozen=True, eq=False)
class SidePlan:
    """Who sends what to whom, proven. Nothing of a rank is made before it is asked for.

    ``part`` (lines,): thousandths of each line that go by relay. ``start``: thousandths that had landed before.
    """

    digest: str
    topology: Topology
    bucket_bytes: int
    content: Content = field(repr=False)
    cutting: Cutting = field(repr=False)
    part: Ints = field(repr=False)
    start: int = 0

    @property
    def ranks(self) -> tuple[str, ...]:
        """Keys of all ranks of both sides."""
        return self.content.ranks.keys

    @cached_property
    def loads(self) -> Loads:
        """Bytes of every rank by class of link."""
        return count_loads(self.cutting, self.content.sets.table(), self.content.ranks)

    @cached_property
    def bounds(self) -> Bounds:
        """Least bytes of the busiest NIC."""
        flows = self.cutting.parcels.flows
        nbytes = self.cutting.spans.nbytes()[self.cutting.parcels.span]
        whole = flows._replace(holders=self.content.lines.holders[flows.line])
        return network_bounds(self.content.lines, whole, nbytes, self.cutting, self.content.sets.table())

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Payload bytes in the destinations' dtypes. ``relay_bytes`` are those of ``network_bytes`` that destinations send."""
        loads = self.loads
        nbytes = self.cutting.spans.nbytes()[self.cutting.parcels.span]
        return {
            "network_bytes": int(loads.ingress.sum()),
            "network_bytes_min": int(nbytes[self.cutting.parcels.flows.link == NET].sum()),
            "relay_bytes": loads.relayed,
            "peer_bytes": loads.peer,
            "fabric_bytes": loads.fabric,
            "local_bytes": loads.local,
        }

    def links(self) -> tuple[tuple[str, ...], Ints]:
        """Names of the domains, and network bytes from each to each."""
        return self.content.ranks.domains, links(self.cutting, self.content.ranks)

    def program(self, rank: str) -> Program:
        """What ``rank`` does, with the proof of its own rows. Raises InputError for a rank that is not of the plan."""
        return self._made(rank)[0]

    def held(self, rank: str, buckets: Iterable[int]) -> Held:
        """What ``rank`` has once these of its buckets are verified. Raises InputError for buckets of others."""
        program, rows = self._made(rank)
        mine = {bucket.id: bucket for bucket in program.receives()}
        side, classes = self.content.classes.destination, self.content.classes
        boxes: dict[str, list[Box]] = {}
        for number in sorted(set(buckets)):
            if number not in mine:
                raise InputError("bucket ids", f"buckets that {rank} receives", str(number))
            at = slice(mine[number].first, mine[number].last)
            for want, lo, hi in zip(rows.want[at].tolist(), rows.lo[at].tolist(), rows.hi[at].tolist(), strict=True):
                tensor = int(classes.dst[want])
                dims = len(side.forms[int(side.form[side.combo[tensor]])].shape)
                name = side.side.tensors[int(side.tensor[tensor])]
                boxes.setdefault(name, []).append(Box(tuple(lo[:dims]), tuple(hi[:dims])))
        return Held(boxes)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of all ranks, by number. Meant for small plans: it makes every program."""
        every = {b.id: b for key in self.ranks for b in self.program(key).receives()}
        return tuple(every[number] for number in sorted(every))

    @cached_property
    def _ends(self) -> Ends:
        c = self.content
        return Ends(c.classes, c.lines, c.ranks, PieceIndex(c.classes.source), PieceIndex(c.classes.destination))

    def _made(self, rank: str) -> tuple[Program, Rows]:
        c = self.content
        number = int(c.ranks.numbers([rank])[0])
        work = deliveries(self.cutting, c.sets.table(), c.ranks, number)
        dtypes = c.lines.dtypes[self.cutting.parcels.flows.line[work.parcel]]
        dtypes = np.where(work.held > 0, dtypes % 64 * 65, dtypes)
        item, half = ITEM[dtypes % 64], self.bucket_bytes // 16 * 8
        grains = expand(c.lines, c.classes, self.cutting, self.part, work)
        rows = make_rows(self._ends, work, limited(grains, item[grains.delivery], half))
        prove_rows(self._ends, work, rows, number, whole=self.start == 0)
        nbytes = rows.table[:, 8:].prod(axis=1) * item[rows.delivery]
        message = self._numbering.message(work, dtypes, rows)
        rows, nbytes, bucket = order_rows(self._numbering, message, rows, nbytes)
        sides = c.classes.source.side, c.classes.destination.side
        program, order = make_program(rank, self.digest, sides, c.ranks, work, rows, bucket, nbytes)
        return program, rows.take(order)

    @cached_property
    def _numbering(self) -> Numbering:
        dtypes, loads, half = self.content.lines.dtypes, self.loads, self.bucket_bytes // 16 * 8
        most = int(loads.ingress.max(initial=0)) + int(loads.near_in.max(initial=0)) + loads.local
        pairs = distinct(np.concatenate([dtypes, dtypes % 64 * 65]))
        return Numbering(len(self.ranks), pairs, half, most // half + 1)
