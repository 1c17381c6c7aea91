"""The daemon's end of the hook: accepts clients, checks what they say, and hands it to a handler.

Everything runs in one event loop. Requests of a session are handled one after another; nothing that a client sends,
leaves out or fails to read makes the server wait or fall.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from refitd.errors import ProtocolError, RefitdError, Refused
from refitd.hook.admission import admit, check_descriptors
from refitd.hook.answers import error_answer
from refitd.hook.executor import AUTO
from refitd.hook.messages import PROTO, check
from refitd.hook.peer import refusal
from refitd.hook.session import Fds, Session
from refitd.hook.socket_file import PassedSocket, SocketFile
from refitd.hook.wire import Message

__all__ = ["Answer", "Fds", "Handler", "HookServer", "Session"]

Answer = tuple[dict[str, Any], Sequence[int]]
Log = Callable[[str, dict[str, Any]], None]
Count = Callable[[str], None]
QUEUE_LIMIT = 256
_ACCEPT_PAUSE = 0.5


class Handler(Protocol):
    """What the daemon does with its clients."""

    def connected(self, session: Session) -> None:
        """A client said hello. May raise Refused: the client gets the error and `disconnected` is not called."""

    async def request(self, session: Session, message: Message, fds: Fds) -> Answer:
        """Answer one request (checked against the schema): fields and descriptors.

        Answer descriptors are duplicated and stay the handler's. Request descriptors are closed afterwards unless
        taken (`Fds.take`). A RefitdError becomes an error answer; anything else the code ``internal``. Cancelled
        when the client goes away meanwhile; `disconnected` follows.
        """

    def disconnected(self, session: Session, reason: str) -> None:
        """The session ended; called once, after its last request has ended or was cancelled."""


class HookServer:
    """Serves the hook at one socket file."""

    def __init__(
        self,
        path: str | Path,
        handler: Handler,
        *,
        uids: Collection[int] = (),
        gids: Collection[int] = (),
        node: str = "",
        server: str = "refitd",
        mover: str = AUTO,
        log: Log | None = None,
        count: Count | None = None,
        listener: socket.socket | None = None,
        heartbeat: float = 0.1,
        hello_timeout: float = 5.0,
        stall_timeout: float = 10.0,
    ) -> None:
        """``uids`` and ``gids`` say who is let in (see `refitd.hook.peer.refusal`); both empty: this user and root.

        ``mover``: where a client that leaves it to us is to have its memory moved, see `refitd.hook.executor`.
        ``heartbeat`` seconds: how often the control pages are stamped. ``log(event, facts)`` hears what went wrong,
        ``count(code)`` of every error answer, whoever found the error.
        ``listener``: a socket that the service manager listens on for us at ``path``, and keeps.
        """
        self.path, self.handler, self.node, self.server, self.mover = path, handler, node, server, mover
        self.log: Log = log or _log_nothing
        self.count: Count = count or _count_nothing
        self._uids, self._gids, self._own = frozenset(uids), frozenset(gids), frozenset({os.getuid(), 0})
        self._heartbeat, self._hello_timeout, self._stall_timeout = heartbeat, hello_timeout, stall_timeout
        self._listener = listener
        self._file: SocketFile | PassedSocket | None = None
        self._clients: dict[Session, asyncio.Task[None]] = {}
        self._greeted: dict[int, Session] = {}
        self._numbers = 0
        self._beating: asyncio.Task[None] | None = None

    def allow(self, uids: Collection[int], gids: Collection[int]) -> None:
        """Change who is let in; whoever is in stays."""
        self._uids, self._gids = frozenset(uids), frozenset(gids)

    @property
    def sessions(self) -> list[Session]:
        """The sessions that said hello and were let in, oldest first."""
        return list(self._greeted.values())

    async def start(self) -> None:
        """Claim the socket file and listen. Raises Refused or ConfigError, both naming ``hook.socket``."""
        self._file = PassedSocket(self.path, self._listener) if self._listener else SocketFile(self.path)
        asyncio.get_running_loop().add_reader(self._file.listener, self._accept)
        self._beating = asyncio.create_task(self._beat_forever())

    async def stop(self, reason: str = "the daemon stops") -> None:
        """End all sessions, stop listening, remove the socket file."""
        if self._file is None or self._beating is None:
            return
        asyncio.get_running_loop().remove_reader(self._file.listener)
        tasks = [*self._clients.values(), self._beating]
        for session in list(self._clients):
            session.close(reason)
        self._beating.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._file.close()
        self._file = None

    def beat(self) -> None:
        """Stamp every control page now."""
        now = time.monotonic_ns()
        for session in self._greeted.values():
            if session.page is not None:
                session.page.heartbeat = now

    async def _beat_forever(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(self._heartbeat)

    def _accept(self) -> None:
        assert self._file is not None
        try:
            sock, _address = self._file.listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors or memory: the backlog waits, the loop does not spin
            self.log("accept_failed", {"error": str(error)})
            self._pause_accepting(self._file.listener)
            return
        sock.setblocking(False)
        self._numbers += 1
        session = Session(self._numbers, sock, self._stall_timeout)
        client = _Client(self, session)
        self._clients[session] = asyncio.create_task(client.run(sock, self._hello_timeout))

    def _pause_accepting(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(_ACCEPT_PAUSE, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._file is not None:
            asyncio.get_running_loop().add_reader(self._file.listener, self._accept)

    def admit(self, session: Session) -> None:
        """Raises Refused where the peer's user or groups may not speak to this daemon."""
        field = refusal(session.peer, self._uids, self._gids, self._own)
        if field:
            got = str(session.peer.uid) if field == "uid" else str(sorted(session.peer.groups))
            raise Refused(field, f"an allowed {'user' if field == 'uid' else 'group'}", got)

    def greet(self, session: Session) -> None:
        """Let the handler see a session that said hello. Raises what the handler raises."""
        self.handler.connected(session)
        self._greeted[session.id] = session
        if session.page is not None:
            session.page.heartbeat = time.monotonic_ns()

    def forget(self, session: Session) -> None:
        """The session's task ended; tell the handler where it had seen it."""
        self._clients.pop(session, None)
        if self._greeted.pop(session.id, None) is not None:
            try:
                self.handler.disconnected(session, session.closed or "")
            except Exception as error:  # noqa: BLE001 - a fault of the handler must not reach other sessions
                self.log("disconnected_failed", {"session": session.key, "error": repr(error)})
        if session.page is not None:
            session.page.close()


