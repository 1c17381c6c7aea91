"""The movers of one job's ranks: wanted, started, watched, killed when they hang, started again."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from refitd.daemon.rank import LocalRank
from refitd.daemon.slow import held_up
from refitd.daemon.stuck import Stuck
from refitd.epoch.records import SlotId
from refitd.epoch.view import View
from refitd.errors import TransportError
from refitd.hook.executor import LIBRARY
from refitd.mover.handle import MoverHandle
from refitd.mover.pool import MoverPool
from refitd.mover.thread_handle import ClientHost
from refitd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from refitd.daemon.job import Job

_BACKOFF = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_CALM_SECONDS = 60.0
UNMAP_SECONDS = 2.0
GONE = "its rank is gone"


@dataclass
class _Unmap:
    """Answers of a mover that are awaited: each was asked for by another connection, and they come in that order."""

    unanswered: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Movers:
    """One mover a rank, as long as the rank is registered."""

    def __init__(self, pool: MoverPool, job: Job, metrics: Metrics) -> None:
        self._pool, self._job, self._metrics = pool, job, metrics
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._dying: dict[str, MoverHandle] = {}  # killed and not yet gone: its memory must not be lent again
        self._deaths: dict[str, list[float]] = {}
        self._restarted: set[SlotId] = set()
        self._unmaps: dict[tuple[MoverHandle, str], _Unmap] = {}
        self._mapped: dict[MoverHandle, dict[str, int]] = {}  # until a mover has ended, whatever became of its rank
        self._stuck = Stuck()
        self._store_away = False
        self._log = structlog.get_logger().bind(job=job.job, node=job.node)

    def want(self, key: str) -> None:
        """Start a mover for a rank unless one is there or on its way."""
        if key not in self._starting:
            self._starting[key] = asyncio.create_task(self._start(key))

    def drop(self, rank: LocalRank) -> None:
        """The rank is gone: end its mover, which is the surest way to unmap its memory; others unmap it."""
        if rank.mover:
            self._kill(rank.mover, GONE)
        self._unmount(rank.key)

    async def unmap(self, rank: LocalRank) -> None:
        """Return once no mover maps the rank's memory any more; one that does not answer in time is killed.

        That counts movers, and answers, that are still awaited from a connection of the client before this one.
        Raises Refused where a client's thread may map it, which nobody can kill.
        """
        self._unmount(rank.key)
        unmaps = [(mover, unmap) for (mover, key), unmap in self._unmaps.items() if key == rank.key]
        await asyncio.gather(*(self._unmapped(mover, rank.key, unmap) for mover, unmap in unmaps))
        self._stuck.require_free(rank.key)

    def _unmount(self, key: str) -> None:
        for mover, mounted in self._mapped.items():
            if mounted.pop(key, None) is not None:
                self._unmaps.setdefault((mover, key), _Unmap()).unanswered += 1
                mover.send({"kind": "unmount", "memory": key})

    async def _unmapped(self, mover: MoverHandle, key: str, unmap: _Unmap) -> None:
        done = asyncio.create_task(unmap.done.wait())
        try:
            await asyncio.wait([done], timeout=UNMAP_SECONDS)
            if not done.done():
                if mover.alive and self._dying.get(mover.key) is not mover:
                    self._kill(mover, f"it did not let go of {key} in time")
                await mover.gone()
        finally:
            done.cancel()

    def check(self) -> None:
        """Kill movers that missed their ping deadline."""
        for rank in self._job.ranks.values():
            if rank.mover and not rank.mover.alive_within(self._job.config.timeouts.mover_ping):
                self._kill(rank.mover, "it did not answer a ping in time")

    def heed_store(self, away: bool) -> None:
        """While the store is away, nobody can say that he is ready: no mover counts that against its neighbours."""
        if away != self._store_away:
            self._store_away = away
            for rank in self._job.ranks.values():
                if rank.mover:
                    rank.mover.send({"kind": "store", "away": away})

    def restart_excluded(self, view: View) -> None:
        """A lane that does without one of our slots suspects its mover: a new one is innocent."""
        for lane in [stored.value for stored in view.lanes.values()]:
            for exclusion in lane.excluded:
                slot, rank = exclusion.slot, self._job.ranks.get(exclusion.slot.key)
                if (
                    rank is None
                    or rank.mover is None
                    or exclusion.passing
                    or exclusion.parked
                    or slot in self._restarted
                ):
                    continue
                if view.live(slot) and slot.mover == rank.life:
                    self._restarted.add(slot)
                    self._kill(rank.mover, f"a lane excluded it: {exclusion.reason}")

    async def close(self) -> None:
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        self._stuck.close()

    async def _start(self, key: str) -> None:
        await asyncio.sleep(self._delay(key))
        if key in self._dying:
            await self._dying[key].gone()
        rank, host = self._job.ranks.get(key), self._host(key)
        if rank is None:
            del self._starting[key]
            return
        began = time.monotonic()
        try:
            handle = await self._pool.spawn(key, self._on_message, self._on_exit, host)
        except TransportError as error:
            self._log.error("mover_not_started", key=key, error=str(error))
            self._deaths.setdefault(key, []).append(time.monotonic())
            if host is not None:
                rank.session.close("its mover thread does not answer")
            self._starting[key] = asyncio.create_task(self._start(key))
            return
        del self._starting[key]
        rank = self._job.ranks.get(key)
        if rank is None or rank.mover is not None:
            self._kill(handle, GONE)
            return
        if host is not self._host(key):
            self._kill(handle, "its client runs its mover otherwise by now")
            self.want(key)
            return
        try:
            handle.send({"kind": "limit"}, [self._job.limit.fd])
        except OSError as error:  # no descriptor is left
            self._deaths.setdefault(key, []).append(time.monotonic())
            self._kill(handle, f"it cannot be sent anything: {error}", fault=False)
            self.want(key)
            return
        if self._store_away:
            handle.send({"kind": "store", "away": True})
        rank.mover, rank.life, rank.mounted = handle, handle.life, {}
        self._mapped[handle] = rank.mounted
        took, path = round(time.monotonic() - began, 4), rank.path.path
        self._log.info("mover_started", key=key, pid=handle.pid, life=handle.life, path=path, seconds=took)
        self._job.poke()

    def _host(self, key: str) -> ClientHost | None:
        """The client's thread that is to be the rank's mover; None: a child."""
        rank = self._job.ranks.get(key)
        return rank.host if rank and rank.path.path == LIBRARY else None

    def _delay(self, key: str) -> float:
        now = time.monotonic()
        recent = [death for death in self._deaths.get(key, []) if now - death < _CALM_SECONDS]
        self._deaths[key] = recent
        return _BACKOFF[min(max(len(recent) - 1, 0), len(_BACKOFF) - 1)]

    def _kill(self, handle: MoverHandle, reason: str, fault: bool = True) -> None:
        self._log.warning("mover_killed", key=handle.key, pid=handle.pid, reason=reason)
        if fault and reason != GONE:
            self._fault(handle, f"was killed: {reason}")
        self._dying[handle.key] = handle
        handle.kill()

    def _fault(self, handle: MoverHandle, how: str) -> None:
        """Tell people, with what the mover was wanted for, while the lanes still know it."""
        waiting = held_up(self._job, handle.key)
        self._metrics.fault(self._job.job, f"the mover of {handle.key} {how}{'; ' if waiting else ''}{waiting}")

    def _on_message(self, handle: MoverHandle, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if "memory" in message:
            self._on_memory(handle, message)
        elif message.get("kind") == "worn":
            self._kill(handle, f"it is worn: {message.get('reason')}", fault=False)
        else:
            self._job.on_mover_message(handle, message)

    def _on_memory(self, handle: MoverHandle, message: dict[str, Any]) -> None:
        if message.get("kind") == "failed":
            rank = self._job.ranks.get(handle.key)
            if rank and rank.mover is handle and message["memory"] == rank.key and rank.fall_back(message["reason"]):
                self._log.warning("path_changed", key=rank.key, path=rank.path.path, reason=rank.path.reason)
            self._kill(handle, f"it cannot map {message['memory']}: {message.get('reason')}")
        elif message.get("kind") == "mounted":
            self._log.debug("mounted", rank=handle.key, memory=message["memory"], spent=message.get("spent"))
        elif message.get("kind") == "unmounted" and (handle, message["memory"]) in self._unmaps:
            self._answered(handle, message["memory"])

    def _answered(self, handle: MoverHandle, key: str) -> None:
        unmap = self._unmaps[handle, key]
        unmap.unanswered -= 1
        if not unmap.unanswered:
            self._unmaps.pop((handle, key)).done.set()

    def _on_exit(self, handle: MoverHandle) -> None:
        rank = self._job.ranks.get(handle.key)
        ours = rank is not None and rank.mover is handle
        asked = [key for mover, key in self._unmaps if mover is handle]
        mapped = {*self._mapped.pop(handle, ()), *asked}
        for key in asked:
            self._unmaps.pop((handle, key)).done.set()
        if handle.stuck:
            self._stuck.add(handle, mapped)
        if self._dying.get(handle.key) is handle:
            del self._dying[handle.key]
        elif ours:
            self._fault(handle, "died")
        self._job.on_mover_exit(handle.key)
        if rank is None or not ours:
            return
        self._log.warning("mover_died", key=handle.key, pid=handle.pid, stuck=handle.stuck)
        self._metrics.mover_restarted()
        self._deaths.setdefault(handle.key, []).append(time.monotonic())
        rank.mover, rank.mounted = None, {}
        if handle.stuck:
            rank.session.close("its mover thread was cut off and does not end")
        else:
            self.want(handle.key)
