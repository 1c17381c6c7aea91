"""A step of an edge at either end, from the first promise to the last checksum; and all edges' on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from refitd.mover.memory import Memory
from refitd.mover.nccl.batches import Batch
from refitd.mover.nccl.library import Part, Work
from refitd.mover.nccl.staging import Sums
from refitd.mover.round import Edge


class Outgoing:
    """A step's buckets for one edge: being packed, announced, sent; ``trailed`` once their trailer has been said."""

    def __init__(self, edge: Edge, batch: Batch, address: int, sums: Sums, memory: Memory, hold: ExitStack) -> None:
        self.edge, self.batch, self.address, self.sums, self.memory = edge, batch, address, sums, memory
        self.whole, self.trailed = False, False
        self._hold = hold

    def parts(self, peer: int) -> list[Part]:
        return _parts(self.batch, peer, self.batch.places(self.address), self.whole)

    def release(self) -> None:
        """Let go of lent memory, when nothing reads it any more."""
        with self._hold:
            self.sums.settle()


class Incoming:
    """A step's buckets that may come. Straight into mounted memory where they are ``in_place``: it is held meanwhile.

    ``checked`` once they have counted, or never will.
    """

    def __init__(self, edge: Edge, batch: Batch, places: Mapping[int, int], hold: ExitStack | None) -> None:
        self.edge, self.batch, self.places, self.in_place = edge, batch, places, hold is not None
        close = list(places.values()) == list(batch.places(places[batch.buckets[0].id]).values())
        self.whole = close and (hold is None or batch.extent == batch.payload)  # a gap in a buffer may be written
        self.found: tuple[Sums, Sums | None] | None = None
        self.checked = False
        self._hold = hold or ExitStack()

    def parts(self, peer: int) -> list[Part]:
        return _parts(self.batch, peer, self.places, self.whole)

    def keep(self, hold: ExitStack) -> None:
        """Let go of ``hold``, too, at the end."""
        self._hold.push(hold)

    def release(self) -> None:
        with self._hold:
            for sums in self.found or ():
                if sums is not None:
                    sums.settle()


def _parts(batch: Batch, peer: int, places: Mapping[int, int], whole: bool) -> list[Part]:
    if whole:
        return [Part(peer, places[batch.buckets[0].id], batch.extent)]
    return [Part(peer, places[bucket.id], bucket.nbytes) for bucket in batch.buckets]


class Flight:
    """One step on the wire, and until all its buckets are known to have come or not."""

    def __init__(self, work: Work, sends: Sequence[Outgoing], receives: Sequence[Incoming]) -> None:
        self.work, self.sends, self.receives = work, sends, receives
        self.landed = False
        self.edges = [*(one.edge for one in sends), *(one.edge for one in receives)]

    @property
    def over(self) -> bool:
        trailed = all(one.trailed for one in self.sends)
        return self.landed and trailed and all(one.checked for one in self.receives)
