"""Leading the job: one member at a time decides, and every write of it is fenced by its own leadership."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from refitd.config import Config
from refitd.daemon.coverage import Coverage
from refitd.epoch.codec import encode
from refitd.epoch.facts import Write
from refitd.epoch.identity import ByIdentity
from refitd.epoch.leader import decide
from refitd.epoch.patience import Limits, Patience
from refitd.epoch.records import Leader
from refitd.store import Compare, CreateRevision, ModRevision

if TYPE_CHECKING:
    from refitd.daemon.job import Job

MAX_ROUNDS = 6
SILENCE_SECONDS = 5.0
_SAID_ALOUD = ("lanes/", "generation", "parked/", "planner")


def limits(config: Config) -> Limits:
    """What the leader's clocks go by. A node has said nothing for too long when it should have built long ago."""
    job, timeouts = config.job, config.timeouts
    return Limits(
        timeouts.grace, job.join_debounce, job.join_limit, job.flaps, job.flap_window, job.park,
        timeouts.build + SILENCE_SECONDS, job.pause, job.ttl, job.max_dirty,
    )  # fmt: skip


def _anybody(_replica: str, _digests: Iterable[str]) -> bool:
    """Who has a layout that is not known here may hold whatever is needed."""
    return True


class Leading:
    """Campaigns for ``leader`` and, while it is ours, carries out what `decide` says."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._patience: Patience | None = None  # our clocks, while we lead
        self._quiet: tuple[int, bool] | None = None  # the picture for which nothing was left to decide
        self._digest_set: ByIdentity[Iterable[str], frozenset[str]] = ByIdentity(frozenset)
        self.ended = False  # the job is over, and its records are gone
        self._coverage = Coverage(job.known_layout)
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
        if not self.ours:
            self._patience = None
        for _round in range(MAX_ROUNDS):
            if not (self.ours and await self._read_all() and await self._decide()):
                return
            await asyncio.sleep(0)  # lanes that have something to do go first

    async def _read_all(self) -> bool:
        """Follow everything, as it stood when we had the lead; False where we have lost that meanwhile."""
        leader = self._job.agreement.view.leader
        assert leader is not None, "ours"
        await self._job.agreement.following.follow_all(leader.created)
        return self.ours

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
        return agreement.contact_seconds > self._job.config.store.lease_ttl + 2

    async def _decide(self) -> bool:
        """One round; False when there was nothing to write."""
        job, view = self._job, self._job.agreement.view
        settled, now = self._settled(), time.monotonic()
        if (view.changes, settled) == self._quiet and self._patience and now < self._patience.due:
            return False
        unknown = [slot for slot in view.slots().values() if not job.known_layout(slot.digest)]
        await job.learn_layouts(unknown)
        changes = view.changes
        self._patience = self._patience or Patience(limits(job.config))
        complete = all(job.known_layout(slot.digest) for slot in unknown)
        facts = self._patience.look(view, now, settled, self._covers if complete else _anybody)
        writes = decide(view, facts, self._covers)
        self.ended = facts.ended and not writes
        self._quiet = (changes, settled) if not writes and not unknown else None
        for write in writes:
            if not await self._carry_out(write):
                return False  # our picture is behind; the watch will wake us
        return bool(writes)

    async def _carry_out(self, write: Write) -> bool:
        """Write what was decided, if we still lead and nothing that it rests on has changed."""
        agreement = self._job.agreement
        leader = agreement.view.leader
        if (
            leader is None or not self.ours
        ):  # somebody may have followed us since the decision: theirs is no guard for us
            return False
        guards: list[Compare] = [CreateRevision(agreement.compare_path("leader"), leader.created)]
        guards += [ModRevision(agreement.compare_path(key), revision) for key, revision in write.guards]
        done = await agreement.write(write.key, write.data, write.expected, guards=guards)
        log = self._log.info if write.key.startswith(_SAID_ALOUD) else self._log.debug
        log("decided", key=write.key, reason=write.reason, done=done)
        kind, _, replica = write.key.partition("/")
        if done and kind in ("lanes", "refits"):
            self._job.poke_lane(replica)
        if not done:
            self._log.info("write_refused", key=write.key, reason="somebody else leads, or the records have changed")
        return done

    def _covers(self, replica: str, digests: Iterable[str]) -> bool:
        """Whether layouts hold between them what a replica needs; a replica whose layouts we lack waits."""
        needs = (info.digest for info in self._job.agreement.view.replicas().get(replica, {}).values())
        return self._coverage.holds(self._digest_set(digests), frozenset(needs))
