"""One run of a program under one lane token: what is verified, what has moved, and whether it may go on.

Workers touch memory only inside `Round.touching`; `Round.halt` returns when none of them does and none ever will.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from refitd.errors import TransportError
from refitd.failpoints import armed, failpoint
from refitd.mover.frames import checksum
from refitd.mover.memory import Memory
from refitd.mover.share import Lot, lot_of, share_of
from refitd.plan import execute
from refitd.plan.execute import Bytes
from refitd.plan.program import NETWORK, Bucket, Program
from refitd.stamps import stamp

Edge = tuple[str, str]
WITHDRAWN = "loan withdrawn"


class Stopped(Exception):
    """The round is over for this worker: superseded or revoked."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a ``run`` message says beside its program. Times are seconds; ``verify`` is ``trailer`` or ``reread``."""

    attempt: int
    publication: tuple[int, int]
    words: Mapping[str, int]
    progress_timeout: float = 3.0
    neighbour_timeout: float = 3.0
    verify: str = "trailer"


@dataclass
class Traffic:
    """Payload bytes by link, counted at the sockets and copies."""

    rx: Counter[str] = field(default_factory=Counter)
    tx: Counter[str] = field(default_factory=Counter)


class _Touch(AbstractContextManager[None]):
    """One for all threads of a round: it has no state of its own (a generator would cost twice as much per block)."""

    def __init__(self, round_: Round) -> None:
        self._begin, self._end = round_.begin_touch, round_.end_touch

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *_exc: object) -> None:
        self._end()


