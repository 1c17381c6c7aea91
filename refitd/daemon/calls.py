"""Whether a receive that a rank is in can still end: who was called to it, and who has come anew since."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refitd.daemon.rank import NO_PUBLICATION, LocalRank
from refitd.epoch.records import Lane, PubId, Slot

if TYPE_CHECKING:
    from refitd.daemon.lane import LaneDriver

LEFT = "superseded: the replica's lead is not in that receive any more: take its next ticket"


class Calls:
    """The calls of one replica's lead, as far as this node can know of them."""

    def __init__(self, driver: LaneDriver) -> None:
        self._driver = driver
        self._lives: dict[str, str] = {}  # incarnations of members, as they were last seen
        self._anew: dict[str, int] = {}  # the token under which a member was first seen in its present life

    def turned(self, lane: Lane, token: int) -> None:
        """Remember who has come anew. Who sees the replica for the first time knows who had part in its last commit:
        another life of one of those began after it, and not before a daemon met it. Where there is none, everybody may
        have come anew; the worst that comes of it is one receive that is tried again."""
        view = self._driver.context.agreement.view
        commit = view.commits.get(self._driver.replica)
        before, since = self._lives, token
        if not before and commit:
            before, since = commit.value.incarnations, commit.value.token + 1
        for slot in lane.members:
            if before.get(slot.key) != slot.incarnation:
                owner = view.owner(slot.key)
                met = owner[1].claim if owner and owner[1].incarnation == slot.incarnation else 0
                self._anew[slot.key] = max(since, met)
        self._lives = self._lives | lane.incarnations

    def judge(self, lead: LocalRank, publication: PubId) -> None:
        """For the lead's node, where somebody does not lend: receives to which that one was not called, as its present
        life began after their ticket was given, are void. The lead's ack says so to the others."""
        lane, came = self._driver.lane, self._anew.get(lead.key, 0)
        called = lead.receiving.token if lead.receiving else came - 1
        for slot in lane.members if lane else ():
            if self._anew.get(slot.key, 0) > called >= 0 and not self._lends(slot, publication):
                lead.void = max(lead.void, called)

    def void(self, rank: LocalRank) -> str:
        """Why the lead's node takes the receive that a rank is in for void; empty where it does not."""
        lane, ticket = self._driver.lane, rank.receiving
        if lane is None or ticket is None:
            return ""
        lead = self._driver.context.ranks.get(lane.lead.key)
        ack = self._driver.context.agreement.view.ack(self._driver.replica, lane.lead.node)
        if ticket.token > (lead.void if lead else ack.void if ack else 0):
            return ""
        who = sorted(key for key, token in self._anew.items() if token > ticket.token)
        return f"{', '.join(who) or 'a rank'} came anew and was not called to this receive: take the next ticket"

    def _lends(self, slot: Slot, publication: PubId) -> bool:
        driver, here = self._driver, self._driver.context.ranks.get(slot.key)
        if here:
            return here.shadowed or here.receiving is not None or here.holds(publication)
        ack = driver.context.agreement.view.ack(driver.replica, slot.node)
        if ack is None or (ack.token, ack.id) != (driver.token, publication):
            return False
        return ack.phase in ("prepared", "verified")

    def lead_of_unapplied(self, publication: PubId) -> LocalRank | None:
        """A lead of ours that serves what a shadow of its replica holds and its rank does not serve yet: that one came
        anew after the lead had switched, as the commit is of a later token than the ticket by which the lead did."""
        driver, lane = self._driver, self._driver.lane
        lead = driver.context.ranks.get(lane.lead.key) if lane else None
        if lane is None or lead is None or not lead.shadowed or lead.served != publication:
            return None
        view = driver.context.agreement.view
        commit = view.commits.get(driver.replica)
        if commit is None or commit.value.token <= lead.page.token:
            return None
        acks = [view.ack(driver.replica, node) for node in lane.member_nodes]
        behind = any(ack is not None and PubId(*ack.served) < publication for ack in acks)
        return lead if behind else None

    def superseded(self, rank: LocalRank, publication: PubId) -> str:
        """Why the receive that a rank is in will never end, as its replica is not in it; empty where it may end."""
        lane, asked = self._driver.lane, rank.receiving
        if lane is None or asked is None:
            return ""
        before = PubId(asked.generation, asked.revision)
        if before >= publication:
            return ""
        if lane.lead.key != rank.key:
            return LEFT if before <= self._lead_left(lane) else ""
        if why := self._of_another_life(rank, before) or self._alone(lane, before):
            rank.left = max(rank.left, before)
            return f"superseded: {why}, {tuple(publication)} is next: take its ticket"
        return ""

    def _lead_left(self, lane: Lane) -> PubId:
        """The newest publication whose receive the lead has left; it cannot call the next while others are in it."""
        ack = self._driver.context.agreement.view.ack(self._driver.replica, lane.lead.node)
        lead = self._driver.context.ranks.get(lane.lead.key)
        return max(lead.served, lead.left) if lead else PubId(*ack.lead) if ack else NO_PUBLICATION

    @staticmethod
    def _of_another_life(rank: LocalRank, before: PubId) -> str:
        """A lead that asks with a ticket of an earlier life of its rank: the others have done what that one said, or
        wait for orders. While it is in that receive it can give none, and would wait until its time is over. The same
        where it was told to leave, and took that ticket again: the others do not stay."""
        if before <= rank.left:
            return f"its lead has left {tuple(rank.left)}"
        return "" if rank.since is not None and rank.since <= before else f"it never had a ticket of {tuple(before)}"

    def _alone(self, lane: Lane, before: PubId) -> str:
        """A lead that has come back and receives what another rank serves already: that one need not be in the receive,
        so it cannot lend for the next publication before the lead has called it to that."""
        view, ranks = self._driver.context.agreement.view, self._driver.context.ranks
        for slot in lane.members:
            ack, here = view.ack(self._driver.replica, slot.node), ranks.get(slot.key)
            ahead = here.served if here else PubId(*ack.ahead) if ack else NO_PUBLICATION
            if ahead >= before:
                return f"{slot.key if here else slot.node} serves {tuple(ahead)} already"
        return ""
