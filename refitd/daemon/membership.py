"""Our own records: who we are and which ranks are here. Rewritten at once when a rank or a mover comes or goes."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from refitd.epoch.codec import encode
from refitd.epoch.records import Member
from refitd.plan.version import PLANNER_VERSION

if TYPE_CHECKING:
    from refitd.daemon.job import Job


def boot_id() -> str:
    """The kernel's name for this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Membership:
    """Keeps ``members/<node>`` true, under our lease."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.incarnation = uuid.uuid4().hex
        self._boot = boot_id()
        self._log = structlog.get_logger().bind(job=job.job, node=job.node)
        job.agreement.lost = self._lease_lost

    @property
    def joined(self) -> bool:
        """Whether the job knows this life of this daemon."""
        member = self._job.agreement.view.members.get(self._job.node)
        return self._job.agreement.alive and member is not None and member.value.incarnation == self.incarnation

    async def publish(self) -> None:
        """Join the job, or bring our record up to date. Raises StoreError."""
        job, agreement = self._job, self._job.agreement
        if not agreement.alive:
            await agreement.join()
        key = f"members/{job.node}"
        present = agreement.view.members.get(job.node)
        if present and present.value.incarnation != self.incarnation:
            await self._take_over(present.value, present.revision)
            return
        record = self._record()
        if present is None or present.value != record:
            wrote = await agreement.write(key, encode(record), present.revision if present else 0, leased=True)
            if wrote and present is None:
                self._log.info("joined", incarnation=self.incarnation)

    def _record(self) -> Member:
        job = self._job
        ranks = tuple(sorted((rank.info() for rank in job.ranks.values()), key=lambda info: info.key))
        domain = job.config.node.domain
        return Member(job.node, domain, job.own_address, self.incarnation, self._boot, (PLANNER_VERSION,), ranks)

    async def _take_over(self, other: Member, revision: int) -> None:
        """Remove the record of an earlier life of this daemon.

        Only one daemon of a node runs on a machine (the node's lock file says so), so a record of this boot is a dead
        one's. Any other must expire first.
        """
        if other.boot == self._boot:
            await self._job.agreement.write(f"members/{self._job.node}", None, revision)
            self._log.info("took_over", dead=other.incarnation)
        else:
            self._log.warning("node_name_taken", address=other.address, reason="another machine holds the record")

    def _lease_lost(self) -> None:
        """We may have been taken for dead: come back as somebody new, so that nothing old is mistaken for us."""
        self.incarnation = uuid.uuid4().hex
