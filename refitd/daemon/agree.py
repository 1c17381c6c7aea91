"""One job's connection to the store: the lease, guarded writes, and with `Following` the picture of its records.

Calls to a store in this process are made at once; calls that cross a network run in one worker thread, in order. What
we wrote ourselves goes into the picture as soon as the store has answered: nothing waits for its own echo.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import structlog

from refitd.daemon.following import Following
from refitd.daemon.paths import Paths
from refitd.epoch.view import View
from refitd.errors import LeaseLost, RefitdError, StoreTimeout, StoreUnavailable
from refitd.failpoints import effect
from refitd.stamps import stamp
from refitd.store import Compare, DeleteOp, Lease, ModRevision, Op, PutOp, Store, TxnResult
from refitd.store.keeper import Hold, LeaseKeeper

T = TypeVar("T")
AWAY_SECONDS = 0.5  # a call that takes longer has met a server that is frozen, or has no leader


class Agreement:
    """What this daemon and the store agree on about one job. All methods belong to the event loop."""

    def __init__(
        self, store: Store, job: str, ttl: float, every: float, inline: bool, poke: Callable[[], None]
    ) -> None:
        self.lost: Callable[[], None] = lambda: None
        self._store, self._paths = store, Paths(job)
        self._ttl, self._every, self._inline, self._poke = ttl, every, inline, poke
        self._log = structlog.get_logger().bind(job=job)
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"store-{job}")
        self._keeper: LeaseKeeper | None = None
        self._lease: Lease | None = None  # what we write under, as far as this loop has heard
        self._contact_since = time.monotonic()
        self._asked: float | None = None  # when the call began that is under way
        self.unbroken = True  # no outage since the start
        self.following = Following(store, self._paths, self.call, poke, self._broken)

    @property
    def view(self) -> View:
        """The picture of the records that this daemon follows."""
        return self.following.view

    async def read(self) -> int:
        """Read all records; the revision at which they stood. Raises StoreError."""
        return await self.following.read()

    async def revision(self) -> int:
        """The store's revision at this moment. Raises StoreError."""
        _items, revision = await self.call(partial(self._store.list, self._paths.path("leader")))
        return max(int(revision), 1)

    async def start(self) -> None:
        """Read the records that all share and follow them. Raises StoreError where the store does not answer."""
        await self.following.start()
        self._keeper = LeaseKeeper(self._store, self._ttl, self._every, self._told)

    async def close(self) -> None:
        """Give the lease up, with every key under it, and end the threads."""
        self.following.stop()
        if self._keeper:
            with contextlib.suppress(RefitdError):  # it will expire by itself
                await asyncio.to_thread(self._keeper.close)
        self._worker.shutdown(wait=False, cancel_futures=True)
        await self.following.join()

    @property
    def alive(self) -> bool:
        """Whether our lease surely still stands, by our own clock."""
        return self._lease is not None and self._keeper is not None and self._keeper.alive

    @property
    def renewed(self) -> float:
        """When the renewal of our lease that succeeded last was sent (monotonic seconds); 0 where we have no lease."""
        deadline = self._keeper.deadline if self._keeper else 0.0
        return max(deadline - self._ttl, 0.0)

    @property
    def contact_seconds(self) -> float:
        """How long the store has answered without a break."""
        failed = self._keeper.failed_at if self._keeper else -math.inf
        return time.monotonic() - max(self._contact_since, failed)

    @property
    def away(self) -> bool:
        """Whether the store fails, or lets a call of ours wait, so that others cannot tell us anything."""
        asked = self._asked  # once: the worker's thread may forget it meanwhile
        return self._store.away or (asked is not None and time.monotonic() - asked > AWAY_SECONDS)

    async def call(self, request: Callable[[], T]) -> T:
        """Run a blocking store call. Raises what it raises; a call that comes to nothing breaks our contact."""
        try:
            if self._inline:
                return request()
            return await self._loop.run_in_executor(self._worker, self._timed, request)
        except (StoreUnavailable, StoreTimeout):
            self._broken()
            raise

    def _timed(self, request: Callable[[], T]) -> T:
        """In the worker thread."""
        self._asked = time.monotonic()
        try:
            return request()
        finally:
            self._asked = None

    async def join(self) -> None:
        """Be under a lease. Raises StoreError, also while the one that we had is in doubt.

        After an outage of the store the old lease may have outlived it, and with it everything that we wrote under it:
        its keeper asks until it knows.
        """
        assert self._keeper is not None, "started"
        self._look_at_lease("it ended")
        if self._lease is not None:
            raise StoreUnavailable("our lease has not been renewed for its time to live")
        self._lease = await self.call(self._keeper.acquire)

    async def write(
        self, key: str, data: bytes | None, expected: int, leased: bool = False, guards: Sequence[Compare] = ()
    ) -> bool:
        """Put (or delete, for None) a record if its revision is still ``expected``; False where it is not, and where
        it is to be ``leased`` and we have no lease.

        An unknown outcome is read back: True only where the record is now what we meant.
        """
        lease = self._lease if leased else None
        if leased and lease is None and data is not None:
            return False  # it has just been lost: what is written without one would outlive us
        path = self._paths.path(key)
        op: Op = DeleteOp(path) if data is None else PutOp(path, data, lease)
        compares = [ModRevision(path, expected), *guards]
        record = key.partition("/")[0]
        effect(f"write {record}")
        try:
            result = await self.call(partial(self._store.txn, compares, [op]))
        except StoreTimeout:
            return await self._read_back(path, data)
        except LeaseLost:
            self._lose("it had expired before a write")
            return False
        effect(f"written {record}")
        stamp(f"written.{record}", key)
        return await self._written(key, data, result)

    async def _written(self, key: str, data: bytes | None, result: TxnResult) -> bool:
        if not result.ok:
            await self._read_back(self._paths.path(key), data)
        elif result.revision <= self.following.revision_heard(key):
            pass  # the answer came after the watch's word on it, and perhaps on what became of it since
        elif data is None:
            self.view.delete(key, result.revision)
        else:
            created = self._created(key, result.revision)
            self.view.put(key, data, created, result.revision)
        self._poke()
        return result.ok

    def _created(self, key: str, revision: int) -> int:
        return self.view.created_of(key) or revision

    async def _read_back(self, path: str, data: bytes | None) -> bool:
        item = await self.call(partial(self._store.get, path))
        if item is not None and item.mod_revision > self.following.revision_heard(self._paths.key(path)):
            self.following.take(item)
        return (item.value if item else None) == data

    def compare_path(self, key: str) -> str:
        """The store key of a record, for guards."""
        return self._paths.path(key)

    # Keeping the lease.

    def _told(self, hold: Hold, reason: str) -> None:
        """The keeper's word, in one of its threads."""
        self._loop.call_soon_threadsafe(self._heed, hold, reason)

    def _heed(self, hold: Hold, reason: str) -> None:
        if hold is Hold.DOUBTFUL:
            self._broken()
            self._log.warning("lease_doubtful", reason=reason)
        self._look_at_lease(reason)
        self._poke()

    def _look_at_lease(self, reason: str) -> None:
        """The lease that we write under is gone where its keeper does not hold it any more."""
        if self._keeper and self._lease and self._keeper.lease is not self._lease:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._lease is None:
            return
        self._lease = None
        self._broken()
        self._log.warning("lease_lost", reason=reason)
        self.lost()
        self._poke()

    def _broken(self) -> None:
        self._contact_since, self.unbroken = time.monotonic(), False
