"""What trainers and engines have in common: a page, a connection that comes back by itself, requests and events."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from refitd.errors import DaemonUnavailable, RefitdError
from refitd.hook.answers import error_of
from refitd.hook.memfd import create_document
from refitd.hook.page import ControlPage
from refitd.layout import Layout

from .loop import Process, loop
from .memory import SimMemory

if TYPE_CHECKING:
    from .hook import SimSession
    from .world import Machine

Message = dict[str, Any]


class SimClient:
    """One client process. Subclasses do the work in `main`."""

    side = ""
    stale_seconds = 1.0
    backoff = (1.0, 10.0)

    def __init__(self, machine: Machine, group: str, rank: int, world_size: int, layout: Layout, mode: str) -> None:
        world = machine.world
        self.machine, self.world = machine, world
        self.job, self.group, self.rank, self.world_size = world.job, group, rank, world_size
        self.layout, self.mode = layout, mode
        self.pid, self.incarnation = world.number(), f"{world.number():08x}"
        self.page = ControlPage.create()
        self.memory = SimMemory(self, self.page, layout)
        self.shadow: SimMemory | None = None
        self.events: deque[Message] = deque()
        self.process = Process(f"{machine.name}/{self.key}#{self.pid}", machine.name)
        self.process.on_death.append(self._died)
        self.session: SimSession | None = None
        self.failure = "not connected yet"
        self.life = 0
        self._answers: dict[int, asyncio.Future[tuple[Message, list[int]]]] = {}
        self._numbers = 0
        self._retry_at, self._backoff = 0.0, self.backoff[0]
        self._news: asyncio.Future[None] | None = None
        machine.clients[self.key] = self
        machine.processes[self.process] = None
        world.remember(self, self.memory)
        self.task = self.process.spawn(self._main())

    @property
    def key(self) -> str:
        return f"{self.side}/{self.group}/{self.rank}"

    @property
    def context(self) -> contextvars.Context:
        return self.process.context

    async def _main(self) -> None:
        try:
            await self.main()
        except Exception as error:  # noqa: BLE001 - whatever ends a client breaks I9
            self.world.oracle.fault("I9", f"{self.key} ended: {error!r}")

    async def main(self) -> None:
        raise NotImplementedError

    def state(self) -> Message | None:
        """What a new daemon is told of this rank."""
        return None

    def lends(self) -> tuple[Message, list[int]]:
        """What a new daemon is lent with the registration."""
        return {}, [] if self.shadow is None else [self.shadow.fd]

    def _died(self) -> None:
        """The process is gone with its memory; what others have mapped stays theirs."""
        if self.machine.clients.get(self.key) is self:
            del self.machine.clients[self.key]
        self.machine.processes.pop(self.process, None)
        for told in self.world.on_death:
            told(self)

    # The connection.

    @property
    def ready(self) -> bool:
        return self.session is not None

    def check_alive(self) -> None:
        """The daemon stamps the page ten times a second while it runs."""
        daemon = self.machine.daemon
        stopped = daemon.process.paused_at if daemon else None
        if self.session is not None and stopped is not None and loop().time() - stopped > self.stale_seconds:
            self.drop("the daemon's heartbeat is stale")

    async def advance(self, deadline: float) -> bool:
        """Connect, say hello and register, as far as the deadline allows."""
        if self.session is None and loop().time() >= self._retry_at:
            try:
                await self._connect(deadline)
            except RefitdError as error:
                self.drop(str(error))
        return self.ready

    async def _connect(self, deadline: float) -> None:
        daemon = self.machine.daemon
        if daemon is None or daemon.process.dead:
            raise DaemonUnavailable("no such file")
        answer: asyncio.Future[SimSession] = loop().create_future()
        self.life += 1
        daemon.process.call(daemon.hook.delay(), daemon.hook.greet, self, answer)
        done, _pending = await asyncio.wait([answer], timeout=max(min(deadline - loop().time(), 2.0), 0.01))
        if not done:
            answer.add_done_callback(_hang_up)
            raise DaemonUnavailable("the daemon does not greet")
        self.session = answer.result()
        if self.session.closed is not None:
            raise DaemonUnavailable("hung up")
        document = create_document("sim", self.layout.to_bytes())
        more, fds = self.lends()
        try:
            await self.call(
                "register", [document, *fds], within=5.0, mode=self.mode, keep=[], state=self.state(), **more
            )
        finally:
            os.close(document)
        self._backoff = self.backoff[0]

    def drop(self, reason: str) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.hang_up()
        self.failure = reason
        self._retry_at = loop().time() + self._backoff
        self._backoff = min(2 * self._backoff, self.backoff[1])
        answers, self._answers = self._answers, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(DaemonUnavailable(reason))
                future.exception()
        self._ring()

    def hung_up(self, session: SimSession, reason: str) -> None:
        if self.session is session:
            self.drop(reason)

    def heard(self, session: SimSession, message: Message, fds: list[int]) -> None:
        """A frame from the daemon."""
        if self.session is not session:
            return
        if "event" in message:
            self.events.append(message)
        elif (future := self._answers.pop(message["id"], None)) is not None and not future.done():
            if "error" in message:
                future.set_exception(error_of(message))
                future.exception()
            else:
                future.set_result((message, fds))
        self._ring()

    def _ring(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def listen(self, seconds: float) -> None:
        """Wait a little for events. Raises DaemonUnavailable."""
        if not self.events and self.session is not None:
            self._news = loop().create_future()
            await asyncio.wait([self._news], timeout=max(min(seconds, 0.1), 0.001))
        self.check_alive()
        if self.session is None:
            raise DaemonUnavailable(self.failure)

    def start(self, method: str, fds: Sequence[int] = (), **fields: Any) -> asyncio.Future[tuple[Message, list[int]]]:
        """Send a request. Raises DaemonUnavailable."""
        if self.session is None:
            raise DaemonUnavailable(self.failure)
        self._numbers += 1
        future: asyncio.Future[tuple[Message, list[int]]] = loop().create_future()
        self._answers[self._numbers] = future
        self.session.ask({"id": self._numbers, "method": method, **fields}, fds)
        return future

    async def call(
        self, method: str, fds: Sequence[int] = (), within: float = 5.0, **fields: Any
    ) -> tuple[Message, list[int]] | None:
        """A request and its answer; None where none came in time. Raises what the daemon answers."""
        future = self.start(method, fds, **fields)
        deadline = loop().time() + within
        while not future.done() and loop().time() < deadline:
            await asyncio.wait([future], timeout=min(0.1, max(deadline - loop().time(), 0.001)))
            self.check_alive()
        return future.result() if future.done() else None

    def tell(self, method: str, **fields: Any) -> None:
        """A request whose answer does not matter."""
        if self.session is not None:
            self.start(method, **fields)


def _hang_up(answer: asyncio.Future[SimSession]) -> None:
    if not answer.cancelled() and answer.exception() is None:
        answer.result().hang_up()
