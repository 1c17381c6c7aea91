"""One execution of a plan under one token: what our movers run, and what they say of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from refitd.daemon.mount import mount
from refitd.daemon.rank import LocalRank
from refitd.daemon.turn import Built
from refitd.epoch.records import Lane, PubId
from refitd.epoch.release import published
from refitd.errors import TransportError
from refitd.hook.memfd import create_document
from refitd.plan import Bucket, Held, Plan, Program
from refitd.stamps import stamp
from refitd.telemetry.history import Refit

if TYPE_CHECKING:
    from refitd.daemon.lane import LaneDriver

__all__ = ["Attempt", "Built"]


class Attempt:
    """A running attempt. ``verified`` once every member rank of this node has verified all its planned bytes."""

    def __init__(self, driver: LaneDriver, lane: Lane, built: Built, plan: Plan, publication: PubId) -> None:
        self.plan, self.publication, self.declared = plan, publication, False
        self.members = {slot.key for slot in lane.members if slot.node == driver.context.node}
        self._driver, self._lane, self._built = driver, lane, built
        self._mates = {slot.key for slot in lane.members}
        program = built.program if plan is built.plan else plan.program
        self._programs: dict[str, Program] = {key: program(key) for key in built.handles}
        self._unfinished = set(built.handles)
        self._told_ready: set[tuple[str, str]] = set()
        self._verified: dict[str, list[int]] = {}
        self._counted: dict[tuple[str, str, str], int] = {}

    @classmethod
    async def start(cls, driver: LaneDriver, lane: Lane, built: Built, publication: PubId) -> Attempt:
        """Plan what is still missing and set our movers to it. Raises PlanError, TransportError."""
        held = await _all_held(driver, lane)
        plan = _remainder(driver, built.plan, held) if held else built.plan
        driver.context.metrics.attempt("remainder" if held else "whole")
        attempt = cls(driver, lane, built, plan, publication)
        orders = [attempt._order(key) for key in attempt._movers()]
        for key, message in orders:  # one right after the other: the slowest mover begins as early as the first
            attempt._run(key, message, resend=bool(held))
        attempt._spread_known()
        return attempt

    @property
    def verified(self) -> bool:
        return not self._unfinished & self.members

    def on_message(self, key: str, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if message.get("attempt") != self.publication.revision:
            return
        self.count(key, message)
        if kind == "progress":
            self._verified[key] = list(message.get("verified") or self._verified.get(key, []))
        elif kind == "done":
            self._verified[key] = list(message.get("verified") or [])
            self._unfinished.discard(key)
        if kind in ("landed", "done") and key in self.members and self._driver.is_current(self._lane.ids[key]):
            self._driver.context.spread(key, self.publication, whole=False)  # who is done may not have said "landed"

    def last_verified(self, key: str) -> list[int]:
        """Buckets that a mover had verified when it was last heard of."""
        return self._verified.get(key, [])

    def count(self, key: str, message: Mapping[str, Any]) -> None:
        """Add what a mover moved since its last message; its own numbers are totals of the attempt."""
        deltas: dict[str, dict[str, int]] = {"rx": {}, "tx": {}}
        for direction, links in deltas.items():
            for link, total in (message.get(direction) or {}).items():
                links[link] = total - self._counted.get((key, direction, link), 0)
                self._counted[key, direction, link] = total
        self._driver.context.counted(key, self.refit, deltas["rx"], deltas["tx"])

    @property
    def refit(self) -> Refit:
        """Which refit this is an attempt at."""
        return Refit(self._driver.context.job, self._driver.replica, *self.publication)

    def received(self) -> dict[str, int]:
        """Bytes that ranks of this node have brought in so far, by link."""
        total: dict[str, int] = {}
        for (_key, direction, link), nbytes in self._counted.items():
            if direction == "rx":
                total[link] = total.get(link, 0) + nbytes
        return total

    def arrivals(self) -> Iterator[tuple[Bucket, bool]]:
        """Every bucket that ranks of this node bring in, and whether it was verified when they were last heard of."""
        for key, program in self._programs.items():
            verified = set(self._verified.get(key, ()))
            yield from ((bucket, bucket.id in verified) for bucket in program.receives())

    def source_ready(self, source: str, whole: bool) -> None:
        """A rank on this node can be read: by lane mates what it brought in, by other lanes once it is whole."""
        if source in self._mates or whole:
            for key in self.members:
                self._ready(key, source)

    def _movers(self) -> list[str]:
        """Whom to set to it: sources first, which have work at once; those that send nothing need not hear of it."""
        working = [key for key, program in self._programs.items() if key in self.members or program.sends()]
        return sorted(working, key=self.members.__contains__)

    def _spread_known(self) -> None:
        for source, rank in self._driver.context.ranks.items():
            if not rank.trains and rank.readable(self.publication):
                self.source_ready(source, whole=True)

    def _ready(self, key: str, source: str) -> None:
        waits = any(b.stage == 1 and b.src == source for b in self._programs[key].receives())
        reader, rank = (self._driver.context.ranks.get(each) for each in (key, source))
        word = self._word_of(rank, mate=source in self._mates) if rank else None
        if not waits or reader is None or rank is None or word is None or (key, source) in self._told_ready:
            return  # a reader may have left, too: its lane will turn
        self._told_ready.add((key, source))
        mount(reader, rank, writable=False)
        self._built.handles[key].send({**self._head("ready"), "src": source, "word": word})

    def _word_of(self, rank: LocalRank, mate: bool) -> int | None:
        """A mate need not be whole: what the plan lets the others read of it has landed."""
        return rank.own_word if mate else rank.loan_word(self.publication)

    def _order(self, key: str) -> tuple[str, dict[str, Any]]:
        """What a mover is told to run, once all that it reads and writes is mounted."""
        ranks, program = self._driver.context.ranks, self._programs[key]
        own = ranks.get(key)
        if own is None:
            raise TransportError((key, key), "the rank went while its attempt was planned")
        if program.sends() or not own.trains:
            mount(own, own, writable=not own.trains)  # an engine serves today what it receives into tomorrow
        words = {key: own.own_word if key in self.members else self._source_word(own, key)}
        for source in {b.src for b in program.receives() if b.link == "peer" and b.stage == 0}:
            lender = ranks.get(source)
            if lender is None:
                raise TransportError((source, key), "the source is gone")
            words[source] = self._source_word(lender, key)
            mount(own, lender, writable=False)
        config = self._driver.context.config
        message = {
            **self._head("run"), "publication": list(self.publication), "words": words,
            "progress_timeout": config.timeouts.progress, "neighbour_timeout": config.timeouts.neighbour,
        }  # fmt: skip
        if config.data.verify == "reread":
            message["verify"] = "reread"
        return key, message

    def _run(self, key: str, message: dict[str, Any], resend: bool) -> None:
        handle = self._built.handles[key]
        stamp("run.sent", key)
        if not resend:
            handle.send(message)
            return
        fd = create_document("refitd-program", self._programs[key].to_bytes())
        try:
            handle.send(message, [fd])
        finally:
            os.close(fd)

    def _source_word(self, source: LocalRank, reader: str) -> int:
        """The loan word of a rank that is read from. Raises TransportError where it does not hold the publication.

        A trainer may have offered its next step since we prepared, while the records stood still: that word guards
        other weights.
        """
        word = source.loan_word(self.publication)
        if source.trains:
            view = self._driver.context.agreement.view
            offered = source.offer and published(view, source.offer.offer) == self.publication
            word = source.offer.word if source.offer and offered else None
        if word is None:
            raise TransportError((source.key, reader), "the source does not hold the publication any more")
        return word

    def _head(self, kind: str) -> dict[str, Any]:
        token, replica = self._built.token, self._driver.replica
        return {"kind": kind, "lane": replica, "token": token, "attempt": self.publication.revision}


async def _all_held(driver: LaneDriver, lane: Lane) -> dict[str, Held]:
    """What every member of the lane holds already, by its own node's ack; all nodes read the same acks."""
    held: dict[str, Held] = {}
    view = driver.context.agreement.view
    for slot in lane.members:
        ack = view.ack(driver.replica, slot.node)
        if digest := ack.held.get(slot.key) if ack else None:
            held[slot.key] = Held.from_bytes(await driver.context.blob(slot.node, digest))
    return held


def _remainder(driver: LaneDriver, whole: Plan, held: dict[str, Held]) -> Plan:
    began = time.monotonic()
    plan = whole.left(held)
    driver.context.metrics.planned("remainder", time.monotonic() - began)
    return plan
