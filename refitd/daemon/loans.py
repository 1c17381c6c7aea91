"""Trainers' offers: shown to the job while they are open, ended with a reason, and answered with a report."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import structlog

from refitd.daemon.rank import LocalOffer, LocalRank
from refitd.epoch.codec import encode
from refitd.epoch.records import Offer, Offers, PubId, ReportRecord
from refitd.epoch.release import RELEASED, joined, loan
from refitd.epoch.reports import assess
from refitd.stamps import stamp
from refitd.store import ModRevision

if TYPE_CHECKING:
    from refitd.daemon.job import Job

KEEP_ASKED = 8
GATHER_SECONDS = 0.005  # for which the first offer of a step waits for those of the other ranks here: one write for all


class Loans:
    """Open offers of this node's trainer ranks, and reports that are still owed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._publications: dict[Offer, PubId] = {}
        self._quorums: dict[Offer, int] = {}
        self._ended: dict[Offer, str] = {}  # why those that were never published ended
        self._log = structlog.get_logger().bind(job=job.job, node=job.node)

    def open(self, rank: LocalRank, seq: int, step: int, word: int) -> None:
        """A trainer published: its memory is lent under loan word ``word``."""
        stamp("daemon.offer", rank.key)
        session = rank.session
        offer = Offer(rank.key, session.incarnation, session.group, seq, step)
        rank.offer = LocalOffer(offer, word, time.monotonic())
        rank.asked[seq] = offer
        for old in sorted(rank.asked)[:-KEEP_ASKED]:
            self._forget(rank.asked.pop(old))
        if self._all_offer(rank.session.group, step):
            self._job.poke()
        else:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._job.poke)

    def _all_offer(self, run: str, step: int) -> bool:
        """Whether every rank of a run that is registered here has an open offer of the step."""
        ranks = [rank for rank in self._job.ranks.values() if rank.trains and rank.session.group == run]
        return all(rank.offer is not None and rank.offer.offer.step == step for rank in ranks)

    def _forget(self, offer: Offer) -> None:
        self._publications.pop(offer, None)
        self._quorums.pop(offer, None)
        self._ended.pop(offer, None)

    def withdraw(self, rank: LocalRank, seq: int, reason: str) -> None:
        """The trainer took its memory back; it has changed its loan word before it said so."""
        if rank.offer and rank.offer.offer.seq == seq:
            self._log.info("offer_withdrawn", rank=rank.key, seq=seq, reason=reason)
            rank.offer = None
            self._job.poke()

    async def publish(self) -> None:
        """Bring ``offers/<node>`` up to date. Raises StoreError.

        Written only under the generation that we know of: a daemon or a trainer that slept through the end of its run
        is refused by the store, learns of the new run, and then by us.
        """
        agreement = self._job.agreement
        known = agreement.view.generation
        past = known.value.past if known else ()
        mine = [rank.offer.offer for rank in self._job.ranks.values() if rank.offer and rank.session.group not in past]
        record = Offers(tuple(sorted(mine, key=lambda offer: offer.key)))
        present = agreement.view.offers.get(self._job.node)
        if (present.value if present else Offers(())) != record and self._job.membership.joined:
            key = f"offers/{self._job.node}"
            guard = ModRevision(agreement.compare_path("generation"), agreement.view.revision_of("generation"))
            if not await agreement.write(key, encode(record), agreement.view.revision_of(key), True, [guard]):
                self._log.warning("offers_refused", reason="the generation, or our record, has changed meanwhile")

    def settle(self) -> None:
        """End the loans whose time has come, and send the reports that are there."""
        view = self._job.agreement.view
        for rank in self._job.ranks.values():
            for offer in rank.asked.values():
                publication = joined(view, offer)
                if publication and offer not in self._publications:
                    self._publications[offer] = publication
            if rank.offer:
                self._judge(rank, rank.offer)
            self._report(rank)

    def _judge(self, rank: LocalRank, local: LocalOffer) -> None:
        age, patience = time.monotonic() - local.since, self._job.config.timeouts.offer
        verdict = loan(self._job.agreement.view, local.offer, age, patience, local.planned)
        if verdict.planned and not local.planned:
            local.planned = True
            self._job.metrics.phase("offer", age)
            rank.session.event("planned", seq=local.offer.seq)
        if verdict.outcome:
            rank.offer = None
            session, seq = rank.session, local.offer.seq
            session.event("released", seq=seq, outcome=verdict.outcome, reason=verdict.reason)
            if verdict.outcome != RELEASED:
                self._ended[local.offer] = verdict.reason
                self._log.warning("offer_skipped", rank=rank.key, step=local.offer.step, reason=verdict.reason)
                self._job.metrics.refit("skipped")
            self._job.poke()

    def _report(self, rank: LocalRank) -> None:
        for seq, offer in list(rank.asked.items()):
            report = self._stored(offer)
            if report:
                del rank.asked[seq]
                self._forget(offer)
                rank.session.event("report", seq=seq, report=as_message(report))

    def _stored(self, offer: Offer) -> ReportRecord | None:
        publication = self._publications.get(offer)
        stored = self._job.agreement.view.reports.get(str(publication.revision)) if publication else None
        return stored.value if stored else None

    async def report(self, rank: LocalRank, seq: int, close: bool, quorum: int | None) -> dict[str, Any] | None:
        """The report of a publish, or None while it is open. ``close`` writes it as things stand. Raises StoreError."""
        offer = rank.asked.get(seq)
        if offer is None:
            return as_message(ReportRecord(0, 0, 0, (), {}, "nothing is known of this publish")) if close else None
        publication = self._publications.get(offer)
        if publication is None:
            why = f"it was never published: {self._ended[offer]}" if offer in self._ended else "it was never published"
            return as_message(ReportRecord(0, 0, offer.step, (), {}, why)) if close else None
        stored = self._stored(offer)
        view, why = self._job.agreement.view, f"{rank.key} stopped waiting"
        known = assess(view, publication, closed=why)
        if stored is None and (close or (quorum is not None and len(known.committed) >= quorum)):
            # Why a replica has not got it may stand in acks and offers that this node does not follow.
            whole = await self._job.agreement.following.picture() if known.missing else view
            await self._job.agreement.write(
                f"reports/{publication.revision}", encode(assess(whole, publication, closed=why)), 0
            )
            stored = self._stored(offer)
        return as_message(stored) if stored else None


def as_message(report: ReportRecord) -> dict[str, Any]:
    """A report as the hook carries it."""
    return {
        "generation": report.generation, "revision": report.revision, "step": report.step,
        "committed": list(report.committed), "missing": report.missing, "closed": report.closed,
    }  # fmt: skip
