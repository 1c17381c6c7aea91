"""The hook without sockets: sessions in the daemon, requests checked against the real schema, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from refitd.errors import RefitdError
from refitd.hook.answers import error_answer
from refitd.hook.messages import ADMIN, check
from refitd.hook.page import ControlPage
from refitd.hook.session import Fds

from .loop import TICK, Process, loop

if TYPE_CHECKING:
    from .client import SimClient
    from .world import SimDaemon

Message = dict[str, Any]


class SimSession:
    """What the daemon sees of a client (`refitd.hook.session.Session`)."""

    def __init__(self, hook: SimHook, client: SimClient, process: Process) -> None:
        self.id = hook.daemon.world.number()
        self.pid, self.uid, self.gid = client.pid, 0, 0
        self.job, self.side, self.group = client.job, client.side, client.group
        self.incarnation, self.client = client.incarnation, "sim"
        self.rank, self.world = client.rank, client.world_size
        self.page: ControlPage | None = ControlPage.map(client.page.fd) if client.page else None
        self.closed: str | None = None
        self._hook, self._client, self._process = hook, client, process
        self._queue: asyncio.Queue[tuple[Message, Fds]] = asyncio.Queue()
        self._there_at = self._back_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        return f"{ADMIN}/{self.id}" if self.side == ADMIN else f"{self.side}/{self.group}/{self.rank}"

    @property
    def hung_up(self) -> bool:
        return self._client.process.dead

    # The daemon's end.

    def event(self, name: str, fds: Sequence[int] = (), **fields: Any) -> None:
        self.send({"event": name, **fields}, fds)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        if self.closed is None:
            self._back_at = max(self._back_at + TICK, loop().time() + self._hook.delay())
            loop().call_at(self._back_at, self._client.heard, self, message, list(fds), context=self._client.context)

    def close(self, reason: str) -> None:
        if self.closed is not None:
            return
        self.closed = reason
        self._hook.world.say("session_closed", rank=self.key, reason=reason)
        at = max(self._back_at + TICK, loop().time() + self._hook.delay())
        loop().call_at(at, self._client.hung_up, self, reason, context=self._client.context)
        if self._task is not None:
            self._task.cancel()
        self._process.call(0, self._hook.forget, self)

    def release(self) -> None:
        """The daemon is gone, or has forgotten the session: what it had mapped and been sent."""
        if self.page is not None:
            self.page.close()
        while not self._queue.empty():
            self._queue.get_nowait()[1].close()

    # The client's end.

    def ask(self, message: Message, fds: Sequence[int]) -> None:
        """A request on its way; its descriptors are duplicated, as the socket would."""
        copies = Fds([os.dup(fd) for fd in fds])
        self._there_at = max(self._there_at + TICK, loop().time() + self._hook.delay())
        loop().call_at(self._there_at, self._arrived, message, copies, context=self._process.context)

    def hang_up(self) -> None:
        """The client closed its end, or died."""
        at = max(self._there_at + TICK, loop().time() + self._hook.delay())
        loop().call_at(at, self.close, "the client closed the connection", context=self._process.context)

    def _arrived(self, message: Message, fds: Fds) -> None:
        if self.closed is None:
            self._queue.put_nowait((message, fds))
        else:
            fds.close()

    def serve(self) -> None:
        self._task = self._process.spawn(self._serve())

    async def _serve(self) -> None:
        while True:
            message, fds = await self._queue.get()
            with contextlib.closing(fds):
                await self._request(message, fds)

    async def _request(self, message: Message, fds: Fds) -> None:
        number = message["id"]
        try:
            check(message)
            fields, answer = await self._hook.daemon.requests.request(self, message, fds)  # type: ignore[arg-type]
            self.send({"id": number, "ok": True, **fields}, answer)
        except RefitdError as error:
            self.send(error_answer(error, number))
        except Exception as error:  # noqa: BLE001 - what the server calls "internal"
            self._hook.world.oracle.fault("I9", f"{self.key} {message['method']}: {error!r}")
            self.send(error_answer(error, number))


class SimHook:
    """`HookServer` of one daemon."""

    def __init__(self, daemon: SimDaemon) -> None:
        self.daemon, self.world = daemon, daemon.world
        self._greeted: dict[int, SimSession] = {}

    @property
    def sessions(self) -> list[SimSession]:
        return list(self._greeted.values())

    def delay(self) -> float:
        return self.world.rng.uniform(0.0001, 0.002)

    def greet(self, client: SimClient, answer: asyncio.Future[SimSession]) -> None:
        """A client connected and said hello (in the daemon's process)."""
        session = SimSession(self, client, self.daemon.process)
        try:
            self.daemon.requests.connected(session)  # type: ignore[arg-type]
        except RefitdError as error:
            session.closed = str(error)
            session.release()
            client.process.call(self.delay(), _refuse, answer, error)
            return
        self._greeted[session.id] = session
        session.serve()
        client.process.call(self.delay(), _settle, answer, session)
        if client.process.dead:  # it died while it was connecting
            session.hang_up()
        client.process.on_death.append(session.hang_up)

    def forget(self, session: SimSession) -> None:
        if self._greeted.pop(session.id, None) is not None:
            try:
                self.daemon.requests.disconnected(session, session.closed or "")  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - whatever it is breaks I9
                self.world.oracle.fault("I9", f"disconnected {session.key}: {error!r}")
        session.release()

    def died(self) -> None:
        """The daemon was killed: clients see end of file."""
        for session in self.sessions:
            client = session._client
            client.process.call(self.delay(), client.hung_up, session, "the daemon died")
            session.closed = "dead"
            session.release()

    def stop(self) -> None:
        for session in self.sessions:
            session.close("the daemon stops")


def _settle(answer: asyncio.Future[SimSession], session: SimSession) -> None:
    if not answer.done():
        answer.set_result(session)


def _refuse(answer: asyncio.Future[SimSession], error: RefitdError) -> None:
    if not answer.done():
        answer.set_exception(error)