class Round:
    """The state of one run; ``cond`` is the lane's condition, which every change notifies."""

    def __init__(
        self, program: Program, options: RunOptions, memories: Mapping[str, Memory], cond: threading.Condition
    ) -> None:
        self.program, self.options, self.cond = program, options, cond
        self.rank = program.rank
        share = share_of(program)
        self.incoming, self.outgoing, self.plan_tag = share.incoming, share.outgoing, share.tag
        self.verified: set[int] = set()
        self.sent: set[int] = set()
        self.ready: dict[str, int] = {}
        self.failures: dict[Edge, str] = {}
        self.traffic = Traffic()
        self.opened = False  # whether the workers may have begun
        self.span = [0.0, 0.0]  # monotonic seconds: opened, and all counted
        self.first = 0.0  # when the first bucket was counted
        self.sums: dict[int, int] = {}  # by bucket: what kernels summed while they moved it
        self.stopped = False
        self.gathering = threading.Lock()  # held for one block: two at a time would share a cache, and both wait more
        self.memories = memories
        self._touching, self._touch = 0, _Touch(self)
        self._held = self._failpoint_due = armed()  # until `open`: nothing moves before a tester has had its say
        self._stage0_left = share.first
        self._mirror: Program | None = None  # the program whose sources are our destinations
        self.skipped: int | None = None  # a bucket that a test wants to be counted without having been moved

    # -- going on and stopping

    def open(self) -> None:
        """Let the workers begin. Failpoints that come before the first bucket are reached here, and may take long."""
        self.opened = True
        self.span[0] = time.monotonic()
        stamp("opened", self.rank)
        if self._held and self.incoming and failpoint("skip-trailer", role="mover", key=self.rank):
            self.skipped = max(self.incoming.values(), key=lambda bucket: bucket.nbytes).id
        if self._held and len(self.incoming or self.outgoing) == 1:
            self._failpoint_due = False
            failpoint("transfer", role="mover", key=self.rank)
        self._release()

    @property
    def held(self) -> bool:
        """Whether nothing may move yet, as a tester has not had its say."""
        return self._held

    def stop(self) -> None:
        """Nobody begins to read or write memory for it any more."""
        with self.cond:
            self.stopped = True
            if not self.finished():  # else nobody waits for anything of it
                self.cond.notify_all()

    def halt(self) -> None:
        """Stop the round; on return no worker reads or writes memory for it any more."""
        self.stop()
        with self.cond:
            self.cond.wait_for(lambda: self._touching == 0)

    def touching(self) -> AbstractContextManager[None]:
        """Around every read or write of mounted memory. Entering it raises Stopped where the round has ended."""
        return self._touch

    def go_on(self) -> None:
        """Inside `touching`, between two parts: what leaving and entering would do, and free where nothing happened."""
        if self.stopped or self._held:
            self.begin_touch()
            self.end_touch()

    def begin_touch(self) -> None:
        """What `touching` does first: wait while the round is held, raise Stopped where it has ended."""
        with self.cond:
            if self._held:
                self.cond.wait_for(lambda: self.stopped or not self._held)
            if self.stopped:
                raise Stopped
            self._touching += 1

    def end_touch(self) -> None:
        """Only `halt` waits for this: waking every thread at every bucket would cost more than it moves."""
        with self.cond:
            self._touching -= 1
            if self.stopped:
                self.cond.notify_all()

    # -- what has happened

    def fail(self, edge: Edge, reason: str) -> None:
        """Record that nothing more comes by ``edge`` in this round."""
        with self.cond:
            self.failures.setdefault(edge, reason)
            self.cond.notify_all()

    def count_rx(self, link: str, nbytes: int) -> None:
        with self.cond:
            self.traffic.rx[link] += nbytes

    def count_tx(self, link: str, nbytes: int) -> None:
        with self.cond:
            self.traffic.tx[link] += nbytes

    def mark_verified(self, bucket: Bucket) -> None:
        """Count ``bucket``; only ever called after its bytes were checked and its lender's word re-read."""
        with self.cond:
            self._stage0_left -= bucket.stage == 0
        self._mark(self.verified, bucket, len(self.incoming))

    def mark_all_verified(self, buckets: Sequence[Bucket]) -> None:
        """As `mark_verified` for each of ``buckets``, which were checked together."""
        self.mark_lot(lot_of(buckets))

    def mark_lot(self, lot: Lot) -> None:
        """As `mark_verified` for each bucket of ``lot``, at one moment, but for the first where a tester listens."""
        first = lot.first
        if self._failpoint_due and lot.buckets:
            self.mark_verified(lot.buckets[0])
            first -= lot.buckets[0].stage == 0
        with self.cond:
            self._stage0_left -= first
            self.verified |= lot.ids
            self.span[1] = time.monotonic()
            self.first = self.first or self.span[1]
            stamp("counted", self.rank)
            self.cond.notify_all()

    def mark_sent(self, bucket: Bucket) -> None:
        self._mark(self.sent, bucket, 0 if self.incoming else len(self.outgoing))

    def _mark(self, done: set[int], bucket: Bucket, total: int) -> None:
        with self.cond:
            done.add(bucket.id)
            self.first = self.first or time.monotonic()
            due = self._failpoint_due and len(done) < total
            self._failpoint_due = self._failpoint_due and not due
            self._held = self._held or due
            landed = done is self.verified and self._stage0_left == 0
            if landed or self.finished():  # news for the supervisor; every other bucket may pass unheard
                self.span[1] = time.monotonic()
                stamp("counted", self.rank)
                self.cond.notify_all()
        if due:
            failpoint("transfer", role="mover", key=self.rank)
            self._release()

    def _release(self) -> None:
        with self.cond:
            if self._held:
                self._held = False
                self.cond.notify_all()

    def landed(self) -> bool:
        """Whether everything that comes from sources (stage 0) is verified."""
        return self._stage0_left == 0

    def finished(self) -> bool:
        """Whether this rank has verified and sent all that the program has for it."""
        complete = len(self.verified) == len(self.incoming) and len(self.sent) == len(self.outgoing)
        return complete and not self.failures

    def expects(self, src: str) -> bool:
        """Whether buckets from ``src`` over the network are still to come."""
        if (src, self.rank) in self.failures:
            return False
        return any(b.src == src and b.link == NETWORK and i not in self.verified for i, b in self.incoming.items())

    def needs(self, edge: Edge) -> bool:
        """Whether something is still to pass by ``edge``. One that breaks when it has done its part fails no round."""
        src, dst = edge
        if src != self.rank:
            return self.expects(src)
        return any(bucket.dst == dst and bucket.id not in self.sent for bucket in self.outgoing)

    # -- memory

    def lender(self, bucket: Bucket, word: int | None) -> Memory:
        """The source's memory, provided that its loan word is ``word``. Raises TransportError."""
        memory = self._memory(bucket, bucket.src)
        if word is None:
            raise TransportError((bucket.src, bucket.dst), f"no loan word for {bucket.src}")
        self.require_loan(bucket, memory, word)
        return memory

    def require_loan(self, bucket: Bucket, memory: Memory, word: int | None) -> None:
        """Raises TransportError where the lender has changed its loan word."""
        if memory.word != word:
            raise TransportError((bucket.src, bucket.dst), WITHDRAWN)

    def write(self, bucket: Bucket, payload: Bytes) -> None:
        """Scatter a checked payload into this rank's memory; with ``reread`` it is read back and compared."""
        if bucket.id == self.skipped:
            return
        memory = self.destination(bucket)
        memory.unpack(self.program, bucket, payload)
        if self.options.verify == "reread":
            self._reread(bucket, payload, memory)

    def place_of(self, bucket: Bucket) -> memoryview | None:
        """Where the bucket's payload lies as a whole in this rank's memory; None where it has to be scattered.

        None also where `write` has more to do than to write, or will say why it cannot.
        """
        if self.options.verify == "reread" or bucket.id == self.skipped:
            return None
        try:
            memory = self.destination(bucket)
        except TransportError:
            return None
        place = memory.dense(self.program, bucket)
        return None if place is None else place.data

    def copy(self, bucket: Bucket, source: Memory, scratch: Bytes) -> None:
        """Move a bucket from mounted memory into this rank's memory; ``scratch`` holds at least ``nbytes``."""
        if self.options.verify == "reread" or source.on_device or self.destination(bucket).on_device:
            self.write(bucket, source.pack(self.program, bucket, scratch))
        elif not self.skips(bucket):
            execute.copy(self.program, bucket, source.arrays, self.destination(bucket).arrays)

    def skips(self, bucket: Bucket) -> bool:
        """Whether a test wants this bucket to be counted without having been moved."""
        return bucket.id == self.skipped

    def on_device(self, bucket: Bucket) -> bool:
        """Whether both ends of ``bucket`` are mounted, and on devices."""
        ends = [self.memories.get(key) for key in (bucket.src, bucket.dst)]
        return all(memory is not None and memory.on_device for memory in ends)

    def by_host(self, bucket: Bucket) -> bool:
        """Whether one end of ``bucket`` is on a device, and the other is not."""
        ends = [self.memories.get(key) for key in (bucket.src, bucket.dst)]
        return any(memory is not None and memory.on_device for memory in ends) and not self.on_device(bucket)

    def _memory(self, bucket: Bucket, key: str) -> Memory:
        memory = self.memories.get(key)
        if memory is None:
            raise TransportError((bucket.src, bucket.dst), f"memory of {key} is not mounted")
        if memory.checked is not self.program:  # neither ever changes, and a lane runs the same program again and again
            memory.check([ref for ref in self.program.storages if ref.rank == key])
            memory.checked = self.program
        return memory

    def destination(self, bucket: Bucket) -> Memory:
        """This rank's memory. Raises TransportError where it is not there to be written."""
        memory = self._memory(bucket, self.rank)
        if not memory.writable:
            raise TransportError((bucket.src, bucket.dst), f"memory of {self.rank} is not writable")
        return memory

    def _reread(self, bucket: Bucket, payload: Bytes, memory: Memory) -> None:
        if self._mirror is None:
            moves = self.program.moves
            self._mirror = replace(self.program, moves=np.concatenate([moves[:, 4:8], moves[:, 4:]], axis=1))
        back = memory.pack(self._mirror, bucket)
        if checksum(back.data, bucket.id) != checksum(payload.data, bucket.id):
            raise TransportError((bucket.src, bucket.dst), f"bucket {bucket.id} reads back differently")
