"""The end of a refit on this node: the lead takes the ticket, the commit is written, and all other ranks hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from refitd.daemon.prepare import CALL_SECONDS
from refitd.daemon.rank import LocalRank
from refitd.epoch.codec import encode
from refitd.epoch.records import Commit, Lane, PubId, Slot
from refitd.store import Compare, ModRevision

if TYPE_CHECKING:
    from refitd.daemon.lane import LaneDriver

MOST_GUARDS = 120  # acks that a commit compares: a transaction of etcd's has at most 128 compares


class Committer:
    """The commit of one lane, as far as it is this node's to write, to tell or to take back."""

    def __init__(self, driver: LaneDriver) -> None:
        self._driver, self._key = driver, f"commits/{driver.replica}"
        context = driver.context
        self._log = structlog.get_logger().bind(job=context.job, node=context.node, lane=driver.replica)

    async def commit(self, publication: PubId) -> None:
        """Every member has verified: hand the ticket to the lead's hook, and report once it was taken."""
        driver, lane = self._driver, self._driver.lane
        lead = driver.context.ranks.get(lane.lead.key) if lane and lane.lead.node == driver.context.node else None
        if lane is None or lead is None or not driver.is_about(lane.lead) or not all(map(self._alive, lane.members)):
            return
        if lead.served == publication or (lead.shadowed and lead.taken == publication):
            await self.report(lane, publication)
            return
        if not all(rank.holds(publication) for rank in driver.my_members()):
            return  # one took its memory back since: our word is about to be withdrawn
        driver.pass_point("commit", publication)
        driver.tell(lead, "apply" if lead.shadowed else "commit", publication)

    def _alive(self, slot: Slot) -> bool:
        return self._driver.context.agreement.view.slots().get(slot.key) == slot

    async def report(self, lane: Lane, publication: PubId) -> None:
        """Write the commit that the lead has made; it holds only as long as all on which it rests."""
        driver, agreement = self._driver, self._driver.context.agreement
        refit = agreement.view.refits[driver.replica].value
        commit = Commit(*publication, refit.step, driver.token, lane.incarnations, refit.number)
        rests_on = [f"acks/{driver.replica}/{node}" for node in lane.member_nodes[:MOST_GUARDS]]
        guards: list[Compare] = [self._token()]
        guards += [ModRevision(agreement.compare_path(ack), agreement.view.revision_of(ack)) for ack in rests_on]
        if await agreement.write(self._key, encode(commit), agreement.view.revision_of(self._key), guards=guards):
            self._log.info("committed", publication=publication, step=refit.step)
            driver.succeeded()
            await self.committed(publication)  # the other ranks wait for it: before anybody tidies up

    def _token(self) -> Compare:
        agreement = self._driver.context.agreement
        return ModRevision(agreement.compare_path(f"lanes/{self._driver.replica}"), self._driver.token)

    async def committed(self, publication: PubId) -> None:
        """Have every rank of ours learn of the commit; where one cannot any more, take it back."""
        driver = self._driver
        lead = driver.calls.lead_of_unapplied(publication) or self._lead_without_ticket(publication)
        if lead is None:
            driver.withdraw_ticket()  # of a lead that had it already, and was to call its mates
        elif driver.stage_seconds > CALL_SECONDS:
            driver.tell(lead, "apply", publication)
        for rank in driver.meant_members():
            if rank.receiving and rank.holds(publication):
                driver.tell(rank, "commit", publication)
            elif rank.lost(publication):
                await self.void(rank, publication)

    def _lead_without_ticket(self, publication: PubId) -> LocalRank | None:
        """A lead of ours that does not serve what its shadow holds: it may have dropped a ticket that it had taken, as
        its shadow was empty for a while. One that is only slow has it already, and does nothing about another."""
        lane = self._driver.lane
        lead = next((rank for rank in self._driver.meant_members() if lane and rank.key == lane.lead.key), None)
        waits = lead is not None and lead.shadowed and lead.served < publication and lead.holds(publication)
        return lead if waits else None

    async def void(self, rank: LocalRank, publication: PubId) -> None:
        """A rank took its memory back before it heard of the commit: the replica has not got it, and must get it again.

        Our ack must stop saying that everything is verified first, or the commit would only be reported again.
        """
        driver, agreement = self._driver, self._driver.context.agreement
        ack, commit = (
            agreement.view.ack(driver.replica, driver.context.node),
            agreement.view.commits.get(driver.replica),
        )
        if commit is None or commit.value.id != publication:
            return
        if ack and ack.token == driver.token and ack.phase in ("prepared", "verified"):
            driver.taken_back(rank)
        elif await agreement.write(self._key, None, commit.revision, guards=[self._token()]):
            self._log.warning("commit_void", rank=rank.key, reason="it took its memory back before it heard of it")
