"""Data connections that came in, on their way to the mover they are for."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refitd.daemon.job import Job

WAIT_SECONDS = 10.0


class Edges:
    """A peer may be quicker than our own watch: its connection waits here until our lane has the same token."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._waiting: list[tuple[float, Mapping[str, Any], socket.socket]] = []

    def take(self, hello: Mapping[str, Any], sock: socket.socket) -> None:
        """Hand a connection on, keep it for later, or close it where its token is old; owns ``sock``."""
        if not self._hand_over(hello, sock):
            self._waiting.append((time.monotonic() + WAIT_SECONDS, hello, sock))

    def expire(self) -> None:
        """Try again; close what has waited too long."""
        now, waiting = time.monotonic(), self._waiting
        self._waiting = []
        for deadline, hello, sock in waiting:
            if now > deadline:
                sock.close()
            elif not self._hand_over(hello, sock):
                self._waiting.append((deadline, hello, sock))

    def close(self) -> None:
        for _deadline, _hello, sock in self._waiting:
            sock.close()
        self._waiting.clear()

    def _hand_over(self, hello: Mapping[str, Any], sock: socket.socket) -> bool:
        lane, token = self._job.lanes.get(str(hello.get("lane"))), hello.get("token")
        if type(token) is not int or (lane and token < lane.token):
            sock.close()
            return True
        if lane is None or lane.built is None or lane.token != token:
            return False
        handle = lane.built.handles.get(str(hello.get("dst")))
        if handle is not None:
            message = {"kind": "edge", "lane": lane.replica, "token": token, "src": str(hello.get("src"))}
            handle.send(message, [sock.fileno()])
        sock.close()
        return True
