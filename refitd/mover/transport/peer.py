"""Edges inside a host: the destination's mover reads the source's mounted memory straight into place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from refitd.errors import DeviceError, TransportError
from refitd.mover.board import Board
from refitd.mover.round import Round, Stopped
from refitd.mover.share import share_of
from refitd.mover.transport.stream import TICK_SECONDS
from refitd.mover.transport.worker import Worker, describe
from refitd.plan.execute import Bytes
from refitd.plan.program import NETWORK, Bucket, Program

if TYPE_CHECKING:
    from refitd.mover.cuda.pull import Puller

NOT_READY = "neighbour not ready"
AT_ONCE_SECONDS = 0.05  # what took no longer the thread of the commands moves itself, which hears nothing meanwhile
LAUNCH_SECONDS = 60.0  # a launch that takes longer will not end: of 64 GiB, by PCIe and with compiling, it takes ten
Warm = Callable[[Callable[[], None]], None]


class PeerTransport:
    """All ``peer`` and ``local`` buckets of a lane, in one thread: they share one memory bus."""

    def __init__(self, board: Board, warm: Warm | None = None) -> None:
        """``warm`` gets ready what will move the buckets, and calls what it is given when that is done."""
        self._board, self._warm = board, warm
        self._worker = PeerWorker(board)
        self._round: Round | None = None
        self._at_once = False  # whether the round is left to `hurry`
        self.edges = [] if warm is None else [(board.facts.rank, board.facts.rank)]

    def connect(self) -> None:
        self._worker.start()
        if self._warm is not None:
            self._warm(lambda: self._board.mark_warm(self.edges[0]))

    def run(self, round_: Round) -> None:
        self._round, self._at_once = round_, self._worker.is_ready(round_)
        if self._worker.has_work(round_) and not self._at_once:
            self._worker.rouse()

    def hurry(self, round_: Round) -> None:
        """Once the round is open: move in the caller's thread what takes no preparation; waking another takes longer.

        Raises DeviceError, after which nothing is to be expected of this process's device.
        """
        if not self._at_once:
            return
        if self._worker.is_ready(round_):
            self._worker.move_at_once(round_)
        else:  # an edge has failed since, or the worker, which is awake then, was given other buckets
            self._worker.rouse()

    def stand_by(self) -> bool:
        """A round like the last will come: be quick then. False where there is nothing to be done for it.

        Raises DeviceError, as `hurry`.
        """
        return self._worker.stand_by()

    @property
    def hung(self) -> bool:
        """Whether a launch has not ended in any time that it could take: nothing is to be expected of its device."""
        return self._worker.busy_seconds > LAUNCH_SECONDS

    def progress(self) -> int:
        rx = self._round.traffic.rx if self._round else {}
        return sum(nbytes for link, nbytes in rx.items() if link != NETWORK)

    def revoke(self) -> None:
        self._worker.interrupt()

    def abort(self) -> None:
        self._worker.join()

    def close(self) -> None:
        """Nothing is held between rounds."""


class PeerWorker(Worker):
    """Copies stage 0 first, then stage 1 as neighbours become ready."""

    def __init__(self, board: Board) -> None:
        super().__init__(board, (board.facts.rank, board.facts.rank))
        self._scratch: Bytes = np.empty(0, np.uint8)
        self._puller: Puller | None = None
        self._pulling = threading.Lock()
        self._work: _Work | None = None

    def has_work(self, round_: Round) -> bool:
        work = self._work_of(round_)
        return bool(work.now or work.later)

    def is_ready(self, round_: Round) -> bool:
        """Whether stage 0 is no more than launches that were prepared for an earlier round, and did not take long."""
        work, puller = self._work_of(round_), self._puller
        if puller is None or not work.now or round_.held or puller.took > AT_ONCE_SECONDS:
            return False
        return puller.is_ready(round_, work.now)

    def move_at_once(self, round_: Round) -> None:
        """In the caller's thread: stage 0, or what a worker that was awake has left of it. Raises DeviceError."""
        work = self._work_of(round_)
        try:
            with self._pulling:
                if left := _left(round_, work.now):
                    self._pull(round_, left)
        except Stopped:
            return
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001  reported, as what the worker itself meets
            self.board.break_edge(self.edge, describe(error))
        if work.later:
            self.rouse()

    def stand_by(self) -> bool:
        """In the caller's thread, unless the worker is at it. Raises DeviceError."""
        if self._puller is None or not self._pulling.acquire(blocking=False):
            return False
        try:
            return self._puller.stand_by()
        finally:
            self._pulling.release()

    @property
    def busy_seconds(self) -> float:
        return 0.0 if self._puller is None else self._puller.busy_seconds

    def _work_of(self, round_: Round) -> _Work:
        """A lane runs the same program again and again."""
        if self._work is None or self._work.program is not round_.program:
            self._work = _work_of(round_.program)
        return self._work

    def _serve(self) -> None:
        round_: Round | None = None
        while (round_ := self.board.next_round(round_, self.idle)) is not None:
            try:
                self._run(round_)
            except Stopped:
                continue

    def _run(self, round_: Round) -> None:
        work = self._work_of(round_)
        with self._pulling:
            self._attempt_all(round_, _left(round_, work.now))
        waiting = list(work.later)
        while waiting:
            ready = self._wait_ready(round_, {bucket.src for bucket in waiting})
            with self._pulling:
                self._attempt_all(round_, [bucket for bucket in waiting if bucket.src in ready])
            waiting = [b for b in waiting if b.src not in ready]

    def _attempt_all(self, round_: Round, buckets: Sequence[Bucket]) -> None:
        first = {bucket.src: bucket for bucket in buckets}
        on_device = {src for src, bucket in first.items() if round_.on_device(bucket)}
        if on_device:
            whole = len(on_device) == len(first)
            self._pull(round_, buckets if whole else [bucket for bucket in buckets if bucket.src in on_device])
        for bucket in (bucket for bucket in buckets if bucket.src not in on_device):
            self._attempt(round_, bucket)

    def _pull(self, round_: Round, buckets: Sequence[Bucket]) -> None:
        """Those that devices move. A DeviceError ends the mover: a context that failed once is of no more use."""
        if self._puller is None:
            from refitd.mover.cuda.pull import Puller  # a mover without a device never loads it

            self._puller = Puller()
        words = round_.options.words if buckets[0].stage == 0 else round_.ready
        self._puller.pull(round_, buckets, words)

    def _attempt(self, round_: Round, bucket: Bucket) -> None:
        if (bucket.src, bucket.dst) in round_.failures:
            return
        try:
            self._copy(round_, bucket)
        except TransportError as error:
            round_.fail(error.edge, error.reason)
        except (Stopped, MemoryError, DeviceError):
            raise
        except Exception as error:  # noqa: BLE001  told by edge; the other edges of this thread go on
            round_.fail((bucket.src, bucket.dst), describe(error))

    def _copy(self, round_: Round, bucket: Bucket) -> None:
        word = (round_.options.words if bucket.stage == 0 else round_.ready).get(bucket.src)
        if self._scratch.size < bucket.nbytes and self._needs_scratch(round_, bucket):
            self._scratch = np.empty(bucket.nbytes, np.uint8)
        with round_.touching():
            memory = round_.lender(bucket, word)
            round_.copy(bucket, memory, self._scratch)
            round_.require_loan(bucket, memory, word)
            round_.count_rx(bucket.link, bucket.nbytes)
            round_.mark_verified(bucket)

    def _needs_scratch(self, round_: Round, bucket: Bucket) -> bool:
        return round_.options.verify == "reread" or round_.by_host(bucket)

    def _wait_ready(self, round_: Round, sources: set[str]) -> set[str]:
        """Which of ``sources`` may be read or will never be; waits for at least one.

        The limit counts from when all of this rank's stage 0 has landed: until then the neighbours are not late. Nor
        are they while the store is away, by which their lanes go on; it begins anew then.
        """
        silent = 0.0
        with self.board.cond:
            while not (found := sources & (round_.ready.keys() | self._lost(round_))):
                if round_.stopped or self.board.stopping:
                    raise Stopped
                woken = self.board.cond.wait(TICK_SECONDS)
                if self.board.store_away:
                    silent = 0.0
                elif not woken and round_.landed():
                    silent += TICK_SECONDS
                if silent >= self.board.limit.patience(round_.options.neighbour_timeout):
                    for src in sources:
                        round_.fail((src, round_.rank), NOT_READY)
        return found

    def _lost(self, round_: Round) -> set[str]:
        return {src for src, _dst in round_.failures}

    def _interrupt(self) -> None:
        """The board has woken it: it blocks on nothing else."""


class _Work(NamedTuple):
    """Of a program, what does not go over the network: stage 0, and stage 1."""

    program: Program
    now: tuple[Bucket, ...]
    later: tuple[Bucket, ...]


def _work_of(program: Program) -> _Work:
    buckets = [bucket for bucket in share_of(program).incoming.values() if bucket.link != NETWORK]
    now, later = (tuple(bucket for bucket in buckets if bucket.stage == stage) for stage in (0, 1))
    return _Work(program, now, later)


def _left(round_: Round, buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Those that nobody has brought, or failed to bring, already."""
    gone, failed = round_.verified, round_.failures
    if not gone and not failed:
        return buckets
    left = tuple(bucket for bucket in buckets if bucket.id not in gone and (bucket.src, bucket.dst) not in failed)
    return left if len(left) < len(buckets) else buckets
