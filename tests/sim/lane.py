"""One lane in a simulated mover, under one token: its edges, its rounds, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from refitd.plan import NETWORK, Bucket, Program, execute

from .loop import loop
from .memory import GARBAGE, Mount
from .net import End
from .round import Edge, Round

if TYPE_CHECKING:
    from .mover import SimMover

NOTHING: Mapping[str, Any] = {"attempt": 0, "verified": [], "rx": {}, "tx": {}}
RETRY_SECONDS = 0.05
BUSY_SECONDS, IDLE_SECONDS = 0.25, 1.0  # between two looks at an edge that has something to bring, or nothing
IDLE_GRACE_SECONDS = 0.25
PROGRESS_SECONDS = 0.25
WITHDRAWN = "loan withdrawn"


class Failed(Exception):
    """An edge is of no more use."""


class SimLane:
    """Edges are tasks; a change of anything rings the bell for whoever waits."""

    def __init__(self, mover: SimMover, message: dict[str, Any], program: Program) -> None:
        self.mover, self.world, self.program = mover, mover.world, program
        self.name, self.token, self.rank = message["lane"], message["token"], message["rank"]
        self._message = message
        self.edges: set[Edge] = {(self.rank, a["dst"]) for a in message["connect"]}
        self.edges |= {(src, self.rank) for src in message["accept"]}
        self.warm: set[Edge] = set()
        self.broken: dict[Edge, str] = {}
        self.round: Round | None = None
        self.stopping = False
        self._told: set[Edge] = set()
        self._offered: dict[str, End] = {}
        self._ready: dict[tuple[int, str], int] = {}
        self._ends: list[End] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._bells: list[asyncio.Future[None]] = []
        self._built = False

    # Commands.

    def start(self) -> None:
        for address in self._message["connect"]:
            self._spawn(self._guard((self.rank, address["dst"]), self._send_edge, address["dst"], address["host"]))
        for src in sorted(self._message["accept"]):
            self._spawn(self._guard((src, self.rank), self._receive_edge, src))
        self._spawn(self._peer())
        self._spawn(self._watch_build())
        self._spawn(self._progress())

    def attach(self, src: str, end: End) -> None:
        edge = (src, self.rank)
        if edge not in self.edges or edge in self.warm or src in self._offered or self.stopping:
            end.close()
            return
        self._offered[src] = end
        self._ring()

    def run(self, message: dict[str, Any], program: Program | None) -> None:
        previous = self.round
        if previous is not None and message["attempt"] <= previous.attempt:
            self._send("failed", attempt=message["attempt"], edge=None, reason="stale attempt", verified=[])
            return
        if previous is not None:
            previous.stopped = True
        self.round = now = Round(program or self.program, message)
        for bucket in (*now.outgoing, *(b for b in now.incoming.values() if b.link == NETWORK)):
            edge = (bucket.src, bucket.dst)
            if edge in self.broken:
                now.failures.setdefault(edge, self.broken[edge])
            elif edge not in self.warm:
                now.failures.setdefault(edge, "edge was not built")
        now.ready = {src: word for (attempt, src), word in self._ready.items() if attempt == now.attempt}
        self._ready = {key: word for key, word in self._ready.items() if key[0] > now.attempt}
        self._changed()

    def ready(self, attempt: int, src: str, word: int) -> None:
        if self.round is not None and attempt == self.round.attempt:
            self.round.ready[src] = word
        elif self.round is None or attempt > self.round.attempt:
            self._ready[attempt, src] = word
        self._ring()

    def stop(self) -> dict[str, Any]:
        """Nothing of the lane is read or written after this."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        for end in (*self._ends, *self._offered.values()):
            end.close()
        if self.round is not None:
            self.round.stopped = True
        return dict(NOTHING) if self.round is None else self.round.state()

    # Edges.

    async def _guard(self, edge: Edge, work: Callable[..., Awaitable[None]], *about: str) -> None:
        try:
            await work(*about)  # begun here: who is killed before that leaves nothing that was never awaited
        except (EOFError, ConnectionError, Failed, TimeoutError) as error:
            self._break(edge, f"{type(error).__name__}: {error}")

    async def _send_edge(self, dst: str, host: str) -> None:
        edge = (self.rank, dst)
        async with asyncio.timeout(self._message["timeout"]):
            end = await self._dial(edge, host)
        self.warm.add(edge)
        self._ring()
        done: Round | None = None
        while True:
            done = await self._next_round(done)
            await self._send_round(end, done, edge)

    async def _dial(self, edge: Edge, host: str) -> End:
        """Connect, and connect again, until both ends have said the same hello."""
        claim = {"kind": "edge", "job": self._message["job"], "lane": self.name, "token": self.token,
                 "secret": self._message["secret"], "src": edge[0], "dst": edge[1]}  # fmt: skip
        mine = (self.name, self.token, *edge, self.program.plan_digest)
        while True:
            end = await self.world.dial(self.mover.machine.name, self.mover.process, host, claim)
            if end is not None:
                self._ends.append(end)
                end.send(mine)
                try:
                    theirs = await end.receive()
                except (EOFError, ConnectionError):
                    end.close()
                else:
                    self._check_hello(mine, theirs)
                    return end
            await asyncio.sleep(RETRY_SECONDS)

    def _check_hello(self, mine: Any, theirs: Any) -> None:
        if mine != theirs:
            raise Failed(f"hello: expected {mine}, got {theirs}")

    async def _receive_edge(self, src: str) -> None:
        edge = (src, self.rank)
        while True:
            await self._until(lambda: src in self._offered)
            end = self._offered.pop(src)
            self._ends.append(end)
            mine = (self.name, self.token, *edge, self.program.plan_digest)
            try:
                theirs = await end.receive()
                end.send(mine)
            except (EOFError, ConnectionError):
                continue
            self._check_hello(mine, theirs)
            break
        self.warm.add(edge)
        self._ring()
        while True:
            await self._take(edge, await self._next(end, edge))

    async def _next(self, end: End, edge: Edge) -> dict[str, Any]:
        """The next message; silence while something is expected breaks the edge."""
        receiving = asyncio.ensure_future(end.receive())
        self._tasks.append(receiving)
        silent_since, seen = loop().time(), self.round
        try:
            while not receiving.done():
                busy = self.round is not None and not self.round.stopped and self.round.expects(edge)
                await asyncio.wait([receiving], timeout=BUSY_SECONDS if busy else IDLE_SECONDS)
                now = self.round
                if now is not seen or now is None or now.stopped or not now.expects(edge):
                    silent_since, seen = loop().time(), now
                elif loop().time() - silent_since >= now.options["progress_timeout"] and not receiving.done():
                    raise Failed(f"no byte for {now.options['progress_timeout']:g} s")
        finally:
            receiving.cancel()
            self._tasks.remove(receiving)
        message: dict[str, Any] = receiving.result()
        return message

    # Moving.

    async def _send_round(self, end: End, now: Round, edge: Edge) -> None:
        for bucket in now.outgoing:
            if bucket.dst != edge[1] or bucket.id in now.sent:
                continue
            if now.stopped or edge in now.failures:
                return
            try:
                payload = await self._read(now, bucket, now.words.get(bucket.src))
            except Failed as error:
                self._fail(now, edge, str(error))
                end.send({"attempt": now.attempt, "void": str(error)})
                return
            if now.stopped:
                return
            end.send({
                "attempt": now.attempt, "publication": now.publication, "bucket": bucket.id, "payload": payload,
                "token": self.token, "digest": now.program.plan_digest,
            })  # fmt: skip
            now.sent.add(bucket.id)
            now.tx[NETWORK] += bucket.nbytes
            self._changed()

    async def _read(self, now: Round, bucket: Bucket, word: int | None) -> Any:
        """A bucket's bytes, read over a while: its first half now, the rest later, then the loan word again."""
        mount = self._lender(bucket, word)
        first = execute.pack(now.program, bucket, mount.memory.arrays).copy()
        await asyncio.sleep(self.world.bucket_seconds(self.name))
        payload = execute.pack(now.program, bucket, mount.memory.arrays)
        payload[: payload.size // 2] = first[: payload.size // 2]
        if not self.world.plants("skip-trailer", self.mover.machine.name):
            self._require(bucket, mount, word)
        return payload

    def _lender(self, bucket: Bucket, word: int | None) -> Mount:
        mount = self.mover.mounts.get(bucket.src)
        if mount is None:
            raise Failed(f"memory of {bucket.src} is not mounted")
        if word is None:
            raise Failed(f"no loan word for {bucket.src}")
        self._require(bucket, mount, word)
        return mount

    def _require(self, bucket: Bucket, mount: Mount, word: int | None) -> None:
        if mount.word != word:
            raise Failed(WITHDRAWN)

    async def _take(self, edge: Edge, message: dict[str, Any]) -> None:
        await self._until(lambda: self.round is not None and self.round.attempt >= message["attempt"])
        now = self.round
        assert now is not None
        if message["attempt"] < now.attempt:
            return
        if "void" in message:
            self._fail(now, edge, message["void"])
            return
        expected = (now.publication, self.token, now.program.plan_digest)
        if (message["publication"], message["token"], message["digest"]) != expected:
            raise Failed(f"trailer: expected {expected}")
        bucket = now.incoming.get(message["bucket"])
        if bucket is None or bucket.src != edge[0] or bucket.id in now.verified:
            raise Failed(f"bucket {message['bucket']} was not expected")
        await self._write(now, bucket, message["payload"], edge)

    async def _write(self, now: Round, bucket: Bucket, payload: Any, edge: Edge) -> None:
        """Straight into memory, over a while; counted when the trailer was checked."""
        destination = self.mover.mounts.get(bucket.dst)
        if destination is None or not destination.writable:
            self._fail(now, edge, f"memory of {bucket.dst} is not writable")
            return
        half = payload.copy()
        half.view(np.int64)[payload.size // 16 :] = GARBAGE
        self._put(now, bucket, half, destination)
        await asyncio.sleep(self.world.bucket_seconds() / 4)
        if now.stopped:
            return
        self._put(now, bucket, payload, destination)
        now.rx[bucket.link] += bucket.nbytes
        now.verified.add(bucket.id)
        self._changed()

    def _put(self, now: Round, bucket: Bucket, payload: Any, destination: Mount) -> None:
        self.world.oracle.writes(self, destination)
        execute.unpack(now.program, bucket, payload, destination.memory.arrays)

    async def _peer(self) -> None:
        done: Round | None = None
        while True:
            done = await self._next_round(done)
            await self._copy_all(done)

    async def _copy_all(self, now: Round) -> None:
        todo = [bucket for bucket in now.incoming.values() if bucket.link != NETWORK]
        for bucket in (b for b in todo if b.stage == 0):
            await self._copy(now, bucket, now.words)
        waiting = [bucket for bucket in todo if bucket.stage == 1]
        landed_at: float | None = None
        while waiting and not now.stopped:
            ready = now.ready.keys() | {src for src, _dst in now.failures}
            for bucket in (b for b in waiting if b.src in ready):
                await self._copy(now, bucket, now.ready)
            waiting = [b for b in waiting if b.src not in ready]
            landed_at = landed_at or (loop().time() if now.landed else None)
            landed_at = None if self.mover.store_away else landed_at
            if waiting and landed_at and loop().time() - landed_at > now.options["neighbour_timeout"]:
                for src in sorted({b.src for b in waiting}):
                    self._fail(now, (src, self.rank), "neighbour not ready")
            elif waiting:
                await self._until_rung(0.25)

    async def _copy(self, now: Round, bucket: Bucket, words: Mapping[str, int]) -> None:
        edge = (bucket.src, bucket.dst)
        if now.stopped or edge in now.failures:
            return
        try:
            payload = await self._read(now, bucket, words.get(bucket.src))
        except Failed as error:
            self._fail(now, edge, str(error))
            return
        if not now.stopped:
            await self._write(now, bucket, payload, edge)

    # Reporting.

    def _send(self, kind: str, **fields: Any) -> None:
        self.mover.report(kind, lane=self.name, token=self.token, **fields)

    def _fail(self, now: Round, edge: Edge, reason: str) -> None:
        if edge not in now.failures and not now.stopped:
            now.failures[edge] = reason
            self._changed()

    def _break(self, edge: Edge, reason: str) -> None:
        if self.stopping or edge in self.broken:
            return
        self.broken[edge] = reason
        if self.round is not None and self.round.needs(edge):
            self._fail(self.round, edge, reason)
        else:
            self._spawn(self._report_idle(edge))
        self._ring()

    async def _report_idle(self, edge: Edge) -> None:
        await asyncio.sleep(IDLE_GRACE_SECONDS)
        if edge not in self._told:
            self._told.add(edge)
            self._send("failed", attempt=0, edge=list(edge), reason=self.broken[edge], verified=[])

    async def _watch_build(self) -> None:
        try:
            async with asyncio.timeout(self._message["timeout"] + PROGRESS_SECONDS):
                await self._until(lambda: bool(self.broken) or self.edges <= self.warm)
        except TimeoutError:
            for edge in sorted(self.edges - self.warm):
                self._send("failed", attempt=0, edge=list(edge), reason="not built: no connection", verified=[])
            return
        if not self.broken:
            self._send("built")

    async def _progress(self) -> None:
        told = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            now = self.round
            if now is not None and not now.told_done and not now.stopped and len(now.verified) + len(now.sent) != told:
                told = len(now.verified) + len(now.sent)
                self._send("progress", buckets=len(now.verified), **now.state())

    def _changed(self) -> None:
        """Tell the daemon what is new, and whoever waits here."""
        now = self.round
        if now is not None and not now.stopped and not now.told_done:
            for edge, reason in now.failures.items():
                if edge not in now.told:
                    now.told.add(edge)
                    self._told.add(edge)
                    self._send("failed", edge=list(edge), reason=reason, **now.state())
            if now.landed and not now.told_landed:
                now.told_landed = True
                self._send("landed", attempt=now.attempt)
            if now.finished:
                now.told_done = True
                self._send("done", **now.state())
        self._ring()

    # Waiting.

    def _spawn(self, coro: Any) -> None:
        self._tasks.append(self.mover.process.spawn(coro))

    def _ring(self) -> None:
        bells, self._bells = self._bells, []
        for bell in bells:
            if not bell.done():
                bell.set_result(None)

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            self._bells.append(loop().create_future())
            await self._bells[-1]

    async def _next_round(self, done: Round | None) -> Round:
        await self._until(lambda: self.round is not None and self.round is not done)
        assert self.round is not None
        return self.round

    async def _until_rung(self, seconds: float) -> None:
        bell = loop().create_future()
        self._bells.append(bell)
        await asyncio.wait([bell], timeout=seconds)
