"""Getting ready for a refit: engines lend writable memory, sources keep theirs still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refitd.daemon.rank import NO_PUBLICATION, LocalRank
from refitd.epoch.records import PubId
from refitd.epoch.release import published
from refitd.plan import Held

if TYPE_CHECKING:
    from refitd.daemon.lane import LaneDriver


class Preparer:
    """The prepare phase of one lane on this node."""

    def __init__(self, driver: LaneDriver) -> None:
        self._driver = driver
        self.prepared: PubId | None = None

    def reset(self) -> None:
        """A new token: everybody says it again."""
        self.prepared = None

    def prepare(self, publication: PubId) -> None:
        """Ask whom we have to ask; `prepared` is set once every rank of ours is ready for the publication."""
        driver = self._driver
        lane = driver.lane
        if self.prepared == publication or lane is None:
            return
        if self.prepared is not None:
            self.prepared, driver.attempt = None, None
        ranks = driver.context.ranks
        mine = [slot for slot in driver.my_slots() if slot.key in ranks]
        members = {slot.key for slot in lane.members}
        ready = [
            self._member_ready(ranks[slot.key], publication)
            if slot.key in members
            else self._source_ready(ranks[slot.key], publication)
            for slot in mine
        ]
        if all(ready) and len(mine) == len(driver.my_slots()):
            driver.pass_point("prepare", publication)
            self.prepared = publication

    def _source_ready(self, rank: LocalRank, publication: PubId) -> bool:
        if not rank.trains:
            return rank.holds(publication)
        view = self._driver.context.agreement.view
        return bool(rank.offer and published(view, rank.offer.offer) == publication)

    def _member_ready(self, rank: LocalRank, publication: PubId) -> bool:
        if rank.holds(publication):
            self._driver.held[rank.key] = self._whole(rank)
            return True
        return self._shadow_ready(rank, publication) if rank.shadowed else self._lent(rank, publication)

    def _whole(self, rank: LocalRank) -> Held:
        built = self._driver.built
        assert built is not None
        return built.plan.held(rank.key, [b.id for b in built.plan.program(rank.key).receives()])

    def _shadow_ready(self, rank: LocalRank, publication: PubId) -> bool:
        """The shadow is ours to fill; whoever still reads it learns from its loan word that it changes."""
        if rank.lent_for != publication:
            rank.page.shadow_loan_word += 1
            rank.page.set_shadow_publication(0, 0)
            rank.fill(publication)
            self._driver.held.pop(rank.key, None)
        return rank.memory is not None

    def _lent(self, rank: LocalRank, publication: PubId) -> bool:
        if rank.receiving is None:
            self._offer_ticket(rank, publication)
            return False
        if self._left_behind(rank, publication):
            rank.receiving, rank.told = None, None
            rank.session.event("failed", reason="the replica's lead has that commit already: take its next ticket")
            return False
        if rank.lent_for is None:
            rank.fill(publication)
            self._driver.held.pop(rank.key, None)
        if rank.lent_for != publication and not rank.relending:
            rank.relending = True
            rank.session.event("relend", reason="the publication was abandoned for a newer one")
        return rank.lent_for == publication and not rank.relending

    def _left_behind(self, rank: LocalRank, publication: PubId) -> bool:
        """Whether the rank missed a commit that its lead heard, and the lane goes for a newer publication.

        The lead is not in that receive any more, and cannot call the next one while this rank is.
        """
        driver, asked = self._driver, rank.receiving
        lane = driver.lane
        if lane is None or asked is None or lane.lead.key == rank.key:
            return False
        before = PubId(asked.generation, asked.revision)
        ack = driver.context.agreement.view.ack(driver.replica, lane.lead.node)
        lead = driver.context.ranks.get(lane.lead.key)
        served = lead.served if lead else PubId(*ack.lead) if ack else NO_PUBLICATION
        return before < publication and before <= served

    def _offer_ticket(self, rank: LocalRank, publication: PubId) -> None:
        """The lead hears of the refit; the engine calls receive on every worker at its next step boundary."""
        driver = self._driver
        lane = driver.lane
        ticket = driver.ticket("receive", publication)
        if lane and lane.lead.key == rank.key and rank.told != (ticket.kind, publication, driver.token):
            driver.tell(rank, ticket)
