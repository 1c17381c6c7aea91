"""What rounds would else count anew each time: a rank's share of a program, and buckets that are checked together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from refitd.mover.frames import plan_tag
from refitd.plan.program import Bucket, Program


class Share(NamedTuple):
    """``incoming`` by id; ``first``: how many of them come from sources (stage 0)."""

    incoming: Mapping[int, Bucket]
    outgoing: tuple[Bucket, ...]
    first: int
    tag: bytes


class Lot(NamedTuple):
    """Buckets that are verified at one moment. ``payload``: bytes by link; ``first``: how many are of stage 0."""

    buckets: tuple[Bucket, ...]
    ids: frozenset[int]
    payload: tuple[tuple[str, int], ...]
    first: int


_known: WeakKeyDictionary[Program, Share] = WeakKeyDictionary()


def share_of(program: Program) -> Share:
    """Found once: a lane runs the same program again and again."""
    found = _known.get(program)
    if found is None:
        incoming = {bucket.id: bucket for bucket in program.receives()}
        first = sum(bucket.stage == 0 for bucket in incoming.values())
        _known[program] = found = Share(incoming, program.sends(), first, plan_tag(program.plan_digest))
    return found


def lot_of(buckets: Iterable[Bucket]) -> Lot:
    """The lot of just these."""
    every, payload = tuple(buckets), Counter[str]()
    for bucket in every:
        payload[bucket.link] += bucket.nbytes
    first = sum(bucket.stage == 0 for bucket in every)
    return Lot(every, frozenset(bucket.id for bucket in every), tuple(payload.items()), first)
