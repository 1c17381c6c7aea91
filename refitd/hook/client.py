"""The client's end of the hook: a connection that comes back by itself and never makes its owner wait.

Connecting is a ladder (connect, hello, register) that `Client.advance` climbs as far as a deadline allows; what was
not finished goes on at the next call. One thread at a time may use a client, in the process that made it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from refitd.errors import DaemonUnavailable, InputError, RefitdError, Refused
from refitd.hook.channel import Answered, Channel
from refitd.hook.executor import AUTO, Executor
from refitd.hook.memfd import create_document
from refitd.hook.messages import NAME, PROTO
from refitd.hook.page import ControlPage
from refitd.hook.shadow import Shadow, lent
from refitd.hook.wire import Message

log = logging.getLogger("refitd.hook")
CALL_SECONDS = 0.2
RELEASE_SECONDS = 5.0
FIRST_SECONDS = 5.0
TAKEN_SECONDS, TAKEN_PAUSE = 2.0, 0.05  # how long who connects waits for a rank that another process holds
_GREETING_SECONDS = 2.0
_SLICE = 0.1


def default_socket() -> str:
    """``$REFITD_SOCKET``, else ``$XDG_RUNTIME_DIR/refitd/hook.sock``, else ``/run/refitd/hook.sock``."""
    if path := os.environ.get("REFITD_SOCKET"):
        return path
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or "/run", "refitd", "hook.sock")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is. Raises InputError for names that the store could not hold and ranks outside of the world."""

    job: str
    side: str
    group: str
    rank: int
    world: int

    def __post_init__(self) -> None:
        NAME.check("job", self.job)
        NAME.check("replica" if self.side == "engine" else "run", self.group)
        if type(self.world) is not int or self.world < 1:
            raise InputError("world_size", "an integer from 1", repr(self.world))
        if type(self.rank) is not int or not 0 <= self.rank < self.world:
            raise InputError("rank", f"an integer from 0 to {self.world - 1}", repr(self.rank))

    @property
    def key(self) -> str:
        """The rank key."""
        return f"{self.side}/{self.group}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Registration:
    """What every daemon is told anew: the layout, the mode, and the state at that moment."""

    mode: str
    keep: list[str]
    layout: bytes
    state: Callable[[], dict[str, Any] | None]
    shadow: Shadow | None = None
    device: str | None = None  # UUID: where the weights will probably be, so that a mover can get ready


class _Stage(Enum):
    OFF = auto()
    GREETING = auto()
    REGISTERING = auto()
    READY = auto()