class _Client:
    """The task of one connection: frames in, answers out."""

    def __init__(self, server: HookServer, session: Session) -> None:
        self._server, self._session = server, session
        self._queue: asyncio.Queue[tuple[Message, Fds]] = asyncio.Queue()
        self._ended = asyncio.Event()
        session.on_close = self._ended.set

    async def run(self, sock: socket.socket, hello_timeout: float) -> None:
        """Serve until the connection ends, whoever ends it."""
        session = self._session
        try:
            self._server.admit(session)
        except Refused as error:
            self._end(error)
        if session.closed is None:
            asyncio.get_running_loop().add_reader(sock, self._readable)
        serving = asyncio.create_task(self._serve(hello_timeout))
        await self._ended.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait()[1].close()
        self._server.forget(session)

    def _readable(self) -> None:
        try:
            self._session.read(self._deliver)
        except ProtocolError as error:
            self._end(error)

    def _deliver(self, message: Message, fds: list[int]) -> None:
        self._queue.put_nowait((message, Fds(fds)))
        if self._queue.qsize() > QUEUE_LIMIT:
            raise ProtocolError("requests", f"at most {QUEUE_LIMIT} waiting", str(self._queue.qsize()))

    def _end(self, error: RefitdError, request_id: int | None = None) -> None:
        """Say why and close."""
        self._server.log("client_refused", {"pid": self._session.pid, "error": str(error)})
        self._answer_error(error, request_id)
        self._session.close(str(error))

    def _answer_error(self, error: Exception, request_id: int | None) -> None:
        answer = error_answer(error, request_id)
        self._server.count(answer["error"]["code"])
        self._session.send(answer)

    async def _serve(self, hello_timeout: float) -> None:
        try:
            async with asyncio.timeout(hello_timeout):
                message, fds = await self._queue.get()
        except TimeoutError:
            self._end(ProtocolError("hello", f"within {hello_timeout:g} s", "nothing"))
            return
        with contextlib.closing(fds):
            greeted = self._hello(message, fds)
        while greeted:
            message, fds = await self._queue.get()
            with contextlib.closing(fds):
                await self._request(message, fds)
            if not self._queue.empty():
                await asyncio.sleep(0)  # what the last request has set off goes before the next one

    def _hello(self, message: Message, fds: Fds) -> bool:
        request_id = _id_of(message)
        try:
            admit(self._session, message, fds)
            self._server.greet(self._session)
        except RefitdError as error:
            self._end(error, request_id)
            return False
        except Exception as error:  # noqa: BLE001 - a fault of the handler ends this session only
            self._internal(error, request_id)
            self._session.close("the daemon failed")
            return False
        fields = {"proto": PROTO, "server": self._server.server, "node": self._server.node, "path": self._server.mover}
        self._session.send({"id": request_id, "ok": True, **fields})
        return True

    async def _request(self, message: Message, fds: Fds) -> None:
        request_id = _id_of(message)
        try:
            if request_id is None or "method" not in message:
                raise ProtocolError("message", "a request with id and method", str(sorted(message))[:80])
            check_descriptors(check(message), fds)
            fields, answer_fds = await self._server.handler.request(self._session, message, fds)
            self._session.send({"id": request_id, "ok": True, **fields}, answer_fds)
        except RefitdError as error:
            facts = {"rank": self._session.key, "method": str(message.get("method"))[:80], "error": str(error)}
            self._server.log("request_refused", facts)
            self._answer_error(error, request_id)
        except Exception as error:  # noqa: BLE001 - a fault of the handler fails this request only
            self._internal(error, request_id)

    def _internal(self, error: Exception, request_id: int | None) -> None:
        self._server.log("request_failed", {"session": self._session.key, "error": repr(error)})
        self._answer_error(error, request_id)


def _log_nothing(event: str, facts: dict[str, Any]) -> None:  # noqa: ARG001 - the default of a callable
    return


def _count_nothing(code: str) -> None:  # noqa: ARG001 - the default of a callable
    return


def _id_of(message: Message) -> int | None:
    value = message.get("id")
    return value if type(value) is int and value >= 0 else None
