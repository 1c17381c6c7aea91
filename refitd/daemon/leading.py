"""Leading the job: one member at a time decides, and every write of it is fenced by its own leadership."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from refitd.epoch.codec import encode
from refitd.epoch.leader import decide, unpublished
from refitd.epoch.records import Leader
from refitd.errors import MismatchError, PlanError
from refitd.layout import Layout
from refitd.plan import Rank, make_plan
from refitd.store import CreateRevision

if TYPE_CHECKING:
    from refitd.daemon.job import Job

MAX_ROUNDS = 6


class Leading:
    """Campaigns for ``leader`` and, while it is ours, carries out what `decide` says."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._offered_since: float | None = None
        self._quiet = -1  # the picture (`View.changes`) for which nothing was left to decide
        self._coverage: dict[tuple[frozenset[str], frozenset[str]], bool] = {}
        self._log = structlog.get_logger().bind(job=job.job, node=job.node)

    @property
    def ours(self) -> bool:
        """Whether this life of this daemon leads."""
        leader = self._job.agreement.view.leader
        return bool(
            leader
            and leader.value.incarnation == self._job.membership.incarnation
            and leader.value.node == self._job.node
            and self._job.membership.joined
        )

    async def lead(self) -> None:
        """Campaign where nobody leads; decide until nothing is left to write. Raises StoreError."""
        job = self._job
        await self._bury_former_self()
        if job.agreement.view.leader is None and job.membership.joined:
            record = Leader(job.node, job.membership.incarnation)
            if await job.agreement.write("leader", encode(record), 0, leased=True):
                self._log.info("leads")
        job.metrics.leader(self.ours)
        for _round in range(MAX_ROUNDS):
            if not (self.ours and self._settled() and await self._decide()):
                return

    async def _bury_former_self(self) -> None:
        """An earlier life of this daemon led: nobody need wait for its lease, its node is ours now."""
        leader = self._job.agreement.view.leader
        if not leader or leader.value.node != self._job.node or not self._job.membership.joined:
            return
        if leader.value.incarnation != self._job.membership.incarnation:
            await self._job.agreement.write("leader", None, leader.revision)

    def _settled(self) -> bool:
        """After an outage of the store nobody is removed for being absent until everybody could have come back."""
        agreement = self._job.agreement
        return agreement.unbroken or agreement.contact_seconds > self._job.config.store.lease_ttl + 2

    async def _decide(self) -> bool:
        """One round; False when there was nothing to write."""
        job = self._job
        view = job.agreement.view
        if view.changes == self._quiet and self._offered_since is None:
            return False
        unknown = [slot for slot in view.slots().values() if not job.known_layout(slot.digest)]
        await job.learn_layouts(unknown)
        changes = view.changes
        writes = decide(view, self._grace_over(), self._covers)
        self._quiet = changes if not writes and not unknown else -1
        assert view.leader is not None
        fence = CreateRevision(job.agreement.compare_path("leader"), view.leader.created)
        for write in writes:
            done = await job.agreement.write(write.key, write.data, write.expected, guards=[fence])
            log = self._log.info if write.key.startswith(("lanes/", "generation")) else self._log.debug
            log("decided", key=write.key, reason=write.reason, done=done)
            if not done:
                return False  # our picture is behind; the watch will wake us
        return bool(writes)

    def _grace_over(self) -> bool:
        if not unpublished(self._job.agreement.view):
            self._offered_since = None
            return False
        self._offered_since = self._offered_since or time.monotonic()
        return time.monotonic() - self._offered_since > self._job.config.timeouts.grace

    def _covers(self, replica: str, digests: Iterable[str]) -> bool:
        """Whether layouts hold between them what a replica needs; a replica whose layouts we lack waits."""
        needs = [info.digest for info in self._job.agreement.view.replicas().get(replica, {}).values()]
        key = frozenset(digests), frozenset(needs)
        if key not in self._coverage:
            layouts = [[self._job.known_layout(digest) for digest in sorted(side)] for side in key]
            if any(layout is None for side in layouts for layout in side):
                return False
            self._coverage[key] = _plannable(*[[x for x in side if x] for side in layouts])
        return self._coverage[key]


def _plannable(sources: list[Layout], needs: list[Layout]) -> bool:
    """Whether every region has a holder. Sides that do not match at all count: their lane will say what is wrong."""
    try:
        make_plan(
            [Rank(f"s{i}", f"s{i}", f"s{i}", layout) for i, layout in enumerate(sources)],
            [Rank(f"d{i}", f"d{i}", f"d{i}", layout) for i, layout in enumerate(needs)],
        )
    except MismatchError:
        return True
    except PlanError:
        return False
    return True
