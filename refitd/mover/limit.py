"""The bandwidth cap of a job on one node: a token bucket in shared memory, drawn on by all of the job's movers there.

The daemon writes one word, the rate, and never waits. Movers keep the rest under a record lock, which the kernel
takes back from a mover that dies. Each mover queues for one chunk at a time and places are given in order, so movers
share evenly however many edges they have. Time is CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from refitd.hook.memfd import check_memory, create_memory, map_shared

PAGE_BYTES = 4096
RATE, KNOWN, LEVEL, SINCE, TAKEN = range(5)  # words of the page; all but the first are written under the lock
BURST_NS = 100_000_000  # what an idle job may save up, and what a mover that wakes late may make good
CHUNK_NS = 1_000_000
CHUNK_LEAST, CHUNK_MOST = 1000, 4 << 20
THROTTLED_PATIENCE = 20
_NS = 1_000_000_000
_SLICE = 0.05
_LOCK_PAUSE = 0.0005


class Words(Protocol):
    """Whole numbers by place: a list, or shared memory."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Bucket:
    """The arithmetic, over five words; every method is given the time in nanoseconds.

    ``LEVEL`` bytes had been allowed at time ``SINCE``, and ``KNOWN`` bytes a second have been since. ``TAKEN`` bytes
    are spoken for: a mover may send its bytes when what is allowed has reached its place. Places never move, so a new
    rate holds at once, for those that wait too.
    """

    def __init__(self, words: Words) -> None:
        self._words = words

    @property
    def rate(self) -> int:
        """Bytes per second; 0: no limit."""
        return self._words[RATE]

    def reserve(self, nbytes: int, now: int) -> int:
        """Take the next ``nbytes``; the place to `wait` for."""
        words = self._words
        self._follow(now)
        allowed = self._allowed(now)
        most = words[TAKEN] + words[KNOWN] * BURST_NS // _NS
        if allowed > most:
            words[LEVEL], words[SINCE] = most, now
        words[TAKEN] += nbytes
        return words[TAKEN]

    def wait(self, place: int, now: int) -> int:
        """Nanoseconds until the bytes before ``place`` may have left, as far as can be told now; 0: go."""
        words = self._words
        self._follow(now)
        if not words[KNOWN]:
            return 0
        return max(0, words[SINCE] - now - (words[LEVEL] - place) * _NS // words[KNOWN])

    def _follow(self, now: int) -> None:
        """Take a new rate in. Coming out of no limit, nothing is owed and nothing saved."""
        words = self._words
        if words[KNOWN] != words[RATE]:
            words[LEVEL] = self._allowed(now) if words[KNOWN] else words[TAKEN]
            words[SINCE], words[KNOWN] = now, words[RATE]

    def _allowed(self, now: int) -> int:
        words = self._words
        return words[LEVEL] + words[KNOWN] * (now - words[SINCE]) // _NS


class Limit:
    """One process's end of the page. Threads may share it."""

    def __init__(self, words: memoryview, fd: int = -1, close: Callable[[], None] = lambda: None) -> None:
        """Use `create` or `map`; without a descriptor there is no lock, and so there can be no limit."""
        self._words, self.fd, self._close = words, fd, close
        self._bucket = Bucket(words)
        self._lock = threading.Lock()
        self._queue: deque[threading.Event] = deque()

    @classmethod
    def create(cls) -> Limit:
        """A new page without a limit; its ``fd`` is what movers map."""
        return cls.map(create_memory("refitd-limit", PAGE_BYTES))

    @classmethod
    def map(cls, fd: int) -> Limit:
        """Map the page behind ``fd`` and own it from here on. Raises ProtocolError where it is no page."""
        try:
            check_memory(fd, PAGE_BYTES, "limit page")
            page = map_shared(fd, PAGE_BYTES)
        except BaseException:
            os.close(fd)
            raise
        return cls(memoryview(page).cast("Q"), fd, page.close)

    @property
    def rate(self) -> int | None:
        """Bytes per second, None without a limit."""
        return self._bucket.rate or None

    def set(self, rate: int | None) -> None:
        """For the daemon: the limit from now on, also for what is on its way. Never waits."""
        self._words[RATE] = rate or 0

    def patience(self, seconds: float) -> float:
        """How long to wait for a neighbour that may be throttled, where ``seconds`` are enough for one that is not.

        Shares of the cap differ from node to node, so ranks of one lane may end far apart.
        """
        return seconds * THROTTLED_PATIENCE if self.rate else seconds

    def pace(
        self, head: memoryview, payload: memoryview, tail: memoryview, tick: Callable[[], None]
    ) -> Iterator[tuple[memoryview, ...]]:
        """Buffers to send now, in order, each group as soon as its part of ``payload`` may leave.

        ``tick`` is called while waiting, at least every 50 ms; what it raises ends the wait.
        """
        granted = self.take(len(payload), tick)
        while granted < len(payload):
            yield head, payload[:granted]
            head, payload = head[:0], payload[granted:]
            granted = self.take(len(payload), tick)
        yield head, payload, tail

    def take(self, nbytes: int, tick: Callable[[], None]) -> int:
        """Wait until some of ``nbytes`` payload bytes may leave, and say how many: at least one, or none of none."""
        rate = self._bucket.rate
        if not rate:
            return nbytes
        chunk = min(nbytes, max(CHUNK_LEAST, min(CHUNK_MOST, rate * CHUNK_NS // _NS)))
        with self._in_turn(tick):
            with self._locked(tick):
                place = self._bucket.reserve(chunk, time.monotonic_ns())
            while wait := self._wait(place, tick):
                time.sleep(min(wait / _NS, _SLICE))
                tick()
        return chunk

    def _wait(self, place: int, tick: Callable[[], None]) -> int:
        with self._locked(tick):
            return self._bucket.wait(place, time.monotonic_ns())

    @contextlib.contextmanager
    def _in_turn(self, tick: Callable[[], None]) -> Iterator[None]:
        """One thread of this process at a time, first come, first served; nobody but the next is woken."""
        mine = threading.Event()
        with self._lock:
            self._queue.append(mine)
            self._queue[0].set()
        try:
            while not mine.wait(_SLICE):
                tick()
            yield
        finally:
            with self._lock:
                self._queue.remove(mine)
                if self._queue:
                    self._queue[0].set()

    @contextlib.contextmanager
    def _locked(self, tick: Callable[[], None]) -> Iterator[None]:
        """The page's other words are ours. A mover that was stopped with the lock is killed by its daemon in time."""
        while not self._try_lock():
            time.sleep(_LOCK_PAUSE)
            tick()
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX has both names for it
            return False
        return True

    def close(self) -> None:
        """Unmap the page. Nobody may be waiting."""
        self._words.release()
        self._close()
        os.close(self.fd)


NO_LIMIT = Limit(memoryview(bytearray(8 * (TAKEN + 1))).cast("Q"))
