"""Turning a lane on this node: revoke what was, plan anew, and have our movers connect."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from refitd.epoch.records import Lane
from refitd.errors import TransportError
from refitd.hook.memfd import create_document
from refitd.mover.handle import MoverHandle
from refitd.plan import Plan, Program, Rank, make_plan

if TYPE_CHECKING:
    from refitd.daemon.context import Context
    from refitd.daemon.lane import LaneDriver

REVOKE_SECONDS = 3.0


@dataclass
class Built:
    """A lane under one token, as our movers build it."""

    replica: str
    token: int
    plan: Plan
    handles: dict[str, MoverHandle]
    deadline: float
    waiting: set[str]
    verified: dict[str, list[int]] = field(default_factory=dict)
    stopped: dict[str, asyncio.Event] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)

    def program(self, key: str) -> Program:
        """What a rank does in the whole plan: the same in every attempt that has nothing to leave out."""
        if key not in self.programs:
            self.programs[key] = self.plan.program(key)
        return self.programs[key]

    @property
    def ready(self) -> bool:
        """Whether every mover of ours has warmed all its edges."""
        return not self.waiting

    def done(self, key: str) -> None:
        self.waiting.discard(key)

    def revoked(self, key: str, message: dict[str, Any]) -> None:
        self.verified[key] = list(message.get("verified") or [])
        self._stopped(key).set()

    def gone(self, key: str) -> None:
        """The mover died: it reads and writes nothing any more."""
        self._stopped(key).set()

    def _stopped(self, key: str) -> asyncio.Event:
        return self.stopped.setdefault(key, asyncio.Event())

    async def wait_stopped(self, key: str) -> None:
        await self._stopped(key).wait()


async def revoke_all(built: Built, log: Any) -> dict[str, list[int]]:
    """Stop our movers' work for a token: after this nobody here moves data for it (I5). What each had verified.

    A mover that does not answer in time is killed; its death is as good an answer.
    """
    for handle in built.handles.values():
        handle.send({"kind": "revoke", "lane": built.replica, "token": built.token})
    for key, handle in built.handles.items():
        ends = [asyncio.ensure_future(built.wait_stopped(key)), asyncio.ensure_future(handle.gone())]
        done, pending = await asyncio.wait(ends, timeout=REVOKE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for end in pending:  # or it would wait for as long as the mover lives
            end.cancel()
        if not done:
            log.warning("mover_killed", key=key, reason=f"no answer to revoke within {REVOKE_SECONDS:g} s")
            handle.kill()
            await handle.gone()
    return built.verified


async def sides(context: Context, lane: Lane) -> tuple[list[Rank], list[Rank], list[Rank]]:
    """Sources, members and neighbours of a lane for the planner. Raises TransportError for a slot that is gone.

    The members of a lane without sources hold what it is to reach: the plan takes them, under other names, as sources,
    and nothing of it is left to do.
    """
    sources, members, neighbours = [
        await context.plan_ranks(slots) for slots in (lane.sources, lane.members, lane.neighbours)
    ]
    own = [Rank(f"own:{rank.key}", rank.node, rank.domain, rank.layout) for rank in members]
    return sources or own, members, neighbours


async def build_lane(driver: LaneDriver) -> Built:
    """Plan the lane and tell our movers to connect. Raises PlanError, MismatchError, TransportError."""
    context, lane = driver.context, driver.lane
    assert lane is not None
    sources, members, neighbours = await sides(context, lane)
    began = time.monotonic()
    plan = make_plan(sources, members, neighbours, bucket_bytes=context.config.data.bucket_bytes)
    context.metrics.planned("whole", time.monotonic() - began)
    handles: dict[str, MoverHandle] = {}
    for slot in driver.my_slots():
        rank = context.ranks.get(slot.key)
        if rank is None or rank.mover is None:
            raise TransportError((slot.key, slot.key), "the rank or its mover went while the lane was planned")
        handles[slot.key] = rank.mover
    seconds = context.config.timeouts.build
    built = Built(driver.replica, driver.token, plan, handles, time.monotonic() + seconds, set(handles))
    places = {rank.key: rank.node for rank in (*sources, *members)}
    for key, handle in handles.items():
        _send_build(driver, built.program(key), handle, _edges(driver, places, key))
    return built


def _edges(driver: LaneDriver, places: dict[str, str], key: str) -> tuple[list[dict[str, Any]], list[str]]:
    """(edges to connect, sources to accept) of a rank: every pair that a remainder may use, not just today's."""
    lane = driver.lane
    assert lane is not None
    connect, accept = [], []
    for source in lane.sources:
        for member in lane.members:
            if places[source.key] == places[member.key]:
                continue
            if source.key == key:
                host, port = driver.context.address(member.node)
                connect.append({"dst": member.key, "host": host, "port": port})
            if member.key == key:
                accept.append(source.key)
    return connect, accept


def _send_build(
    driver: LaneDriver, program: Program, handle: MoverHandle, edges: tuple[list[dict[str, Any]], list[str]]
) -> None:
    context = driver.context
    proof = context.secret.edge(context.job, driver.replica, driver.token, handle.key)
    fd = create_document("refitd-program", program.to_bytes())
    try:
        message = {
            "kind": "build", "lane": driver.replica, "token": driver.token, "rank": handle.key, "job": context.job,
            "secret": proof, "connect": edges[0], "accept": edges[1], "timeout": context.config.timeouts.build,
        }  # fmt: skip
        if (rank := context.ranks.get(handle.key)) is not None and rank.device is not None:
            message["device"] = rank.device
        handle.send(message, [fd])
    finally:
        os.close(fd)
