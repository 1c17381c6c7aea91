"""How many buckets of an edge make a step, and where each lies in the buffer that holds them.

A step costs the hosts some messages and NCCL a group, whatever its size: small buckets share one. The sender cuts, by
what its own buffers and those of its receiver may hold; the receiver takes what it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from refitd.plan.program import Bucket, Program

SLOTS = 4  # steps of an edge that may be under way: one packed, two on the wire, one unpacked
MOST_BYTES, LEAST_BYTES = 256 << 20, 4 << 20  # of a step
MOST_BUCKETS = 512
SLOW_SECONDS, QUICK_SECONDS = 0.4, 0.1  # a step that takes longer, or less: the edge's next ones are cut or grow
_ALIGNMENT = 16  # of a bucket in a buffer: what kernels need


class Batch(NamedTuple):
    """Buckets that go as one step of an edge, in the program's order; all of one pair of dtypes, link and stage."""

    buckets: tuple[Bucket, ...]

    @property
    def payload(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def ids(self) -> list[int]:
        return [bucket.id for bucket in self.buckets]

    def places(self, start: int) -> dict[int, int]:
        """Address of each bucket, by id, in a buffer at ``start``."""
        found, at = {}, start
        for bucket in self.buckets:
            found[bucket.id] = at
            at += -(-bucket.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    @property
    def extent(self) -> int:
        """Bytes of a buffer that holds all of them."""
        last = self.buckets[-1]
        return self.places(0)[last.id] + last.nbytes


def room(spare: int, edges: int) -> int:
    """Bytes that a step may have where as many edges share ``spare`` bytes of buffers."""
    return min(MOST_BYTES, spare // (SLOTS * max(edges, 1)))


def cut(program: Program, buckets: Sequence[Bucket], most: int) -> Batch:
    """The longest front of ``buckets``, at least one, that may be a step of ``most`` bytes."""
    kind = _kind(program, buckets[0])
    taken, nbytes = 1, buckets[0].nbytes
    for bucket in buckets[1:MOST_BUCKETS]:
        nbytes += -(-bucket.nbytes // _ALIGNMENT) * _ALIGNMENT
        if nbytes > most or _kind(program, bucket) != kind:
            break
        taken += 1
    return Batch(tuple(buckets[:taken]))


def next_size(now: int, most: int, seconds: float) -> int:
    """How large an edge's steps are to be after one that took ``seconds``: none may come near a peer's patience."""
    if seconds > SLOW_SECONDS:
        return max(LEAST_BYTES, now // 2)
    return min(most, now * 2) if seconds < QUICK_SECONDS else now


def _kind(program: Program, bucket: Bucket) -> tuple[object, ...]:
    return *program.dtypes_of(bucket), bucket.link, bucket.stage
