"""What operators ask of a job or of this node, and the answer to them. The leader acts on the records written here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from refitd.daemon.agree import Agreement
from refitd.epoch.codec import encode
from refitd.epoch.records import Control, check_name
from refitd.errors import Refused, StoreUnavailable

if TYPE_CHECKING:
    from refitd.daemon.app import Daemon

_TRIES = 8
Fields = dict[str, Any]


class Orders:
    """One daemon's operator. Every method returns the fields of the answer; raises Refused, StoreError."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.draining = False
        self._log = structlog.get_logger().bind(node=daemon.config.node.name)

    async def pause(self, job: str, reason: str) -> Fields:
        """Begin nothing new in a job. What has begun ends, and engines serve."""
        await self._change(job, lambda control: replace(control, paused=True, reason=reason))
        return {"reason": f"{job} is paused" + (f": {reason}" if reason else "")}

    async def resume(self, job: str) -> Fields:
        """Undo a pause."""
        await self._change(job, lambda control: replace(control, paused=False, reason=""))
        return {"reason": f"{job} is not paused"}

    async def limit(self, job: str, rate: int | None) -> Fields:
        """Cap what each node sends over the network for a job, in payload bytes a second."""
        await self._change(job, lambda control: replace(control, limit=rate))
        cap = "is not limited" if rate is None else f"sends at most {rate} bytes a second from each node"
        return {"reason": f"{job} {cap}"}

    def drain(self, cancel: bool) -> Fields:
        """Take this node out of every lane of every job, those that come later too, or take that back."""
        if self.draining == cancel:
            self._log.info("drain_asked", cancel=cancel)
        self.draining = not cancel
        for job in self._daemon.jobs.values():
            job.draining.wanted = self.draining
            job.poke()
        return {"drained": False, "reason": "this node takes part again"} if cancel else self.progress()

    def progress(self) -> Fields:
        """How far a drain is: ``drained`` and ``reason``."""
        reports = [job.draining.progress() for _name, job in sorted(self._daemon.jobs.items())]
        waiting = [report for report in reports if not report.drained]
        reasons = "; ".join(report.reason for report in waiting or reports)
        return {"drained": self.draining and not waiting, "reason": reasons or "this node has no job"}

    async def _change(self, job: str, change: Callable[[Control], Control]) -> None:
        """Write the job's control record, whoever else writes it meanwhile."""
        check_name("job", job)
        async with self._records(job) as agreement:
            for _try in range(_TRIES):
                stored = agreement.view.control
                present = stored.value if stored else Control()
                wanted = change(present)
                if wanted == present:
                    return
                if await agreement.write("control", encode(wanted), stored.revision if stored else 0):
                    self._log.info("control", job=job, paused=wanted.paused, limit=wanted.limit, reason=wanted.reason)
                    return
        raise StoreUnavailable(f"the control record of {job} changed {_TRIES} times meanwhile")

    @asynccontextmanager
    async def _records(self, name: str) -> AsyncIterator[Agreement]:
        """The records of a job, also of one that has no client on this node. Raises Refused where nobody is in it."""
        if name in self._daemon.jobs:
            yield self._daemon.jobs[name].agreement
            return
        guest = self._daemon.guest(name)
        try:
            await guest.read()
            if not guest.view.members:
                raise Refused("job", "a job that has members", name)
            yield guest
        finally:
            await guest.close()
