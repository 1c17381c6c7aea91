"""One job on this node: its ranks and lanes, and the loop that brings records and reality together."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from refitd.config import Config
from refitd.daemon.agree import Agreement
from refitd.daemon.data import digest_of, fetch_blob
from refitd.daemon.draining import Draining
from refitd.daemon.edges import Edges
from refitd.daemon.lane import LaneDriver
from refitd.daemon.leading import Leading
from refitd.daemon.loans import Loans
from refitd.daemon.membership import Membership
from refitd.daemon.movers import Movers
from refitd.daemon.rank import LocalRank
from refitd.daemon.secret import Secret
from refitd.epoch.records import PubId, Slot, SlotId
from refitd.errors import LayoutError, StoreError, TransportError
from refitd.hook.session import Session
from refitd.layout import Layout
from refitd.mover.handle import MoverHandle
from refitd.mover.limit import Limit
from refitd.mover.pool import MoverPool
from refitd.plan import Rank
from refitd.store import MemoryStore, Store
from refitd.telemetry.history import Refit
from refitd.telemetry.metrics import Metrics

TICK_SECONDS = 0.1
AWAY_EVERY_SECONDS = 10.0
KEEP_BLOBS = 256
LEARN_SECONDS = 1.0  # so long a decision waits for layouts, and so long it is until one is asked for anew


class Job:
    """Everything that this daemon does for one job. Lives in the event loop; see `Context` for what lanes use."""

    def __init__(
        self, name: str, config: Config, store: Store, pool: MoverPool, metrics: Metrics, secret: Secret, address: str
    ) -> None:
        self.job, self.node, self.config, self.metrics, self.secret = name, config.node.name, config, metrics, secret
        self.own_address = address
        self.ranks: dict[str, LocalRank] = {}
        self.lanes: dict[str, LaneDriver] = {}
        self.blobs: dict[str, bytes] = {}
        self.network_bytes = 0
        self.on_ended: Callable[[Job], None] = lambda _job: None
        self._fetched: dict[str, bytes] = {}  # of other nodes, the oldest first
        self._passing: deque[str] = deque()  # documents that nobody asks for once their attempt is over
        self._layouts: dict[str, Layout] = {}
        self._learning: dict[str, asyncio.Task[None]] = {}  # layouts on their way, by digest
        self._log = structlog.get_logger().bind(job=name, node=self.node)
        self._wake = asyncio.Event()
        inline = isinstance(store, MemoryStore)
        self.agreement = Agreement(store, name, config.store.lease_ttl, config.store.keepalive, inline, self.poke)
        self.limit = Limit.create()
        self.movers = Movers(pool, self, metrics)
        self.membership = Membership(self)
        self.draining = Draining(self)
        self.leading = Leading(self)
        self.loans = Loans(self)
        self.edges = Edges(self)
        self._started = asyncio.Event()
        self._said_away = -math.inf  # monotonic seconds
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._tick())]

    def poke(self) -> None:
        self._wake.set()

    async def close(self) -> None:
        tasks = [*self._tasks, *self._learning.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.metrics.over(f"job {self.job}")
        for lane in self.lanes.values():
            await lane.close()
        self.edges.close()
        await self.movers.close()
        for rank in self.ranks.values():
            rank.leave()
        await self.agreement.close()
        self.limit.close()

    def poke_lane(self, replica: str) -> None:
        """Something happened that only this lane need look at."""
        if replica in self.lanes:
            self.lanes[replica].poke()

    # The loop.

    async def _run(self) -> None:
        await self._connect()
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # requests that have arrived meanwhile go first, and need no second look
            self._wake.clear()
            self.metrics.beat(f"job {self.job}")
            try:
                await self.reconcile()
                self.metrics.store_up(True)
                self._said_away = -math.inf
            except StoreError as error:
                self._store_away(error)
                await asyncio.sleep(0.2)
                self.poke()
            except Exception:  # noqa: BLE001 - a bug: said aloud, and the loop goes on
                self._log.exception("job_fault")
                await asyncio.sleep(1.0)
                self.poke()

    async def _connect(self) -> None:
        while not self._started.is_set():
            try:
                await self.agreement.start()
                self._started.set()
            except StoreError as error:
                self._store_away(error)
                await asyncio.sleep(0.5)
        self.poke()

    def _store_away(self, error: StoreError) -> None:
        """Said aloud at once, and then every few seconds: it is found out several times a second."""
        self.metrics.store_up(False)
        now = time.monotonic()
        aloud = now - self._said_away >= AWAY_EVERY_SECONDS
        self._said_away = now if aloud else self._said_away
        (self._log.warning if aloud else self._log.debug)("store_away", error=str(error))

    async def _tick(self) -> None:
        """Time passes for deadlines even when nothing else happens."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.movers.check()
                self.movers.heed_store(self.agreement.away)
                self.edges.expire()
            except Exception:  # noqa: BLE001 - a bug: said aloud, and deadlines go on
                self._log.exception("job_fault")
            self.poke()

    async def reconcile(self) -> None:
        """Bring our records up to date, decide if we lead, and let lanes and loans look again."""
        control = self.agreement.view.control
        self.limit.set(control.value.limit if control else None)
        await self.membership.publish()
        self._give_way()
        await self.draining.publish()
        await self.loans.publish()
        if not self.leading.ours:
            await self.agreement.following.follow(self._lanes_here(), self.node if self._lends() else "")
        await self.leading.lead()
        if self.leading.ended and not self.ranks:
            self._log.info("job_ended", reason="neither trainers nor engines for the job's time to live")
            self.on_ended(self)
            return
        self.loans.settle()
        self.movers.restart_excluded(self.agreement.view)
        for replica in sorted(self._named().difference(self.lanes)):
            self.lanes[replica] = LaneDriver(self, replica)
        await self._forget_lanes()
        for lane in self.lanes.values():
            lane.poke()

    async def _forget_lanes(self) -> None:
        """Drivers of replicas that are no more: names may be new at each start of an engine."""
        here = {rank.session.group for rank in self.ranks.values()}
        for replica in [name for name, lane in self.lanes.items() if lane.lane is None and lane.built is None]:
            if replica not in here and replica not in self.agreement.view.lanes:
                await self.lanes.pop(replica).close()

    def _named(self) -> frozenset[str]:
        """Lanes whose records name this node."""
        view = self.agreement.view
        return view.memo(("named", self.node), ("lanes",), lambda: frozenset(
            replica for replica, stored in view.lanes.items() if self.node in stored.value.nodes
        ))  # fmt: skip

    def _lanes_here(self) -> frozenset[str]:
        """Lanes that this node is in, or will be in as soon as its replica is whole."""
        return self._named().union(rank.session.group for rank in self.ranks.values() if not rank.trains)

    def _lends(self) -> bool:
        """Whether offers of this node may be in the records."""
        return self.node in self.agreement.view.offers or any(rank.trains for rank in self.ranks.values())

    # Ranks.

    def add_rank(self, rank: LocalRank, layout_bytes: bytes) -> None:
        """A client registered: serve its layout, give it a mover, tell the job."""
        self.blobs[rank.digest] = layout_bytes
        self._layouts.setdefault(rank.digest, rank.layout)
        old = self.ranks.get(rank.key)
        if old:
            if old.shadowed and rank.shadowed and not (old.memory and rank.memory and old.memory.same_as(rank.memory)):
                rank.spoil_shadow()  # whatever we said of the old one
            self.remove_rank(old.session)
        self.ranks[rank.key] = rank
        rank.came_with = rank.switched = rank.served
        self.metrics.rank_came(rank.key)
        self.movers.want(rank.key)
        self.poke()

    def remove_rank(self, session: Session) -> None:
        """The client is gone; so is its memory, as far as we may use it."""
        rank = self.ranks.get(session.key)
        if rank is None or rank.session is not session:
            return
        del self.ranks[session.key]
        self.metrics.rank_gone(session.key)
        self.movers.drop(rank)
        rank.leave()
        self.poke()

    def _give_way(self) -> None:
        """A process that hangs may be replaced on another node: there is one of each rank, the last."""
        for rank in list(self.ranks.values()):
            if node := self.membership.lost_to(rank.session):
                self._log.warning("rank_replaced", rank=rank.key, pid=rank.session.pid, by=node)
                rank.session.close(f"a later process speaks for {rank.key} on {node}")

    def on_mover_message(self, handle: MoverHandle, message: dict[str, Any]) -> None:
        lane = self.lanes.get(str(message.get("lane")))
        if lane:
            lane.on_message(handle, message)

    def on_mover_exit(self, key: str) -> None:
        for lane in self.lanes.values():
            lane.mover_died(key)
        self.poke()

    def take_edge(self, hello: Mapping[str, Any], sock: socket.socket) -> None:
        """A peer's mover wants to reach one of ours."""
        self.edges.take(hello, sock)

    # What lanes ask for.

    async def plan_ranks(self, slots: Sequence[Slot | SlotId]) -> list[Rank]:
        return [Rank(slot.key, *self._place(slot), await self._layout(self._live(slot))) for slot in slots]

    def _live(self, slot: Slot | SlotId) -> Slot:
        live = self.agreement.view.live(slot)
        if live is None:
            raise TransportError((self.node, slot.key), "the rank that the lane names lives no more")
        return live

    def _place(self, slot: Slot | SlotId) -> tuple[str, str]:
        """(node, domain) of a slot for the planner; with ``data.links = network`` every rank stands alone.

        A node is a domain of its own, whatever ``node.domain`` says: no transport moves the planner's ``fabric`` link.
        """
        place = f"{slot.node}#{slot.key}" if self.config.data.links == "network" else slot.node
        return place, place

    async def _layout(self, slot: Slot) -> Layout:
        if slot.digest not in self._layouts:
            self._layouts.setdefault(slot.digest, Layout.from_bytes(await self.blob(slot.node, slot.digest)))
        return self._layouts[slot.digest]

    def known_layout(self, digest: str) -> Layout | None:
        """A layout that is here already."""
        return self._layouts.get(digest)

    async def learn_layouts(self, slots: Sequence[Slot]) -> None:
        """Fetch layouts that are not here yet. One that does not come soon is not waited for, except by the replicas
        that need it, and is asked for again and again.
        """
        wanted: dict[str, list[Slot]] = {}
        for slot in slots:
            if slot.digest not in self._learning:
                wanted.setdefault(slot.digest, []).append(slot)
        fresh = {digest: asyncio.create_task(self._learn(digest, holders)) for digest, holders in wanted.items()}
        self._learning.update(fresh)
        if fresh:
            await asyncio.wait(fresh.values(), timeout=LEARN_SECONDS)

    async def _learn(self, digest: str, holders: Sequence[Slot]) -> None:
        try:
            for slot in holders:
                try:
                    await self._layout(slot)
                    return
                except (TransportError, LayoutError) as error:
                    self._log.warning("layout_missing", rank=slot.key, error=str(error))
            await asyncio.sleep(LEARN_SECONDS)
        finally:
            del self._learning[digest]
            self.poke()

    def address(self, node: str) -> tuple[str, int]:
        member = self.agreement.view.members.get(node)
        if member is None:
            raise TransportError((self.node, node), "the node is not a member")
        host, _, port = member.value.address.rpartition(":")
        return host, int(port)

    def keep_blob(self, data: bytes) -> str:
        digest = digest_of(data)
        if digest not in self.blobs:
            self._passing.append(digest)
            self.blobs[digest] = data
        while len(self._passing) > KEEP_BLOBS:
            self.blobs.pop(self._passing.popleft(), None)
        return digest

    async def blob(self, node: str, digest: str) -> bytes:
        if (known := self.blobs.get(digest, self._fetched.get(digest))) is not None:
            return known
        host, port = self.address(node)
        self._fetched[digest] = data = await fetch_blob(f"{host}:{port}", self.secret, digest)
        while len(self._fetched) > KEEP_BLOBS:
            del self._fetched[next(iter(self._fetched))]
        return data

    def spread(self, key: str, publication: PubId, whole: bool) -> None:
        for lane in self.lanes.values():
            if lane.attempt and lane.attempt.publication == publication:
                lane.attempt.source_ready(key, whole)

    def counted(self, key: str, refit: Refit, rx: Mapping[str, int], tx: Mapping[str, int]) -> None:
        for link in {*rx, *tx}:
            self.metrics.transferred(link, rx.get(link, 0), tx.get(link, 0), key, refit)
        self.network_bytes += rx.get("network", 0)

    @property
    def now(self) -> float:
        return time.monotonic()
