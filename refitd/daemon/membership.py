"""Our own records: who we are and which ranks are here. Rewritten at once when a rank or a mover comes or goes."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from refitd.config import Config
from refitd.daemon.wiring import versions
from refitd.epoch.codec import encode
from refitd.epoch.records import Claim, Member
from refitd.plan.version import PLANNER_VERSION

if TYPE_CHECKING:
    from refitd.daemon.job import Job
    from refitd.hook.session import Session


def boot_id() -> str:
    """The kernel's name for this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Membership:
    """Keeps ``members/<node>`` true, under our lease."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.incarnation = uuid.uuid4().hex
        self._boot, self._lock = boot_id(), lock_id(job.config)
        self._versions = asdict(versions())
        self._refused: set[str] = set()
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
        owns_devices = await self._claim_devices()
        await self._claim_ranks()
        record = self._record(owns_devices)
        if present is None or present.value != record:
            wrote = await agreement.write(key, encode(record), present.revision if present else 0, leased=True)
            if wrote and present is None:
                self._log.info("joined", incarnation=self.incarnation)

    def _record(self, owns_devices: bool) -> Member:
        """Who we are; without its devices a daemon has no ranks to offer."""
        job, node = self._job, self._job.config.node
        ranks = tuple(sorted(
            (rank.info() for rank in job.ranks.values() if rank.page.claim), key=lambda info: info.key
        ))  # fmt: skip
        shown = ranks if owns_devices else ()
        planners = (PLANNER_VERSION,)
        return Member(
            job.node, node.domain, job.own_address, self.incarnation, self._boot, planners, shown, self._lock,
            **self._versions, transport=job.config.data.transport,
        )  # fmt: skip

    async def _claim_ranks(self) -> None:
        """Note when each new process came, by the store's own clock: our picture may be old."""
        fresh = [rank for rank in self._job.ranks.values() if not rank.page.claim]
        if fresh:
            revision = await self._job.agreement.revision()
            for rank in fresh:
                if self._job.ranks.get(rank.key) is rank:
                    rank.page.claim = revision

    def lost_to(self, session: Session) -> str:
        """The node where a later process of a client's rank is registered; empty where it is the last one itself."""
        claim = session.page.claim if session.page else 0
        return self._job.agreement.view.later_on(session.key, self._job.node, claim)

    async def _take_over(self, other: Member, revision: int) -> None:
        """Remove the record of an earlier life of this daemon, if it surely is one.

        Whoever held the lock file that we hold is dead. Any other daemon of this name must go first: its record holds
        ours off, by its revision.
        """
        if (other.boot, other.lock) == (self._boot, self._lock):
            if await self._job.agreement.write(f"members/{self._job.node}", None, revision):
                self._log.info("took_over", dead=other.incarnation)
        else:
            why = "another daemon of this name holds the record: on another machine, or with another state folder"
            self._refuse("node_refused", other.incarnation, reason=why, address=other.address)

    async def _claim_devices(self) -> bool:
        """Whether every device that we are to work with is ours: one daemon of the job a device."""
        found = [await self._claim(device) for device in self._job.config.node.devices.split(",") if device]
        return all(found)

    async def _claim(self, device: str) -> bool:
        agreement, key = self._job.agreement, f"devices/{device.strip()}"
        claim, present = Claim(self._job.node, self.incarnation), agreement.view.devices.get(device.strip())
        if present and present.value == claim:
            return True
        if present and present.value.node != claim.node:
            why = f"{present.value.node} works with {device.strip()}"
            self._refuse("device_refused", present.value.incarnation, reason=why)
            return False
        return await agreement.write(key, encode(claim), present.revision if present else 0, leased=True)

    def _refuse(self, event: str, other: str, **facts: str) -> None:
        """Say once for each life of the other one why we do not join."""
        if other not in self._refused:
            self._refused.add(other)
            self._log.error(event, **facts)

    def _lease_lost(self) -> None:
        """We may have been taken for dead: come back as somebody new, so that nothing old is mistaken for us."""
        self._log.warning("new_incarnation", dead=self.incarnation, reason="the lease of the old one has ended")
        self.incarnation = uuid.uuid4().hex


def lock_id(config: Config) -> str:
    """Device and inode of the node's lock file, which this process holds; empty where there is none."""
    try:
        found = (Path(config.node.state_dir) / f"{config.node.name}.lock").stat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"
