"""Buckets between memory on GPUs of one host: many a launch, straight into place, summed on the way.

Loan words are read before a batch of launches and again when its work is done; only then do its buckets count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refitd.errors import InputError, TransportError
from refitd.mover.cuda.device import device_errors
from refitd.mover.cuda.groups import Batch, batches, by_rank, groups, rank_name
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.kernels import Launch, Touch, interleaved, reread, through
from refitd.mover.memory import Memory
from refitd.mover.round import WITHDRAWN, Round
from refitd.mover.share import Lot, lot_of
from refitd.plan.program import Bucket, Program
from refitd.stamps import stamp

LAUNCH_BYTES = 64 << 30  # some 40 ms of work on an H200: how long a revoke may have to wait
KEPT = 256
Pair = tuple[Launch, Launch | None]  # move, and sum what was written
_Key = tuple[int, bool, int | None, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Armed:
    """All that it takes to move ``lot``, looked up and prepared: only loan words are still to be read."""

    program: Program
    again: bool
    skipped: int | None
    own: DeviceMemory
    lenders: tuple[DeviceMemory, ...]
    launches: tuple[Pair, ...]
    lot: Lot
    touch: Touch | None

    def fits(self, round_: Round) -> bool:
        """Whether program and memory are still the same objects, which never change, and nothing has failed."""
        same = self.program is round_.program and self.again == _again(round_) and self.skipped == round_.skipped
        return same and not round_.failures and all(round_.memories.get(one.key) is one for one in self.memories)

    @property
    def memories(self) -> tuple[DeviceMemory, ...]:
        return (self.own, *self.lenders)

    @property
    def over(self) -> bool:
        return any(memory.closed for memory in self.memories)

    def pin(self) -> bool:
        """Keep all memory mapped; False, and nothing is kept, where some of it is mapped no more."""
        held = [memory for memory in self.memories if memory.pin()]
        if len(held) <= len(self.lenders):
            for memory in held:
                memory.unpin()
            return False
        return True

    def unpin(self) -> None:
        for memory in self.memories:
            memory.unpin()


class Puller:
    """Used by one thread at a time. Launches are prepared once, as long as program and memory stay what they are.

    What was prepared for memory that is mapped no more goes when the next launch is prepared: it holds device memory.
    """

    def __init__(self, launch_bytes: int = LAUNCH_BYTES) -> None:
        self._launch_bytes = launch_bytes
        self._kept: dict[_Key, Armed] = {}
        self._batched: tuple[Program | None, Sequence[Bucket], list[Batch]] = None, (), []
        self._whole: tuple[Sequence[Bucket], Armed] | None = None  # what was asked for last, where one batch does it
        self._since = 0.0  # monotonic seconds: when the launches began that are under way; 0 where none are
        self.took = 0.0  # seconds that the last ones took

    @property
    def busy_seconds(self) -> float:
        """For how long the device has been at its launches by now, compiling included. May be asked by any thread."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def is_ready(self, round_: Round, buckets: Sequence[Bucket]) -> bool:
        """Whether `pull` of these, in the very object that was pulled last, would have nothing to prepare.

        May be asked by any thread, also while another pulls.
        """
        whole = self._whole
        return whole is not None and whole[0] is buckets and whole[1].fits(round_)

    def pull(self, round_: Round, buckets: Sequence[Bucket], words: Mapping[str, int]) -> None:
        """Move ``buckets``, whose both ends are on devices; ``words`` are the lenders' loan words by rank key.

        What fails does so by edge, in the round; the others go on. Raises Stopped; DeviceError, after which nothing is
        to be expected of this process's device.
        """
        stamp("pull", round_.rank)
        if self._whole is not None and self.is_ready(round_, buckets):
            with round_.touching():
                self._move(round_, self._whole[1], words)
            return
        self._whole = None
        armed: Armed | None = None
        split = self._batches(round_.program, buckets)
        for batch in split:
            with round_.touching():
                armed = self._armed(round_, batch, words)
                if armed is not None:
                    self._move(round_, armed, words)
        if armed is not None and len(split) == 1 and armed.fits(round_):
            self._whole = buckets, armed

    def stand_by(self) -> bool:
        """Have the device awake for what was asked for last, if it is asked for again; False where that cannot be.

        Only reads, outside any loan: nothing is done with it. Raises DeviceError, as `pull`.
        """
        armed = self._whole[1] if self._whole is not None else None
        if armed is None or armed.touch is None or not armed.pin():
            return False
        stamp("touch", armed.own.key)
        try:
            armed.own.device.activate()
            with device_errors("stand by"):
                armed.touch.run()
            stamp("touched", armed.own.key)
        finally:
            armed.unpin()
        return True

    def _batches(self, program: Program, buckets: Sequence[Bucket]) -> list[Batch]:
        """As `batches`; a lane does the same again and again."""
        if self._batched[0] is not program or self._batched[1] is not buckets:
            found = batches(groups(program, buckets, self._launch_bytes), self._launch_bytes)
            self._batched = program, buckets, found
        return self._batched[2]

    # -- once for a program and memory

    def _armed(self, round_: Round, batch: Batch, words: Mapping[str, int]) -> Armed | None:
        """What moves those of ``batch`` that can be moved; the edges of the others fail."""
        own, lenders = _ends(round_, batch, words)
        todo = [[bucket for bucket in group if bucket.src in lenders] for group in batch]
        ids = tuple(bucket.id for group in todo for bucket in group)
        if own is None or not ids:
            return None
        key = id(round_.program), _again(round_), round_.skipped, ids
        if (kept := self._kept.get(key)) is not None and kept.fits(round_):
            return kept
        return self._prepared(round_, todo, own, lenders, key)

    def _prepared(
        self, round_: Round, todo: Batch, own: DeviceMemory, lenders: Mapping[str, DeviceMemory], key: _Key
    ) -> Armed:
        """Kept, unless the plan of some buckets makes no sense, which fails their edges."""
        own.device.activate()
        self._kept = {known: kept for known, kept in self._kept.items() if not kept.over}
        if len(self._kept) >= KEPT:
            self._kept.clear()
        launches = []
        for group in todo:
            try:
                launches += _launches(round_, group, own, lenders)
            except InputError as error:
                for bucket in group:
                    round_.fail((bucket.src, bucket.dst), str(error))
        lot = lot_of(bucket for group in todo for bucket in group)
        sources = tuple(lenders[src] for src in sorted({bucket.src for bucket in lot.buckets}))
        touch = own.device.touch([move.table for move, _again in launches])
        made = Armed(round_.program, _again(round_), round_.skipped, own, sources, tuple(launches), lot, touch)
        if not round_.failures:
            self._kept[key] = made
        return made

    # -- each time

    def _move(self, round_: Round, armed: Armed, words: Mapping[str, int]) -> None:
        """Its lenders' words were what they should be, or are now."""
        stale = [memory for memory in armed.lenders if memory.word != words.get(memory.key)]
        if stale or not armed.pin():
            self._move_others(round_, armed, words)
            return
        self._since = time.monotonic()
        try:
            _run(round_, armed)
        finally:
            self.took, self._since = self.busy_seconds, 0.0
            armed.unpin()
        _count(round_, armed, words)

    def _move_others(self, round_: Round, armed: Armed, words: Mapping[str, int]) -> None:
        """Some lender has taken its memory back, or some memory is mapped no more: what is left goes by itself."""
        _fail_stale(round_, armed, words)
        for memory in (memory for memory in armed.memories if memory.closed):
            for src in {one.key for one in armed.lenders if memory in (one, armed.own)}:
                round_.fail((src, round_.rank), f"memory of {memory.key} is mapped no more")
        left = [bucket for bucket in armed.lot.buckets if (bucket.src, bucket.dst) not in round_.failures]
        for batch in batches(groups(round_.program, left, self._launch_bytes), self._launch_bytes):
            if (rest := self._armed(round_, batch, words)) is not None:
                self._move(round_, rest, words)


