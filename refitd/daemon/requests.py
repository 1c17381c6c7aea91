"""What clients ask for, carried out on the job's ranks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog

from refitd.daemon.data import digest_of
from refitd.daemon.job import Job
from refitd.daemon.path import choose, compute_mode
from refitd.daemon.rank import NO_PUBLICATION, LocalRank, lent_memory, shadow_memory
from refitd.daemon.status import whole_status
from refitd.epoch.records import PubId, check_name
from refitd.errors import InputError, LayoutError, Refused
from refitd.hook.memfd import read_document
from refitd.hook.messages import ADMIN, ENGINE, HOST_SHADOW, SHADOWS, TRAINER, Ticket
from refitd.hook.server import Answer, Fds, Session
from refitd.hook.wire import Message
from refitd.layout import Layout
from refitd.mover.thread_handle import ClientHost
from refitd.stamps import stamp

if TYPE_CHECKING:
    from refitd.daemon.app import Daemon

Method = Callable[[Session, Message, Fds], Awaitable[Answer]]
NOTHING: Answer = ({}, ())
MOVER_SECONDS = 9.0


class Requests:
    """The hook's handler."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._log = structlog.get_logger().bind(node=daemon.config.node.name)
        self._methods: dict[str, Method] = {
            "register": self._register, "publish": self._publish, "withdraw": self._withdraw,
            "report": self._report, "receive": self._receive, "relent": self._relent,
            "committed": self._committed, "applied": self._applied, "release": self._release,
            "status": self._status, "pause": self._pause, "resume": self._resume, "limit": self._limit,
            "drain": self._drain,
        }  # fmt: skip

    # refitd.hook.server.Handler

    def connected(self, session: Session) -> None:
        """Let a client in unless another process speaks for its rank: one that lives, as far as the kernel knows."""
        if session.side != ADMIN:
            for field, name in (("job", session.job), ("group", session.group)):
                check_name(field, name)
            self._claim(session)

    def _claim(self, session: Session) -> None:
        for other in self._daemon.hook.sessions:
            if other.side == ADMIN or (other.job, other.key) != (session.job, session.key) or other.closed:
                continue
            if other.hung_up:  # a supervisor may be quicker with the next process than we with the news of the last one
                other.close("the client closed the connection")
                continue
            if other.incarnation != session.incarnation:
                raise Refused("rank", f"{session.key} to be free", f"process {other.pid} speaks for it")
            other.close("the same client connected again")

    def disconnected(self, session: Session, reason: str) -> None:
        """End of the registration."""
        job = self._daemon.jobs.get(session.job)
        if job and session.side != ADMIN:
            self._log.info("client_gone", job=session.job, rank=session.key, reason=reason)
            job.remove_rank(session)

    async def request(self, session: Session, message: Message, fds: Fds) -> Answer:
        """Answer one request. Raises InputError for what is wrong with it."""
        method = self._methods.get(message["method"])
        if method is None:
            raise Refused("method", "one that this daemon carries out", message["method"])
        return await method(session, message, fds)

    # Both sides.

    async def _register(self, session: Session, message: Message, fds: Fds) -> Answer:
        wanted = TRAINER if session.side == TRAINER else "in_place, host_shadow or device_shadow"
        if (session.side == TRAINER) != (message["mode"] == TRAINER) or session.side == ADMIN:
            raise Refused("mode", wanted, message["mode"])
        data = read_document(fds[0], "layout")
        layout = _with_keep(Layout.from_bytes(data), message["keep"])
        layout.check(session.key)
        data = layout.to_bytes()
        assert session.page is not None
        asked, configured = message.get("path"), self._daemon.config.data.path
        mode = await compute_mode(asked, message.get("device"))
        path = choose(asked, configured, session.pid > 0, mode)
        job = self._daemon.job(session.job)
        if node := job.membership.lost_to(session):
            raise Refused("rank", f"{session.key} to be free", f"a later process speaks for it on {node}")
        self._check_group(job, session, layout, message["mode"])
        rank = LocalRank(session, layout, digest_of(data), message["mode"], session.page)
        if message["mode"] == HOST_SHADOW:
            rank.set_memory(shadow_memory(layout, fds.take(1)))
        elif message.get("shadow") is not None:
            with contextlib.closing(Fds(fds.take_between(1, len(fds) - ("path" in message)))) as rest:
                rank.set_memory(lent_memory(layout, layout.kept, message["shadow"], rest))
        state = message["state"]
        rank.step = state["step"] if state else 0
        rank.since = NO_PUBLICATION if state else None  # who serves or is in a receive may have tickets of old daemons
        rank.device, rank.path = message.get("device"), path
        if "path" in message:
            rank.host = ClientHost(fds.take(len(fds) - 1))
        job.add_rank(rank, data)
        self._log.info(
            "registered", job=session.job, rank=rank.key, mode=rank.mode, layout=rank.digest, pid=session.pid,
            path=path.path, path_why=path.reason,
        )  # fmt: skip
        return {"digest": rank.digest, "path": path.path, "path_why": path.reason}, ()

    def _check_group(self, job: Job, session: Session, layout: Layout, mode: str) -> None:
        """Refuse what contradicts other ranks of the same group that are known here: world, shapes, shadow or none."""
        for other in job.ranks.values():
            if other.session.side != session.side or other.session.group != session.group:
                continue
            if other.key != session.key and other.session.world != session.world:
                raise Refused("world", f"{other.session.world} as {other.key} says", str(session.world))
            if other.key != session.key and (mode in SHADOWS) != other.shadowed:
                raise Refused("mode", f"{other.mode} as {other.key} says, or a like one", mode)
            differing = [
                InputError(f"{name}: {session.key} and {other.key}", str(other.layout.tensors[name]), str(spec))
                for name, spec in layout.tensors.items()
                if other.layout.tensors.get(name, spec)[0] != spec[0]
            ]
            if differing:
                raise LayoutError(differing)

    def _rank(self, session: Session, side: str) -> tuple[Job, LocalRank]:
        if session.side != side:
            raise Refused("side", side, session.side)
        job = self._daemon.job(session.job)
        rank = job.ranks.get(session.key)
        if rank is None or rank.session is not session:
            raise Refused("register", "a registered layout", "none yet")
        return job, rank

    # Trainers.

    async def _publish(self, session: Session, message: Message, fds: Fds) -> Answer:
        job, rank = self._rank(session, TRAINER)
        if message["memory"] is not None:
            rank.set_memory(lent_memory(rank.layout, rank.layout.kept, message, fds))
        if rank.memory is None:
            raise Refused("memory", "storages with the first publish", "null")
        job.loans.open(rank, message["seq"], message["step"], message["word"])
        return NOTHING

    async def _withdraw(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        job, rank = self._rank(session, TRAINER)
        job.loans.withdraw(rank, message["seq"], message["reason"])
        return NOTHING

    async def _report(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        job, rank = self._rank(session, TRAINER)
        report = await job.loans.report(rank, message["seq"], message["close"], message["min_replicas"])
        return {"report": report}, ()

    # Engines.

    async def _receive(self, session: Session, message: Message, fds: Fds) -> Answer:
        job, rank = self._rank(session, ENGINE)
        ticket = self._check_ticket(session, message["ticket"])
        if rank.shadowed:
            raise Refused("receive", "an in_place rank", rank.mode)
        await self._await_mover(rank)
        if lane := job.lanes.get(session.group):
            lane.lends_anew(rank, PubId(ticket.generation, ticket.revision))
        rank.set_memory(lent_memory(rank.layout, rank.layout.kept, message, fds))
        rank.receiving, rank.lent_word, rank.told = ticket, message["word"], None
        rank.loan, rank.switched = rank.lent_word, NO_PUBLICATION
        stamp("lent", rank.key)
        rank.fill(None)
        job.poke_lane(session.group)
        return {}, _pidfd(rank)

    async def _await_mover(self, rank: LocalRank) -> None:
        """Movers start in a moment; an engine that lends should not have to ask twice."""
        deadline = time.monotonic() + MOVER_SECONDS
        while rank.mover is None:
            if time.monotonic() > deadline:
                raise Refused("receive", f"a mover within {MOVER_SECONDS:g} s", "none")
            await asyncio.sleep(0.01)

    async def _relent(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        job, rank = self._rank(session, ENGINE)
        rank.lent_word = message["word"]
        rank.fill(None)
        job.poke_lane(session.group)
        return {}, _pidfd(rank)

    async def _committed(self, session: Session, message: Message, fds: Fds) -> Answer:
        """A client took the ticket; for the lead this was the point of no return."""
        del fds
        stamp("taken", session.key)
        job, rank = self._rank(session, ENGINE)
        ticket = self._check_ticket(session, message["ticket"])
        rank.step = ticket.step
        if not rank.shadowed:
            rank.receiving, rank.switched = None, PubId(ticket.generation, ticket.revision)
            rank.fill(None)
        job.poke_lane(session.group)
        return NOTHING

    async def _applied(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        job, rank = self._rank(session, ENGINE)
        rank.step = self._check_ticket(session, message["ticket"]).step
        if rank.told_at:
            job.metrics.phase("apply", time.monotonic() - rank.told_at)
        job.poke_lane(session.group)
        return NOTHING

    async def _release(self, session: Session, message: Message, fds: Fds) -> Answer:
        """Weights are about to be moved, or a receive was given up: our movers let go of the memory first."""
        del fds, message
        if session.side == TRAINER:
            return await self._release_trainer(session)
        job, rank = self._rank(session, ENGINE)
        lane = job.lanes.get(session.group)
        if lane and (rank.receiving or rank.filling):
            lane.taken_back(rank)
        if not rank.shadowed:
            rank.receiving, rank.told = None, None
            rank.fill(None)
        rank.forget_memory()  # first: no other lane may have it mapped anew meanwhile
        if rank.shadowed and rank.memory is None:
            rank.spoil_shadow()
            rank.fill(None)
        await job.movers.unmap(rank)
        job.poke()
        return NOTHING

    async def _release_trainer(self, session: Session) -> Answer:
        job, rank = self._rank(session, TRAINER)
        if rank.offer:
            job.loans.withdraw(rank, rank.offer.offer.seq, "the trainer released its memory")
        rank.close()  # first: no lane may have it mapped anew meanwhile
        await job.movers.unmap(rank)
        return NOTHING

    def _check_ticket(self, session: Session, value: Any) -> Ticket:
        ticket = Ticket.from_json(value)
        if (ticket.job, ticket.replica) != (session.job, session.group):
            raise Refused("ticket", f"one of {session.job}/{session.group}", f"{ticket.job}/{ticket.replica}")
        if PubId(ticket.generation, ticket.revision) <= NO_PUBLICATION:
            raise Refused("ticket", "a publication", "none")
        return ticket

    # People.

    async def _status(self, session: Session, message: Message, fds: Fds) -> Answer:
        del session, message, fds
        return await whole_status(self._daemon), ()

    async def _pause(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        _require_admin(session)
        return await self._daemon.orders.pause(message["job"], message["reason"]), ()

    async def _resume(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        _require_admin(session)
        return await self._daemon.orders.resume(message["job"]), ()

    async def _limit(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        _require_admin(session)
        return await self._daemon.orders.limit(message["job"], message["rate"]), ()

    async def _drain(self, session: Session, message: Message, fds: Fds) -> Answer:
        del fds
        _require_admin(session)
        return self._daemon.orders.drain(message["cancel"]), ()


def _require_admin(session: Session) -> None:
    """Orders come from people, over a connection that does nothing else."""
    if session.side != ADMIN:
        raise Refused("side", ADMIN, session.side)


def _pidfd(rank: LocalRank) -> list[int]:
    """What the client waits for before it lends its memory to anybody else."""
    return [rank.mover.pidfd] if rank.mover else []


def _with_keep(layout: Layout, keep: list[str]) -> Layout:
    if set(keep) <= set(layout.keep):
        return layout
    patterns = dict.fromkeys([*layout.keep, *keep])
    return Layout.from_pieces(layout.tensors, layout.storages, layout.pieces(), patterns, layout.tied)
