"""One lane on this node: from the records' stage to commands for our movers and words for our clients.

Level-triggered: `step` compares the records, our movers' answers and our clients' words, and does what is missing. It
may run at any time and as often as anybody likes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from refitd.daemon.attempt import Attempt, Built
from refitd.daemon.calls import Calls
from refitd.daemon.committer import Committer
from refitd.daemon.context import Context
from refitd.daemon.counting import cause_of, outcome_of
from refitd.daemon.prepare import Preparer
from refitd.daemon.rank import LocalRank
from refitd.daemon.turn import build_lane, revoke_all
from refitd.daemon.voice import Failure, Voice
from refitd.daemon.wiring import NCCL
from refitd.epoch.records import Lane, PubId, Slot, SlotId
from refitd.epoch.stage import Stage, stage
from refitd.errors import MismatchError, PlanError, RefitdError, StoreError
from refitd.failpoints import PHASES, failpoint
from refitd.hook.messages import Ticket
from refitd.mover.handle import MoverHandle
from refitd.plan import Held
from refitd.stamps import stamp
from refitd.telemetry.history import Refit


class LaneDriver:
    """Drives one replica's lane on this node."""

    def __init__(self, context: Context, replica: str) -> None:
        self.context, self.replica = context, replica
        self.token = 0
        self.lane: Lane | None = None
        self.built: Built | None = None
        self.attempt: Attempt | None = None
        self.held: dict[str, Held] = {}
        self.publication: PubId | None = None
        self.calls = Calls(self)
        self._preparer = Preparer(self)
        self._committer = Committer(self)
        self._voice = Voice(self)
        self._phase_since = time.monotonic()
        self._connected_before = False
        self._stage = Stage("gone", None, "")
        self._passed: set[tuple[str, int, PubId]] = set()
        # An edge that fails the lane after its commit, and why it does.
        self._broken: tuple[tuple[str, ...], str] | None = None
        self._log = structlog.get_logger().bind(job=context.job, node=context.node, lane=replica)
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def poke(self) -> None:
        self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def prepared(self) -> PubId | None:
        """The publication that every rank of ours in the lane is ready for."""
        return self._preparer.prepared

    @property
    def stage_seconds(self) -> float:
        """How long the lane has been in its stage."""
        return time.monotonic() - self._phase_since

    def my_slots(self) -> list[SlotId]:
        """The lane's members and sources on this node."""
        lane = self.lane
        slots = (*(member.id for member in lane.members), *lane.sources) if lane else ()
        return [slot for slot in slots if slot.node == self.context.node]

    def my_members(self) -> list[LocalRank]:
        """Ranks of the replica on this node, as far as they are registered."""
        ranks = self.context.ranks
        return [ranks[slot.key] for slot in self._mine() if slot.key in ranks]

    def meant_members(self) -> list[LocalRank]:
        """As `my_members`, without processes that came since the lane turned: it is not about them."""
        return [self.context.ranks[slot.key] for slot in self._mine() if self.is_about(slot)]

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.step()
            except StoreError as error:
                self._log.warning("store_away", error=str(error))
                await asyncio.sleep(0.2)
            except (PlanError, MismatchError) as error:
                self.fail((), str(error), permanent=True)
            except RefitdError as error:
                self.fail((), str(error))
            except Exception:  # noqa: BLE001 - a bug: said aloud, and the lane tries again
                self._log.exception("lane_fault")
                await asyncio.sleep(1.0)

    async def step(self) -> None:
        """Do whatever the records and our own state call for now."""
        stored = self.context.agreement.view.lanes.get(self.replica)
        lane = stored.value if stored and self.context.node in stored.value.nodes else None
        token = stored.revision if stored else 0
        if token != self.token:
            await self._turn(lane, token)
        if self.lane is not None:
            self._enter(stage(self.context.agreement.view, self.replica))
            await self._act()
            if await self._voice.speak():
                self.poke()

    # Turning.

    async def _turn(self, lane: Lane | None, token: int) -> None:
        if self.built:
            for key, (number, verified) in (await revoke_all(self.built, self._log)).items():
                self._absorb(key, number, verified)
        self._interrupt(lane.reason if lane else "the lane does not use this node any more")
        before = self.lane
        self.token, self.lane, self.built, self.attempt, self._broken = token, lane, None, None, None
        self._preparer.reset()
        self._voice.reset()
        if lane is None:
            self.withdraw_ticket()
            return
        self.calls.turned(lane, token)
        self._log.info("lane_turned", token=token, reason=lane.reason)
        self.context.metrics.lane_turned(cause_of(before, lane, self.context.agreement.view.drains))
        if all(self.is_current(slot) for slot in self.my_slots()):
            self.built = await build_lane(self)

    def _interrupt(self, why: str) -> None:
        """Whatever phase the lane was in has come to nothing; where we failed ourselves, that was the reason."""
        if self._stage.name in PHASES and self._stage.publication and self._voice.failure is None:
            self.context.metrics.interrupted(self._refit(self._stage.publication), f"in {self._stage.name}: {why}")
        self._enter(Stage("gone", None, why))

    def withdraw_ticket(self, *kinds: str) -> None:
        """An engine that has not paused yet has no reason to any more. A ticket to apply that was taken stays.

        ``kinds``: of tickets; all, where none is given.
        """
        lead = self.context.ranks.get(f"engine/{self.replica}/0")
        if lead is None or lead.told is None or lead.receiving or (kinds and lead.told[0] not in kinds):
            return
        kind, _publication, token = lead.told
        taken = lead.page.taken
        if kind == "receive" or (kind == "apply" and (taken is None or taken.token != token)):
            lead.told = None
            lead.session.event("ticket", ticket=None)

    def is_about(self, slot: Slot) -> bool:
        """Whether our rank is the process that the lane means, with its layout: another one's memory has none of the
        bytes. The lane may be slow to turn: while the store is away, or the old records of a node that came anew stand.
        """
        rank = self.context.ranks.get(slot.key)
        return rank is not None and (rank.session.incarnation, rank.digest) == (slot.incarnation, slot.digest)

    def _mine(self) -> list[Slot]:
        return [slot for slot in self.lane.members if slot.node == self.context.node] if self.lane else []

    def is_current(self, slot: SlotId) -> bool:
        """Whether a rank of ours, with its mover, lives as the lane's record has it."""
        rank = self.context.ranks.get(slot.key)
        return bool(rank and rank.mover and rank.life == slot.mover)

    def _absorb(self, key: str, number: int, verified: list[int]) -> None:
        """Keep what a mover of ours had verified, so that no later attempt moves it again; it went with its process.

        ``number``: of its attempt. What it says of one before, under the same token, is of another publication.
        """
        attempt = self.attempt if self.attempt and self.attempt.publication.revision == number else None
        if not any(slot.key == key and self.is_about(slot) for slot in self._mine()):
            self.held.pop(key, None)
        elif attempt and verified and key in attempt.members:
            new = attempt.plan.held(key, verified)
            self.held[key] = self.held[key].union(new) if key in self.held else new

    # Acting on the stage.

    def _enter(self, now: Stage) -> None:
        if now[:2] != self._stage[:2]:
            stamp("stage", now.name)
            self._log.debug("stage", stage=now.name, publication=now.publication, reason=now.reason)
            declared = self._stage.name == "transfer" and self.attempt and self.attempt.declared
            self._time_phase("verify" if declared else self._stage.name, outcome_of(self._stage, now))
            if now.name == "committed" and now.publication:
                self._voice.committed()
                self.context.metrics.ended(self._refit(now.publication), "ok")
        self._stage = now
        if now.name == "committed" and self._broken:
            self.fail(*self._broken)

    def _time_phase(self, left: str, outcome: str) -> None:
        seconds, self._phase_since = self.stage_seconds, time.monotonic()
        if left in PHASES and self._stage.publication:
            self.context.metrics.phase(left, seconds, outcome, self._refit(self._stage.publication))

    def _refit(self, publication: PubId) -> Refit:
        return Refit(self.context.job, self.replica, *publication)

    async def _act(self) -> None:
        name, publication = self._stage.name, self._stage.publication
        if publication and publication != self.publication:
            self.publication, self.held = publication, {}
        if name == "prepare" and publication and self.built and self.built.ready:
            self._preparer.prepare(publication)
        elif name == "transfer" and publication and self.prepared == publication:
            await self._transfer(publication)
        elif name == "commit" and publication:
            await self._committer.commit(publication)
        elif name == "committed" and publication:
            await self._committer.committed(publication)
        elif name == "failed":
            self.withdraw_ticket("receive")  # there may be nothing to receive any more, and it would be dirty for that
        self._check_deadline()

    async def _transfer(self, publication: PubId) -> None:
        if self._voice.failure is not None:
            return  # it is to be said, not repeated; and what still arrives may be in memory that was taken back
        if self.attempt is None and self.lane and self.built:
            self.attempt = await Attempt.start(self, self.lane, self.built, publication)
        attempt, members = self.attempt, self.my_members()
        if attempt and attempt.verified and not attempt.declared and all(map(self.is_about, self._mine())):
            for rank in members:
                if not rank.fills(publication):  # the same process: it registered again, with memory that is empty
                    self.taken_back(rank, "has other memory than what was filled")
                    return
            self.pass_point("verify", publication)
            for rank in members:
                rank.complete = publication
                if rank.shadowed:
                    rank.page.set_shadow_publication(*publication)
                self.context.spread(rank.key, publication, whole=True)
            attempt.declared = True
            stamp("verified", self.replica)
            self.context.metrics.achieved(self.stage_seconds, attempt.received())
            self._time_phase("transfer", "ok")  # what is left of the stage is waiting until the others have verified

    def taken_back(self, rank: LocalRank, what: str = "took its memory back") -> None:
        """A receive was given up: whatever was said of that memory under this token is void."""
        if self.prepared is not None:
            self.fail((), f"{rank.key} {what}")

    def lends_anew(self, rank: LocalRank, publication: PubId) -> None:
        """Before a rank lends for a publication: where it had to lend nothing, as it held it, it is written again now.

        A lead may be told of a publication, and call its mates, before we hear of it: what came before is over, and
        nobody reads the memory for it unless our movers are at it.
        """
        name, over, _reason = self._stage
        if name not in ("prepare", "committed") or over is None or publication <= over:
            self.taken_back(rank, "lends what it held")

    def tell(self, rank: LocalRank, kind: str, publication: PubId) -> None:
        """Send a ticket to receive or to apply, or the ``commit`` of a receive; once under one token."""
        if rank.told == (kind, publication, self.token):
            return
        refit = self.context.agreement.view.refits[self.replica].value
        rank.told, rank.told_at = (kind, publication, self.token), time.monotonic()
        rank.step = refit.step
        rank.since = rank.since or publication
        stamp(f"told.{kind}", rank.key)
        sent = "receive" if kind == "commit" else kind
        ticket = Ticket(sent, self.context.job, self.replica, *publication, refit.step, self.token).to_json()
        if kind == "commit":
            rank.say("commit", ticket=ticket)
        else:
            rank.session.event("ticket", ticket=ticket)

    def succeeded(self) -> None:
        """A commit of ours is in the records."""
        self.context.metrics.refit("ok")

    def pass_point(self, name: str, publication: PubId) -> None:
        """A failpoint of the protocol, passed once for each attempt."""
        if (name, self.token, publication) not in self._passed:
            self._passed = {seen for seen in self._passed if seen[2] == publication}
            self._passed.add((name, self.token, publication))
            failpoint(name, role="daemon", node=self.context.node, lane=self.replica)

    # What goes wrong.

    def fail(self, edge: tuple[str, ...], reason: str, permanent: bool = False) -> None:
        """This token will not do; the leader reads it in our ack."""
        if self._voice.failure is None and self.lane is not None:
            failure = Failure(edge, reason, permanent)
            delay = self._voice.fail(failure)
            self._log.warning("lane_failed", edge=edge, reason=reason, token=self.token)
            refit = self._refit(self.publication) if self.publication else None
            self.context.metrics.refit("failed", refit, f"in {self._stage.name}: {failure}")
            asyncio.get_running_loop().call_later(delay, self.poke)
            self.poke()

    def _check_deadline(self) -> None:
        if self.built and self.context.agreement.away:  # a peer may not have heard of the token yet
            self.built.deadline = max(self.built.deadline, time.monotonic() + self.context.config.timeouts.build)
        if self.built and not self.built.ready and time.monotonic() > self.built.deadline:
            self.fail((), f"not built in time: {', '.join(sorted(self.built.waiting))}")

    # What movers say.

    def on_message(self, handle: MoverHandle, message: dict[str, Any]) -> None:
        """A mover's word about this lane."""
        if message.get("kind") in ("built", "revoked"):
            self._log.debug(message["kind"], rank=handle.key, token=message.get("token"))
        if message.get("token") != self.token or self.built is None:
            if self.built and message.get("kind") == "revoked":
                self.built.revoked(handle.key, message)
            return
        kind, key = message.get("kind"), handle.key
        if kind == "built":
            self.built.done(key)
            if self.built.ready:
                self._count_repair(self.built)
        elif kind == "revoked":
            self.built.revoked(key, message)
        elif kind == "failed":
            self._mover_failed(key, message)
        elif self.attempt:
            self.attempt.on_message(key, message)
            stamp(f"heard.{kind}", key)
            if kind == "done":
                self._log.debug("moved", rank=key, span=message.get("span"), first=message.get("first"))
        self.poke()

    def _count_repair(self, built: Built) -> None:
        """The lane is connected; for the first time, or again: TCP connects anew, NCCL makes a fresh communicator."""
        if self._connected_before:
            began = built.deadline - self.context.config.timeouts.build
            method = "init" if built.wiring.transport == NCCL else "reconnect"
            self.context.metrics.repaired(method, time.monotonic() - began)
        self._connected_before = True

    def _mover_failed(self, key: str, message: dict[str, Any]) -> None:
        number = int(message.get("attempt") or 0)
        if self.attempt and self.attempt.publication.revision == number:
            self.attempt.count(key, message)
        self._absorb(key, number, list(message.get("verified") or []))
        edge, reason = tuple(str(end) for end in message.get("edge") or ()), str(message.get("reason"))
        if number == 0 and self._verified:
            self._log.info("edge_ended", edge=edge, reason=reason, token=self.token)
            self._broken = edge, reason
        else:
            self.fail(edge, reason)

    @property
    def _verified(self) -> bool:
        """Whether our members have all their bytes, and a commit may rest on that, for which no edge is needed."""
        attempt = self.attempt
        return bool(attempt and attempt.declared and attempt.members) and self._stage.name in ("transfer", "commit")

    def mover_died(self, key: str) -> None:
        """A mover that this lane used is gone; the new member record turns the lane."""
        if self.built and key in self.built.handles:
            attempt = self.attempt
            self._absorb(key, *((attempt.publication.revision, attempt.last_verified(key)) if attempt else (0, [])))
            self.built.gone(key)
            self.poke()