def _again(round_: Round) -> bool:
    return round_.options.verify == "reread"


def _fail_stale(round_: Round, armed: Armed, words: Mapping[str, int]) -> None:
    """The edges from lenders whose loan word is not, or no more, what the round was told."""
    for memory in armed.lenders:
        if memory.word != words.get(memory.key):
            reason = WITHDRAWN if memory.key in words else f"no loan word for {memory.key}"
            round_.fail((memory.key, round_.rank), reason)


def _ends(round_: Round, batch: Batch, words: Mapping[str, int]) -> tuple[DeviceMemory | None, dict[str, DeviceMemory]]:
    """Our memory, and that of each rank that lends it; where there is none to be used, the edge fails."""
    own: DeviceMemory | None = None
    lenders: dict[str, DeviceMemory] = {}
    for bucket in {bucket.src: bucket for group in batch for bucket in group}.values():
        if (bucket.src, bucket.dst) in round_.failures:
            continue
        try:
            own = _mapped(bucket, round_.destination(bucket))
            lender = _mapped(bucket, round_.lender(bucket, words.get(bucket.src)))
            _require_reach(bucket, lender, own)
            lenders[bucket.src] = lender
        except TransportError as error:
            round_.fail(error.edge, error.reason)
        except InputError as error:
            round_.fail((bucket.src, bucket.dst), str(error))
    return own, lenders