class Client:
    """A connection to the daemon of this node, the control page, and the events that came in."""

    def __init__(
        self,
        identity: Identity,
        path: str | None = None,
        backoff: tuple[float, float] = (1.0, 10.0),
        stale_seconds: float = 1.0,
        mover: str = AUTO,
    ) -> None:
        """``backoff``: seconds between attempts to connect, the first and the largest. ``mover``: see `Executor`.

        ``stale_seconds``: the age of the daemon's heartbeat from which on the daemon counts as gone. `life` counts
        the daemons that were connected to.
        """
        self.identity, self.path = identity, path or default_socket()
        self.page = ControlPage.create()
        self.incarnation = uuid.uuid4().hex
        self.executor, self._told_path = Executor(identity.key, mover), AUTO
        self.events: deque[Message] = deque()
        self.failure = "not connected yet"
        self.life = 0
        self._stale_seconds = stale_seconds
        self._registration: Registration | None = None
        self._known: Registration | None = None  # what some daemon has taken
        self._channel: Channel | None = None
        self._stage, self._call, self._pid = _Stage.OFF, 0, os.getpid()
        self._closed = self._warned = False
        self._retry_at = self._greet_by = 0.0
        self._backoff, self._limits = backoff[0], backoff
        _clients.add(self)

    @property
    def ready(self) -> bool:
        """Whether a daemon has taken the hello, and the registration where there is one."""
        return self._stage is _Stage.READY

    @property
    def known(self) -> bool:
        """Whether a daemon has taken the registration as it is now: nobody fills a shadow before that."""
        return self._known is not None and self._known is self._registration

    def connect(self) -> Client:
        """The first time, for at most `FIRST_SECONDS`; without a daemon it is tried again later.

        A rank that another process holds may come free in a moment: a killed one takes time to end. Raises the
        daemon's refusal, and is closed then.
        """
        began = time.monotonic()
        while True:
            try:
                self.advance(began + FIRST_SECONDS, raising=True)
                return self
            except RefitdError as error:
                taken = isinstance(error, Refused) and error.field == "rank"
                if not taken or time.monotonic() > began + TAKEN_SECONDS:
                    self.close()
                    raise
            self._retry_at = 0.0
            time.sleep(TAKEN_PAUSE)

    def own(self) -> None:
        """Raises Refused in a forked child, and after close."""
        if os.getpid() != self._pid:
            raise Refused("process", f"the process that connected ({self._pid})", f"a forked child ({os.getpid()})")
        if self._closed:
            raise Refused("client", "an open client", "a closed one")

    def end_loan(self) -> int:
        """Change the loan word, before memory that was lent may change. Returns the new word, 0 after `close`."""
        return 0 if self.page.closed else self.page.bump_loan()

    def forget(self, number: int) -> None:
        """Throw the answer of a started request away when it comes."""
        if self._channel is not None:
            self._channel.forget(number)

    def register(self, registration: Registration, deadline: float) -> None:
        """Keep ``registration`` for every daemon to come, and hand it to this one. Raises the daemon's refusal."""
        self.own()
        self._registration = registration
        try:
            if self._stage is _Stage.REGISTERING:
                self.forget(self._call)
            if self._stage in (_Stage.REGISTERING, _Stage.READY):
                self._start_registering()
        except DaemonUnavailable as error:
            self.drop(str(error))
        try:
            self.advance(deadline, raising=True)
        except RefitdError:
            self._registration = None
            raise

    def advance(self, deadline: float, raising: bool = False) -> bool:
        """Climb the ladder as far as ``deadline`` (monotonic seconds) allows; whether the top was reached.

        A refusal is raised where ``raising``; else it is logged, and tried again after the backoff.
        """
        self.own()
        try:
            if self._channel is None:
                self._connect()
            while self._channel is not None and not self.ready and self._climb(deadline):
                pass
        except DaemonUnavailable as error:
            self.drop(str(error))
        except RefitdError as error:
            if raising and self._stage is _Stage.REGISTERING:  # the layout was refused, not the client
                self._stage = _Stage.READY
                raise
            self.drop(str(error))
            if raising:
                raise
        return self.ready

    def _connect(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CALL_SECONDS)
            sock.connect(self.path)
        except OSError as error:
            sock.close()
            raise DaemonUnavailable(f"{self.path}: {error.strerror or error}") from None
        self.life += 1
        self._channel = Channel(sock, self.events, CALL_SECONDS)
        self._greet_by, self._stage = time.monotonic() + _GREETING_SECONDS, _Stage.GREETING
        who = self.identity
        self._call = self._channel.start(
            "hello", [self.page.fd], proto=PROTO, client="refitd", job=who.job, side=who.side, group=who.group,
            rank=who.rank, world=who.world, incarnation=self.incarnation,
        )  # fmt: skip

    def _climb(self, deadline: float) -> bool:
        """Fetch the answer of this rung and step on the next; False where ``deadline`` came first."""
        answer = self._finish(self._call, deadline)
        if answer is None:
            return False
        if self._stage is _Stage.GREETING:
            self._told_path = answer[0].get("path", AUTO)
        elif self._stage is _Stage.REGISTERING and "path" in answer[0]:
            self.executor.chosen(answer[0]["path"], answer[0]["path_why"])
        if self._stage is _Stage.GREETING and self._registration is not None:
            self._start_registering()
        else:
            if self._stage is _Stage.REGISTERING:
                self._known = self._registration
            self._stage, self._warned, self._backoff = _Stage.READY, False, self._limits[0]
        return True

    def _start_registering(self) -> None:
        assert self._channel is not None
        assert self._registration is not None
        told = self._registration
        if not self.known:  # whatever a daemon said of the shadow before this one, and may have said until it ended
            self.page.set_shadow_publication(0, 0)
        path, host = self.executor.begin(self._told_path, told.device)
        document = create_document("refitd-layout", told.layout)
        try:
            more: dict[str, Any] = {"device": told.device} if told.device else {}
            sockets = [] if host is None else [host.theirs.fileno()]
            if host is not None:
                more["path"] = path
            with lent(told.shadow) as (fields, fds):
                self._call = self._channel.start(
                    "register", [document, *fds, *sockets], mode=told.mode, keep=told.keep, state=told.state(), **more,
                    **fields,
                )  # fmt: skip
        finally:
            os.close(document)
            if host is not None:
                host.theirs.close()
        self._stage = _Stage.REGISTERING

    def check_alive(self) -> None:
        """Raises DaemonUnavailable where the daemon does not stamp the page any more, or never greets."""
        now = time.monotonic()
        if self._stage is _Stage.GREETING and now > self._greet_by:
            raise DaemonUnavailable("the daemon does not greet")
        if self._stage in (_Stage.REGISTERING, _Stage.READY) and now - self.page.heartbeat / 1e9 > self._stale_seconds:
            raise DaemonUnavailable("the daemon's heartbeat is stale")

    def call(self, method: str, fds: Sequence[int] = (), *, deadline: float, **fields: Any) -> Answered | None:
        """Send a request and wait for its answer; None where ``deadline`` came first (the answer is thrown away).

        Raises the error that the daemon answers, and DaemonUnavailable.
        """
        number = self.start(method, fds, **fields)
        answer = self.finish(number, deadline)
        if answer is None:
            self.forget(number)
        return answer

    def release(self, seconds: float) -> None:
        """Have the movers let go of this rank's memory. Raises DaemonUnavailable; Refused after ``seconds``.

        A daemon that may carry it out later, when the memory is in use again, is not asked anything more: it would
        never hear of that memory, and the next connection registers anew.
        """
        deadline = time.monotonic() + seconds
        self.advance(deadline)  # a daemon that came anew may have been told of the memory already
        if self.call("release", deadline=deadline) is None:
            self.drop("it did not answer a release in time")
            raise Refused("release", f"an answer within {seconds:g} s", "nothing")

    def start(self, method: str, fds: Sequence[int] = (), **fields: Any) -> int:
        """Send a request. Raises DaemonUnavailable."""
        self.own()
        if self._channel is None or not self.ready:
            raise DaemonUnavailable(self.failure)
        try:
            return self._channel.start(method, fds, **fields)
        except DaemonUnavailable as error:
            self.drop(str(error))
            raise

    def tell(self, method: str, **fields: Any) -> None:
        """Send a request whose answer does not matter; lost in silence where there is no daemon."""
        try:
            number = self.start(method, **fields)
        except DaemonUnavailable:
            return
        self.forget(number)

    def finish(self, number: int, deadline: float) -> Answered | None:
        """The answer of a started request; None at ``deadline``. Raises its error, and DaemonUnavailable."""
        try:
            return self._finish(number, deadline)
        except DaemonUnavailable as error:
            self.drop(str(error))
            raise

    def _finish(self, number: int, deadline: float) -> Answered | None:
        while self._channel is not None:
            answer = self._channel.finish(number, min(deadline, time.monotonic() + _SLICE))
            if answer is not None:
                return answer
            self.check_alive()
            if time.monotonic() >= deadline:
                return None
        raise DaemonUnavailable(self.failure)

    def wait(self, deadline: float) -> None:
        """Wait a little, at most until ``deadline``, for more in `events`. Raises DaemonUnavailable."""
        self.own()
        if self._channel is None:
            raise DaemonUnavailable(self.failure)
        try:
            if not self._channel.pump(min(deadline, time.monotonic() + _SLICE)):
                self.check_alive()
        except DaemonUnavailable as error:
            self.drop(str(error))
            raise

    def drain(self) -> bool:
        """Take in what has arrived, without waiting; whether the daemon is still there."""
        self.own()
        try:
            while self._channel is not None and self._channel.pump(0.0):
                pass
            self.check_alive()
        except DaemonUnavailable as error:
            self.drop(str(error))
        return self.ready

    def drop(self, reason: str) -> None:
        """Give the connection up; the next attempt comes after the backoff. Warns once in an outage."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.executor.cut()
        self._stage, self.failure = _Stage.OFF, reason
        self._retry_at = time.monotonic() + self._backoff
        self._backoff = min(2 * self._backoff, self._limits[1])
        if not self._warned:
            self._warned = True
            log.warning("%s goes on without refitd: %s", self.identity.key, reason)

    def abandon(self) -> None:
        """In a forked child: let go of the socket without a word to the daemon."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """End the loan and the registration, and free the page; harmless when repeated."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._pid:  # the page of a forked child is its parent's
                self.end_loan()
            self.abandon()
            if not self.executor.end():
                log.warning("%s: the mover thread has not ended yet", self.identity.key)
            self.page.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _abandon_all() -> None:
    for client in list(_clients):
        client.abandon()


os.register_at_fork(after_in_child=_abandon_all)
