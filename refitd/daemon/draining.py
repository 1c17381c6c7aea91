"""This node's wish to leave: kept in the job's records for as long as it stands, and when it has come true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import structlog

from refitd.epoch.codec import encode
from refitd.epoch.records import Drain

if TYPE_CHECKING:
    from refitd.daemon.job import Job

REASON = "its operator drains it"


class Progress(NamedTuple):
    """Whether the node is out of every lane, and what it still waits for or why it is not."""

    drained: bool
    reason: str


class Draining:
    """Keeps ``drains/<node>`` as ``wanted`` says. It names our incarnation, so that a restart takes the wish back."""

    def __init__(self, job: Job) -> None:
        self._job, self.wanted = job, False
        self._log = structlog.get_logger().bind(job=job.job, node=job.node)

    async def publish(self) -> None:
        """Bring the record up to date. Raises StoreError."""
        job, key = self._job, f"drains/{self._job.node}"
        present = job.agreement.view.drains.get(job.node)
        wanted = Drain(job.node, job.membership.incarnation, REASON) if self.wanted else None
        if (present.value if present else None) == wanted or not job.membership.joined:
            return
        data, expected = (encode(wanted) if wanted else None), (present.revision if present else 0)
        if await job.agreement.write(key, data, expected, leased=wanted is not None):
            self._log.info("draining" if wanted else "drain_ended")

    def progress(self) -> Progress:
        """How far the drain is."""
        job = self._job
        told = job.agreement.view.drains.get(job.node)
        if told is None or told.value.incarnation != job.membership.incarnation:
            return Progress(False, f"{job.job} has not been told yet")
        named = [f"lane {replica} uses {', '.join(keys)}" for replica, keys in self._named()]
        return Progress(not named, f"{job.job}: {'; '.join(named) or 'no lane uses this node'}")

    def _named(self) -> Iterator[tuple[str, list[str]]]:
        """Lanes whose records name ranks of this node, and which."""
        for replica, lane in self._job.agreement.view.open_lanes().items():
            if keys := sorted({slot.key for slot in lane.ids.values() if slot.node == self._job.node}):
                yield replica, keys
