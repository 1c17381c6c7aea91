"""Getting ready for a refit: engines lend writable memory, sources keep theirs still."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from refitd.daemon.rank import LocalRank
from refitd.epoch.records import Lane, PubId
from refitd.epoch.release import published
from refitd.plan import Held
from refitd.stamps import stamp

if TYPE_CHECKING:
    from refitd.daemon.lane import LaneDriver

APPLY_SECONDS = 30.0  # so long a shadow keeps what was to be applied, where a newer one is to take its place
CALL_SECONDS = 1.0  # so long a rank that is in a receive, or about to be, may take to lend


class Preparer:
    """The prepare phase of one lane on this node."""

    def __init__(self, driver: LaneDriver) -> None:
        self._driver = driver
        self.prepared: PubId | None = None
        self._since: tuple[PubId, float] | None = None  # what is prepared for under this token, and since when

    def reset(self) -> None:
        """A new token: everybody says it again."""
        self.prepared = self._since = None

    def prepare(self, publication: PubId) -> None:
        """Ask whom we have to ask; `prepared` is set once every rank of ours is ready for the publication."""
        driver = self._driver
        lane = driver.lane
        if lane is None:
            return
        if (source := self._withdrawn(publication)) is not None:
            driver.fail((), f"{source.key} took its offer back")
            return
        self._call(lane, publication)
        if self.prepared == publication:
            return
        if self.prepared is not None:
            self.prepared, driver.attempt = None, None
        ranks = driver.context.ranks
        mine = [slot for slot in driver.my_slots() if driver.is_current(slot)]
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
            stamp("prepared", driver.replica)
            self._stand_by()

    def _call(self, lane: Lane, publication: PubId) -> None:
        """Only a lead calls its mates, and who came anew waits for that call. Where somebody does not lend, a lead that
        holds the publication gets the ticket all the same, and whoever is in a receive that began before leaves it."""
        if self._since is None or self._since[0] != publication or self._driver.context.agreement.away:
            self._since = publication, time.monotonic()
        lead = self._driver.context.ranks.get(lane.lead.key)
        if lead and not lead.shadowed and time.monotonic() - self._since[1] > CALL_SECONDS:
            if lead.holds(publication):
                self._offer_ticket(lead, publication)
            self._driver.calls.judge(lead, publication)
        for rank in self._driver.my_members():
            asked = rank.receiving
            if asked and asked is not rank.sent_away and (why := self._driver.calls.void(rank)):
                rank.sent_away = asked
                self._send_away(rank, publication, why)

    def _stand_by(self) -> None:
        """The run comes once everybody is prepared: have movers on devices ready for it."""
        driver, built = self._driver, self._driver.built
        for rank in driver.my_members() if built is not None else ():
            if built is not None and rank.device is not None and rank.key in built.handles:
                built.handles[rank.key].send({"kind": "stand_by", "lane": driver.replica, "token": built.token})

    def _withdrawn(self, publication: PubId) -> LocalRank | None:
        """A trainer of ours that lends the newest publication no more, and nothing newer: who waits for it waits for
        nothing, and may hold something whole until it begins to."""
        driver = self._driver
        if publication != driver.context.agreement.view.newest:
            return None
        ranks = [driver.context.ranks[slot.key] for slot in driver.my_slots() if driver.is_current(slot)]
        return next((rank for rank in ranks if rank.trains and rank.offer is None), None)

    def _source_ready(self, rank: LocalRank, publication: PubId) -> bool:
        if not rank.trains:
            return rank.readable(publication)
        view = self._driver.context.agreement.view
        return bool(rank.offer and published(view, rank.offer.offer) == publication)

    def _member_ready(self, rank: LocalRank, publication: PubId) -> bool:
        if rank.readable(publication) or (rank.holds(publication) and not self._spreads(rank)):
            self._driver.held[rank.key] = self._whole(rank)
            return True
        return self._shadow_ready(rank, publication) if rank.shadowed else self._lent(rank, publication)

    def _spreads(self, rank: LocalRank) -> bool:
        """Whether mates are to be sent from its memory what has landed there."""
        built = self._driver.built
        return built is not None and bool(built.plan.program(rank.key).sends())

    def _whole(self, rank: LocalRank) -> Held:
        built = self._driver.built
        assert built is not None
        return built.plan.held(rank.key, [b.id for b in built.plan.program(rank.key).receives()])

    def _shadow_ready(self, rank: LocalRank, publication: PubId) -> bool:
        """The shadow is ours to fill; whoever still reads it learns from its loan word that it changes."""
        if rank.lent_for != publication:
            if not self._spoil(rank, publication):
                return False
            rank.fill(publication)
            self._driver.held.pop(rank.key, None)
        return rank.memory is not None

    def _spoil(self, rank: LocalRank, publication: PubId) -> bool:
        """Take a shadow's content away; whether that may be.

        What it holds and its rank does not serve yet may be about to be applied by all. Its shadow goes first, as
        the lead takes no ticket of what that does not hold; one that took its ticket before applies it, and so do the
        others. The lead and we each write our own word of its page before we read the other's.
        """
        held = PubId(*rank.page.shadow_publication)
        if held <= rank.served or not self._patient_for(APPLY_SECONDS):
            rank.spoil_shadow()
            return True
        took = self._lead_took(rank, publication)
        if took is None or took >= held:
            return False
        rank.spoil_shadow()
        if self._is_lead(rank) and rank.taken >= held:
            rank.page.set_shadow_publication(*held)
            return False
        return True

    def _is_lead(self, rank: LocalRank) -> bool:
        return self._driver.lane is not None and self._driver.lane.lead.key == rank.key

    def _patient_for(self, seconds: float) -> bool:
        return self._since is not None and time.monotonic() - self._since[1] < seconds

    def _lead_took(self, rank: LocalRank, publication: PubId) -> PubId | None:
        """The newest publication that the replica's lead serves, or whose ticket it has taken; None where it may still
        take another, as its shadow was not taken from it yet."""
        driver, lane = self._driver, self._driver.lane
        lead = driver.context.ranks.get(lane.lead.key) if lane else None
        if lead is not None:
            return max(lead.served, lead.taken) if lead is rank or lead.lent_for == publication else None
        ack = driver.context.agreement.view.ack(driver.replica, lane.lead.node) if lane else None
        if ack is None or (ack.token, ack.id) != (driver.token, publication):
            return None
        return PubId(*ack.lead)

    def _lent(self, rank: LocalRank, publication: PubId) -> bool:
        if rank.receiving is None:
            self._offer_ticket(rank, publication)
            return False
        if over := self._driver.calls.superseded(rank, publication):
            self._send_away(rank, publication, over)
            rank.receiving = None
            return False
        if rank.lent_for is None:
            rank.fill(publication)
            self._driver.held.pop(rank.key, None)
        if rank.lent_for != publication and not rank.relending:
            rank.relending = True
            rank.say("relend", reason="the publication was abandoned for a newer one")
        return rank.lent_for == publication and not rank.relending

    def _send_away(self, rank: LocalRank, publication: PubId, reason: str) -> None:
        """A receive has failed; its client lets go of the memory. A lead hears of its next ticket first, or it would
        take the old one again."""
        rank.told = None
        self._offer_ticket(rank, publication)
        rank.say("failed", reason=reason)

    def _offer_ticket(self, rank: LocalRank, publication: PubId) -> None:
        """The lead hears of the refit; the engine calls receive on every worker at its next step boundary."""
        lane = self._driver.lane
        if lane and lane.lead.key == rank.key:
            self._driver.tell(rank, "receive", publication)
