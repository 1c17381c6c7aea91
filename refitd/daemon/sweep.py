"""Jobs that everybody has left: their records are removed once they have not changed for the job's time to live."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from functools import partial

import structlog

from refitd.errors import StoreError
from refitd.store import DeleteOp, Item, ModRevision, Store

ROOT = "/refitd/"
CHUNK = 60  # etcd's limit is 128 operations a transaction


class Sweeper:
    """Looks at all jobs of the store now and then. ``ours``: jobs that this daemon has a part in, which it leaves."""

    def __init__(self, store: Store, ttl: float, ours: Callable[[], Collection[str]]) -> None:
        self._store, self._ttl, self._ours = store, ttl, ours
        self._seen: dict[str, tuple[int, float]] = {}  # newest revision of an abandoned job, and when we first saw it
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Look at the start, and every time to live after it; a store that does not let us ends it."""
        while True:
            try:
                await self.look()
            except StoreError as error:
                self._log.info("not_swept", reason=str(error))
            await asyncio.sleep(self._ttl)

    async def look(self) -> list[str]:
        """Remove the records of jobs that have stayed as they were without a member; their names. Raises StoreError."""
        items, _revision = await asyncio.to_thread(self._store.list, ROOT)
        jobs = {job: list(found) for job, found in itertools.groupby(items, key=lambda item: item.key.split("/")[2])}
        abandoned = {job: found for job, found in jobs.items() if job not in self._ours() and not _has_member(found)}
        self._seen = {job: seen for job, seen in self._seen.items() if job in abandoned}
        removed = []
        for job, found in abandoned.items():
            newest, now = max(item.mod_revision for item in found), time.monotonic()
            since = self._seen.setdefault(job, (newest, now))
            if since[0] != newest:
                self._seen[job] = newest, now
            elif now - since[1] >= self._ttl and await self._remove(found):
                self._log.info("job_removed", job=job, reason=f"nobody has been there for {self._ttl:g} s")
                removed.append(job)
        return removed

    async def _remove(self, items: list[Item]) -> bool:
        """Delete records that have not changed; False, and no further, where one has."""
        for at in range(0, len(items), CHUNK):
            chunk = items[at : at + CHUNK]
            same = [ModRevision(item.key, item.mod_revision) for item in chunk]
            delete = [DeleteOp(item.key) for item in chunk]
            if not (await asyncio.to_thread(partial(self._store.txn, same, delete))).ok:
                return False
        return True


def _has_member(items: list[Item]) -> bool:
    return any(item.key.split("/")[3:4] == ["members"] for item in items)