def _mapped(bucket: Bucket, memory: Memory) -> DeviceMemory:
    assert isinstance(memory, DeviceMemory)
    if memory.closed:
        raise TransportError((bucket.src, bucket.dst), f"memory of {memory.key} is mapped no more")
    return memory


def _require_reach(bucket: Bucket, lender: DeviceMemory, own: DeviceMemory) -> None:
    """Memory is mapped for one device: a kernel on another would die of it. Raises TransportError."""
    if lender.device is not own.device:
        reason = f"memory of {bucket.src} is mapped for {lender.device.uuid}, and that of {bucket.dst} for another"
        raise TransportError((bucket.src, bucket.dst), reason)


def _launches(
    round_: Round, buckets: Sequence[Bucket], own: DeviceMemory, lenders: Mapping[str, DeviceMemory]
) -> list[Pair]:
    """One for buckets of one pair of dtypes; none where nothing of them is to be moved. Raises InputError."""
    moving = [bucket for bucket in buckets if not round_.skips(bucket)]
    if not moving:
        return []
    named = by_rank(round_.program)
    memories = (own, *lenders.values())
    places = {rank_name(memory.key, name): address for memory in memories for name, address in memory.addresses.items()}
    table = interleaved(through(named, moving, places, places), [bucket.src for bucket in moving])
    again = own.device.prepare(reread(named, moving, places)) if _again(round_) else None
    return [(own.device.prepare(table), again)]


def _run(round_: Round, armed: Armed) -> None:
    """All launches are on their way before the first is waited for. Raises DeviceError."""
    armed.own.device.activate()
    stamp("launch", round_.rank)
    with device_errors("move buckets"):
        for pair in armed.launches:
            for launch in pair:
                if launch is not None:
                    launch.run()
        stamp("launched", round_.rank)
        for move, sum_again in armed.launches:
            sums = move.checksums()
            round_.sums.update(sums)
            if sum_again is not None:
                _compare(round_, sums, sum_again.checksums())
    stamp("summed", round_.rank)


def _compare(round_: Round, sums: Mapping[int, int], found: Mapping[int, int]) -> None:
    """What was summed on the way, and what was read back."""
    for number in sums if found != sums else ():
        if sums[number] != found[number]:
            bucket = round_.incoming[number]
            round_.fail((bucket.src, bucket.dst), f"bucket {number} reads back differently")


def _count(round_: Round, armed: Armed, words: Mapping[str, int]) -> None:
    """What was moved and still may be read counts."""
    _fail_stale(round_, armed, words)
    lot = armed.lot
    if round_.failures:
        lot = lot_of(bucket for bucket in lot.buckets if (bucket.src, bucket.dst) not in round_.failures)
    for link, nbytes in lot.payload:
        round_.count_rx(link, nbytes)
    round_.mark_lot(lot)
