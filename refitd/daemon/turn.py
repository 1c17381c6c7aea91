"""Turning a lane on this node: revoke what was, plan anew, and have our movers connect."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from refitd.daemon.wiring import NCCL, Wiring, group_of, host_of, wiring
from refitd.epoch.records import Lane
from refitd.errors import CommunicatorError, TransportError
from refitd.hook.memfd import create_document
from refitd.mover.handle import MoverHandle
from refitd.plan import Plan, Program, Rank, make_plan

if TYPE_CHECKING:
    from refitd.daemon.context import Context
    from refitd.daemon.lane import LaneDriver

REVOKE_SECONDS = 3.0
UNWIRED = Wiring("", "not built yet")


@dataclass
class Built:
    """A lane under one token, as our movers build it."""

    replica: str
    token: int
    plan: Plan
    handles: dict[str, MoverHandle]
    deadline: float
    waiting: set[str]
    verified: dict[str, tuple[int, list[int]]] = field(default_factory=dict)  # of which attempt, and which buckets
    stopped: dict[str, asyncio.Event] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    wiring: Wiring = UNWIRED

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
        self.verified[key] = int(message.get("attempt") or 0), list(message.get("verified") or [])
        self._stopped(key).set()

    def gone(self, key: str) -> None:
        """The mover died: it reads and writes nothing any more."""
        self._stopped(key).set()

    def _stopped(self, key: str) -> asyncio.Event:
        return self.stopped.setdefault(key, asyncio.Event())

    async def wait_stopped(self, key: str) -> None:
        await self._stopped(key).wait()


async def revoke_all(built: Built, log: Any) -> dict[str, tuple[int, list[int]]]:
    """Stop our movers' work for a token: after this nobody here moves data for it (I5). What each had verified, and of
    which attempt.

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
    pairs = _pairs(lane, places)
    built.wiring = _wire(driver, pairs)
    for key, handle in handles.items():
        group = group_of(key, pairs) if built.wiring.transport == NCCL else []
        host = places[key] if context.config.data.links == "network" else host_of(key, _devices(context))
        _send_build(driver, built.program(key), handle, pairs, {"ranks": group, "host": host})
    return built


def _devices(context: Context) -> dict[str, str]:
    """The GPU of each of this node's ranks that is on one."""
    return {key: rank.device for key, rank in context.ranks.items() if rank.device is not None}


def _wire(driver: LaneDriver, pairs: list[tuple[str, str]]) -> Wiring:
    """What the network edges go by; said once a turn. Raises CommunicatorError where what was asked for cannot be."""
    found = wiring(driver.context.agreement.view, {end for pair in pairs for end in pair})
    structlog.get_logger().info(
        "lane_wired", job=driver.context.job, node=driver.context.node, lane=driver.replica, token=driver.token,
        transport=found.transport or "none", reason=found.reason,
    )  # fmt: skip
    if not found.transport:
        raise CommunicatorError("transport nccl", found.reason)
    return found


def _pairs(lane: Lane, places: dict[str, str]) -> list[tuple[str, str]]:
    """Edges between hosts: every pair that a remainder may use, not just today's."""
    return [
        (source.key, member.key)
        for source in lane.sources
        for member in lane.members
        if places[source.key] != places[member.key]
    ]


def _send_build(
    driver: LaneDriver, program: Program, handle: MoverHandle, pairs: list[tuple[str, str]], nccl: dict[str, Any]
) -> None:
    context, lane = driver.context, driver.lane
    assert lane is not None
    nodes = {member.key: member.node for member in lane.members}
    connect = []
    for _source, dst in (pair for pair in pairs if pair[0] == handle.key):
        host, port = context.address(nodes[dst])
        connect.append({"dst": dst, "host": host, "port": port})
    accept = [source for source, dst in pairs if dst == handle.key]
    proof = context.secret.edge(context.job, driver.replica, driver.token, handle.key)
    fd = create_document("refitd-program", program.to_bytes())
    try:
        message = {
            "kind": "build", "lane": driver.replica, "token": driver.token, "rank": handle.key, "job": context.job,
            "secret": proof, "connect": connect, "accept": accept, "timeout": context.config.timeouts.build,
        }  # fmt: skip
        if (rank := context.ranks.get(handle.key)) is not None and rank.device is not None:
            message["device"] = rank.device
        if len(nccl["ranks"]) > 1:
            message["nccl"] = nccl
        handle.send(message, [fd])
    finally:
        os.close(fd)
