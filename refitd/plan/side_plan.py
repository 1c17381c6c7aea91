"""`SidePlan`: the result of `plan_sides`: totals, bounds, reasons, and programs on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from refitd.errors import InputError
from refitd.layout.box import Ints
from refitd.plan.content import Content
from refitd.plan.cost import Bounds, bound_seconds, estimate, gather_broadcast, near_bound, network_bounds
from refitd.plan.cutting import Cutting
from refitd.plan.ends import Ends
from refitd.plan.expand import Deliveries, Grains, deliveries, expand
from refitd.plan.flows import NET
from refitd.plan.held import Held
from refitd.plan.left import Holdings, left, prove_left
from refitd.plan.loads import Loads, count_loads, links
from refitd.plan.program import LINKS, NETWORK, Bucket, Program
from refitd.plan.proof_rows import prove_rows
from refitd.plan.ranksets import distinct
from refitd.plan.reasons import reasons
from refitd.plan.relays import depth
from refitd.plan.rows import Rows, limited, make_rows
from refitd.plan.side_program import ITEM, Numbering, by_address, make_program, order_rows
from refitd.plan.topology import Topology


class Core(NamedTuple):
    """What a plan is made of. ``times``: ns that it would take with relays, and directly, where both were priced."""

    content: Content
    cutting: Cutting
    part: Ints
    times: tuple[int, int] | None = None


class SidePlan:
    """Who sends what to whom, proven. Nothing of a rank is made before it is asked for.

    ``content``: what the sides have to do with each other; ``cutting``: who sends it; ``part`` (lines,): thousandths of
    each line that go by relay; ``unrecoverable``: bytes of a remainder that no rank has.
    """

    def __init__(
        self,
        digest: str,
        topology: Topology,
        bucket_bytes: int,
        core: Core | Callable[[], Core],
        unrecoverable: int = 0,
    ) -> None:
        self.digest, self.topology, self.bucket_bytes, self.unrecoverable = (
            digest,
            topology,
            bucket_bytes,
            unrecoverable,
        )
        self._core = core

    @cached_property
    def _parts(self) -> Core:
        return self._core() if callable(self._core) else self._core

    @property
    def content(self) -> Content:
        """What the two sides have to do with each other."""
        return self._parts.content

    @property
    def cutting(self) -> Cutting:
        """Who sends what."""
        return self._parts.cutting

    @property
    def part(self) -> Ints:
        """Thousandths of each line that go by relay, (lines,)."""
        return self._parts.part

    @property
    def times(self) -> tuple[int, int] | None:
        """Nanoseconds with relays and without, where both were looked at."""
        return self._parts.times

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
        parcels = self.cutting.parcels
        flows = parcels.flows._replace(holders=np.where(parcels.relay == 1, self._first_holders, parcels.flows.holders))
        nbytes = self.cutting.spans.nbytes()[parcels.span]
        loads = self.cutting.egress.load, self.cutting.relayed.load
        return network_bounds(flows, nbytes, parcels.relay == 2, loads, self.content.sets.table())

    @cached_property
    def _first_holders(self) -> Ints:
        """Of each parcel, the holders from which its line comes first."""
        return self.content.lines.holders[self.cutting.parcels.flows.line]

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Payload bytes in the destinations' dtypes. ``relay_bytes`` are those of ``network_bytes`` that destinations
        send; ``remaining_bytes`` all that the plan moves into domains; ``unrecoverable_bytes`` what no rank has."""
        loads = self.loads
        link = self.cutting.parcels.flows.link
        nbytes = self.cutting.spans.nbytes()[self.cutting.parcels.span]
        return {
            "network_bytes": int(loads.ingress.sum()),
            "network_bytes_min": int(nbytes[link == NET].sum()),
            "relay_bytes": loads.relayed,
            "peer_bytes": loads.peer,
            "fabric_bytes": loads.fabric,
            "local_bytes": loads.local,
            "remaining_bytes": int(nbytes.sum()),
            "unrecoverable_bytes": self.unrecoverable,
        }

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """What `refitd plan` prints, but for the seconds that planning took."""
        bounds, loads = self.bounds, self.loads
        most = int(loads.egress.max(initial=0)), int(loads.ingress.max(initial=0))
        gathered = self._gather_broadcast()
        return {
            "tensors": len(self.content.classes.dst),
            "ranks": len(self.ranks),
            **self.totals,
            "egress_max_over_bound": most[0] / bounds.egress if bounds.egress else 1.0,
            "ingress_max_over_bound": most[1] / bounds.ingress if bounds.ingress else 1.0,
            "est_seconds": estimate(loads, self.topology, self.depth, self.bucket_bytes),
            "bound_seconds": bound_seconds(bounds, near_bound(loads, self.content.ranks), self.topology),
            "gather_broadcast_bytes": gathered[0],
            "gather_broadcast_est_seconds": gathered[1],
            "coverage": "exact",
            "digest": self.digest,
        }

    @cached_property
    def depth(self) -> int:
        """Domains that a chain of relays goes through at most."""
        return depth(self.cutting.parcels, self.part)

    def _gather_broadcast(self) -> tuple[int, float]:
        c = self.content
        ranks, table = c.ranks, c.sets.table()
        root = int(ranks.domain[ranks.source[0]])
        present = np.zeros(len(table.first) - 1, dtype=bool)
        present[table.owner()[ranks.domain[table.member] == root]] = True
        targets = set(ranks.domain[ranks.destination].tolist()) - {root}
        total, held = int(c.lines.nbytes.sum()), int(c.lines.nbytes[present[c.lines.holders]].sum())
        sizes = [np.bincount(ranks.domain[numbers]) for numbers in (ranks.source, ranks.destination)]
        least = int(sizes[1][sizes[1] > 0].min(initial=len(ranks.keys)))
        return gather_broadcast(total, held, len(targets), (int(sizes[0][root]), least), self.topology)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the plan is as it is, a sentence each."""
        return reasons(self)

    def links(self) -> tuple[tuple[str, ...], Ints]:
        """Names of the domains, and network bytes from each to each."""
        return self.content.ranks.domains, links(self.cutting, self.content.ranks)

    def program(self, rank: str) -> Program:
        """What ``rank`` does, with the proof of its own rows. Raises InputError for a rank that is not of the plan."""
        return self._made(rank)[0]

    def held(self, rank: str, buckets: Iterable[int]) -> Held:
        """What ``rank`` has once these of its buckets are verified. Raises InputError for buckets of others."""
        program, rows, chosen = self._made(rank)
        mine = {bucket.id: bucket for bucket in program.receives()}
        missing = sorted(number for number in {*buckets} if number not in mine)
        if missing:
            raise InputError("bucket ids", f"buckets that {rank} receives", str(missing[0]))
        spans = [np.arange(mine[number].first, mine[number].last) for number in {*buckets}]
        at = chosen[np.concatenate([*spans, np.zeros(0, np.int64)]).astype(np.int64)]
        side, walk, want = self.content.classes.destination, rows.walk[at], self.content.classes.dst[rows.want[at]]
        shapes = np.array([len(form.shape) for form in side.forms], np.int64)
        dims = np.zeros(len(side.side.tensors), np.int64)
        dims[side.tensor] = shapes[side.form[side.combo]]
        return Held.from_columns(side.side.tensors, dims, side.tensor[want], rows.walks.lo[walk], rows.walks.hi[walk])

    def left(self, held: Mapping[str, Held]) -> SidePlan:
        """This plan without what ranks hold already (by key). What another rank of a node holds is read there."""
        return LeftPlan(self, held) if held else self

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of all ranks, by number. Meant for small plans: it makes every program."""
        every = {b.id: b for key in self.ranks for b in self.program(key).receives()}
        return tuple(every[number] for number in sorted(every))

    @cached_property
    def ends(self) -> Ends:
        """What programs are made from."""
        return Ends(self.content.classes, self.content.lines, len(self.ranks))

    def _made(self, rank: str) -> tuple[Program, Rows, Ints]:
        c, numbering = self.content, self._numbering
        number = int(c.ranks.numbers([rank])[0])
        work = deliveries(self.cutting, c.sets.table(), c.ranks, number)
        item = ITEM[self._dtypes(work) % 64]
        grains = expand(c.lines, c.classes, self.cutting, self.part, work)
        work, grains = self._left(number, work, limited(grains, item[grains.delivery], numbering.half))
        rows, dtypes = make_rows(self.ends, work, grains), self._dtypes(work)
        address = by_address(rows)
        self._prove(number, work, rows, address)
        nbytes = rows.walks.volume() * ITEM[dtypes % 64][rows.walks.delivery]
        order = order_rows(numbering, numbering.edges(work, dtypes), rows, nbytes, address)
        sides = c.classes.source.side, c.classes.destination.side
        program, chosen = make_program(rank, self.digest, sides, c.ranks, work, rows, order)
        return program, rows, chosen

    def _dtypes(self, work: Deliveries) -> Ints:
        """The pair of dtypes of each delivery; what was received is in the destination's."""
        dtypes = self.content.lines.dtypes[self.cutting.parcels.flows.line[work.parcel]]
        return np.where(work.held > 0, dtypes % 64 * 65, dtypes)

    def _left(self, number: int, work: Deliveries, grains: Grains) -> tuple[Deliveries, Grains]:  # noqa: ARG002
        """What is left of a rank's grains: all, in a plan that starts with nothing held."""
        return work, grains

    def _prove(self, number: int, work: Deliveries, rows: Rows, address: Ints) -> None:
        whole = self.cutting.start == 0 and not self.unrecoverable
        prove_rows(self.ends, work, rows, address, number, whole)

    @cached_property
    def _numbering(self) -> Numbering:
        dtypes, loads, half = self.content.lines.dtypes, self.loads, self.bucket_bytes // 16 * 8
        most = int(loads.ingress.max(initial=0)) + int(loads.near_in.max(initial=0)) + loads.local
        pairs = distinct(np.concatenate([dtypes, dtypes % 64 * 65]))
        return Numbering(len(self.ranks), pairs, half, most // half + 1)


class LeftPlan(SidePlan):
    """What is left of a ``whole`` plan when ranks hold boxes already, and ``lenders`` all that they need. Totals are
    counted from all programs, when asked for."""

    def __init__(self, whole: SidePlan, held: Mapping[str, Held], lenders: tuple[str, ...] = ()) -> None:
        digest = hashlib.blake2b(whole.digest.encode(), digest_size=16)
        for key in sorted(held.keys() & {*whole.ranks}):
            digest.update(f"{key} {held[key].digest}\0".encode())
        for key in sorted(lenders):
            digest.update(f"{key} lends\0".encode())
        core = Core(whole.content, whole.cutting, whole.part)
        super().__init__(digest.hexdigest(), whole.topology, whole.bucket_bytes, core)
        self._whole, self._lenders, self.ends = whole, lenders, whole.ends
        self._holdings = Holdings(whole.ends, whole.content.ranks, held, frozenset(lenders))

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """As `SidePlan.totals`, of what is left: bytes that enter a node do so once."""
        found = {link: sum(b.nbytes for b in self.buckets if b.link == link) for link in LINKS}
        entering = found[NETWORK]
        return {
            **{f"{link}_bytes": nbytes for link, nbytes in found.items()}, "network_bytes_min": entering,
            "relay_bytes": 0, "remaining_bytes": sum(found.values()), "unrecoverable_bytes": 0,
        }  # fmt: skip

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the plan is as it is."""
        return (*self._whole.reasons, "of this, what ranks hold already is left out or read in their node")

    def left(self, held: Mapping[str, Held]) -> SidePlan:
        """The whole plan without ``held``, which takes the place of what was held before; lenders stay."""
        return LeftPlan(self._whole, held, self._lenders)

    def _left(self, number: int, work: Deliveries, grains: Grains) -> tuple[Deliveries, Grains]:
        parcels, sets = self.cutting.parcels, self.content.sets.table()
        return left(self._holdings, sets, parcels, work, grains, number)

    def _prove(self, number: int, work: Deliveries, rows: Rows, address: Ints) -> None:
        prove_rows(self.ends, work, rows, address, number, whole=False)
        planned = len(deliveries(self.cutting, self.content.sets.table(), self.content.ranks, number).src)
        prove_left(self.ends, self._holdings, work, rows, number, planned)
