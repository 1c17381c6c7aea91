"""One connection to a daemon: calls whose answers may be fetched later, and events in between."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from refitd.errors import DaemonUnavailable, ProtocolError
from refitd.failpoints import effect
from refitd.hook.answers import error_of
from refitd.hook.messages import check, check_answer
from refitd.hook.wire import Decoder, Message, receive_into, send

Answered = tuple[Message, list[int]]


def remaining(deadline: float) -> float:
    """Seconds until ``deadline`` (monotonic), never negative."""
    return max(deadline - time.monotonic(), 0.0)


def readable(fd: int, deadline: float) -> bool:
    """Wait until ``fd`` can be read (for a pidfd: the process has ended), at most until ``deadline``."""
    poller = select.poll()  # select() cannot take the large descriptors of an engine with many open files
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(math.ceil(remaining(deadline) * 1000)))


class Channel:
    """A connected socket, used by one thread. Whatever breaks it raises DaemonUnavailable; then only close it."""

    def __init__(self, sock: socket.socket, events: deque[Message], send_seconds: float) -> None:
        """``events`` is filled with checked events; ``send_seconds`` bounds how long a send may block."""
        self._sock, self._events, self._send_seconds = sock, events, send_seconds
        self._decoder = Decoder()
        self._calls = 0
        self._methods: dict[int, str] = {}
        self._answers: dict[int, Answered] = {}
        self._forgotten: set[int] = set()

    def start(self, method: str, fds: Sequence[int] = (), **fields: Any) -> int:
        """Send a request; the number by which `finish` fetches its answer."""
        effect(f"request {method}")
        self._calls += 1
        self._methods[self._calls] = method
        self._sock.settimeout(self._send_seconds)
        try:
            send(self._sock, {"id": self._calls, "method": method, **fields}, fds)
        except OSError as error:
            self.pump(time.monotonic())  # the daemon may have said why before it closed
            raise DaemonUnavailable(f"sending {method} failed: {error.strerror or error}") from None
        return self._calls

    def forget(self, call: int) -> None:
        """Throw the answer of ``call`` away when it comes."""
        self._methods.pop(call, None)
        if call in self._answers:
            _close_all(self._answers.pop(call)[1])
        else:
            self._forgotten.add(call)

    def finish(self, call: int, deadline: float) -> Answered | None:
        """The answer of ``call``, None where it is not there at ``deadline``. Raises the error that it carries."""
        while call not in self._answers:
            if not self.pump(deadline):
                return None
        message, fds = self._answers.pop(call)
        method = self._methods.pop(call)
        try:
            if "error" in message:
                raise error_of(check(message))
            return check_answer(method, message), fds
        except BaseException:
            _close_all(fds)
            raise

    def pump(self, deadline: float) -> bool:
        """Read what is there, waiting for it until ``deadline``; False where nothing came."""
        try:
            if not readable(self._sock.fileno(), deadline):
                return False
            alive = receive_into(self._sock, self._decoder)
            while (frame := self._decoder.pop()) is not None:
                self._deliver(*frame)
        except BlockingIOError:
            return False
        except ProtocolError as error:
            raise DaemonUnavailable(f"the daemon broke the protocol: {error}") from None
        except OSError as error:
            raise DaemonUnavailable(f"the connection failed: {error.strerror}") from None
        if not alive:
            raise DaemonUnavailable("the daemon closed the connection")
        return True

    def _deliver(self, message: Message, fds: list[int]) -> None:
        if "event" in message:
            _close_all(fds)
            self._events.append(check(message))
        elif message.get("id") is None:
            _close_all(fds)
            raise error_of(check(message))
        elif message["id"] in self._forgotten:
            _close_all(fds)
            self._forgotten.discard(message["id"])
        else:
            self._answers[message["id"]] = (message, fds)

    def close(self) -> None:
        """Close the socket and every descriptor that nobody fetched."""
        for _message, fds in self._answers.values():
            _close_all(fds)
        self._answers.clear()
        with contextlib.suppress(OSError):
            self._decoder.close()
        self._sock.close()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
