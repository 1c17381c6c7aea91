"""Buckets between memory on GPUs of one host: many a launch, straight into place, summed on the way.

Loan words are read before a batch of launches and again when its work is done; only then do its buckets count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from refitd.errors import InputError, TransportError
from refitd.mover.cuda.device import device_errors
from refitd.mover.cuda.groups import Batch, batches, by_rank, groups, rank_name
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.kernels import Launch, interleaved, reread, through
from refitd.mover.memory import Memory
from refitd.mover.round import WITHDRAWN, Round
from refitd.plan.program import Bucket, Program
from refitd.stamps import stamp

LAUNCH_BYTES = 64 << 30  # some 40 ms of work on an H200: how long a revoke may have to wait
KEPT_LAUNCHES = 256


class _Key(NamedTuple):
    """What a launch was made for. Memory is compared by identity, and kept from being anybody else's meanwhile."""

    program: int
    memories: tuple[int, ...]
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    launches: tuple[Launch, Launch | None]  # move, and sum what was written
    program: Program
    memories: tuple[DeviceMemory, ...]

    @property
    def over(self) -> bool:
        return any(memory.closed for memory in self.memories)


class Puller:
    """Used by one thread. Launches are prepared once, as long as program and memory stay what they are.

    What was prepared for memory that is mapped no more goes when the next launch is prepared: it holds device memory.
    """

    def __init__(self, launch_bytes: int = LAUNCH_BYTES) -> None:
        self._launch_bytes = launch_bytes
        self._kept: dict[_Key, _Kept] = {}
        self._batched: tuple[Program, tuple[int, ...], list[Batch]] | None = None

    def pull(self, round_: Round, buckets: Sequence[Bucket], words: Mapping[str, int]) -> None:
        """Move ``buckets``, whose both ends are on devices; ``words`` are the lenders' loan words by rank key.

        What fails does so by edge, in the round; the others go on. Raises Stopped; DeviceError, after which nothing is
        to be expected of this process's device.
        """
        stamp("pull", round_.rank)
        for batch in self._batches(round_.program, buckets):
            with round_.touching():
                self._move(round_, batch, words)

    def _batches(self, program: Program, buckets: Sequence[Bucket]) -> list[Batch]:
        """As `batches`; a lane does the same again and again."""
        ids = tuple(bucket.id for bucket in buckets)
        if self._batched is None or self._batched[0] is not program or self._batched[1] != ids:
            self._batched = program, ids, batches(groups(program, buckets, self._launch_bytes), self._launch_bytes)
        return self._batched[2]

    def _move(self, round_: Round, batch: Batch, words: Mapping[str, int]) -> None:
        lenders: dict[str, DeviceMemory] = {}
        with ExitStack() as pins:
            for bucket in {bucket.src: bucket for group in batch for bucket in group}.values():
                try:
                    own = _pinned(pins, bucket, round_.destination(bucket))
                    lender = _pinned(pins, bucket, round_.lender(bucket, words.get(bucket.src)))
                    _require_reach(bucket, lender, own)
                    lenders[bucket.src] = lender
                except TransportError as error:
                    round_.fail(error.edge, error.reason)
                except InputError as error:
                    round_.fail((bucket.src, bucket.dst), str(error))
            todo = [[bucket for bucket in group if bucket.src in lenders] for group in batch]
            moving = [[bucket for bucket in group if not round_.skips(bucket)] for group in todo]
            if any(moving):
                self._run(round_, [group for group in moving if group], lenders, own)
        self._count(round_, [bucket for group in todo for bucket in group], lenders, words)

    def _run(self, round_: Round, batch: Batch, lenders: Mapping[str, DeviceMemory], own: DeviceMemory) -> None:
        """All launches are on their way before the first is waited for."""
        own.device.activate()
        launches = [made for group in batch if (made := self._launches(round_, group, lenders, own)) is not None]
        stamp("launch", round_.rank)
        with device_errors("move buckets"):
            for launch in (launch for pair in launches for launch in pair if launch is not None):
                launch.run()
            stamp("launched", round_.rank)
            for move, sum_again in launches:
                sums = move.checksums()
                round_.sums.update(sums)
                _compare(round_, sums, sums if sum_again is None else sum_again.checksums())
        stamp("summed", round_.rank)

    def _count(
        self, round_: Round, buckets: list[Bucket], lenders: Mapping[str, DeviceMemory], words: Mapping[str, int]
    ) -> None:
        for key, memory in lenders.items():
            if memory.word != words.get(key):
                round_.fail((key, round_.rank), WITHDRAWN)
        good = [bucket for bucket in buckets if (bucket.src, bucket.dst) not in round_.failures]
        for link in {bucket.link for bucket in good}:
            round_.count_rx(link, sum(bucket.nbytes for bucket in good if bucket.link == link))
        round_.mark_all_verified(good)

    def _launches(
        self, round_: Round, buckets: list[Bucket], lenders: Mapping[str, DeviceMemory], own: DeviceMemory
    ) -> tuple[Launch, Launch | None] | None:
        """What moves ``buckets``, and what sums them again; None where they fail, by edge, for what the plan says."""
        try:
            return self._prepared(round_, buckets, lenders, own)
        except InputError as error:
            for bucket in buckets:
                round_.fail((bucket.src, bucket.dst), str(error))
            return None

    def _prepared(
        self, round_: Round, buckets: list[Bucket], lenders: Mapping[str, DeviceMemory], own: DeviceMemory
    ) -> tuple[Launch, Launch | None]:
        program, again = round_.program, round_.options.verify == "reread"
        memories = (own, *(lenders[key] for key in sorted({bucket.src for bucket in buckets})))
        key = _Key(id(program), tuple(map(id, memories)), (again, *(bucket.id for bucket in buckets)))
        if key not in self._kept:
            self._kept = {known: kept for known, kept in self._kept.items() if not kept.over}
            if len(self._kept) >= KEPT_LAUNCHES:
                self._kept.clear()
            self._kept[key] = _Kept(_prepared(program, buckets, memories, again), program, memories)
        return self._kept[key].launches


def _compare(round_: Round, sums: Mapping[int, int], found: Mapping[int, int]) -> None:
    """What was summed on the way, and what was read back."""
    for number in sums if found != sums else ():
        if sums[number] != found[number]:
            bucket = round_.incoming[number]
            round_.fail((bucket.src, bucket.dst), f"bucket {number} reads back differently")


def _pinned(pins: ExitStack, bucket: Bucket, memory: Memory) -> DeviceMemory:
    assert isinstance(memory, DeviceMemory)
    pins.enter_context(memory.pinned(bucket))
    return memory


def _require_reach(bucket: Bucket, lender: DeviceMemory, own: DeviceMemory) -> None:
    """Memory is mapped for one device: a kernel on another would die of it. Raises TransportError."""
    if lender.device is not own.device:
        reason = f"memory of {bucket.src} is mapped for {lender.device.uuid}, and that of {bucket.dst} for another"
        raise TransportError((bucket.src, bucket.dst), reason)


def _prepared(
    program: Program, buckets: list[Bucket], memories: tuple[DeviceMemory, ...], again: bool
) -> tuple[Launch, Launch | None]:
    device, named = memories[0].device, by_rank(program)
    places = {rank_name(memory.key, name): address for memory in memories for name, address in memory.addresses.items()}
    table = interleaved(through(named, buckets, places, places), [bucket.src for bucket in buckets])
    return device.prepare(table), device.prepare(reread(named, buckets, places)) if again else None
