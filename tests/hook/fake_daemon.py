"""A daemon made of the real HookServer and a scripted handler, in a thread of the test."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refitd.errors import Refused
from refitd.hook.page import ControlPage
from refitd.hook.server import Fds, HookServer, Session
from refitd.hook.wire import Connection

Reply = Callable[[Session, dict[str, Any], Fds], tuple[dict[str, Any], list[int]]]
HELLO = {
    "id": 1, "method": "hello", "proto": 1, "client": "refitd", "job": "grpo", "side": "engine", "group": "r0",
    "rank": 0, "world": 1, "incarnation": "0" * 32,
}  # fmt: skip
TICKET = {
    "kind": "receive", "job": "grpo", "replica": "r0", "generation": 1, "revision": 7, "step": 3, "token": 5,
}  # fmt: skip
REPORT = {
    "generation": 1, "revision": 7, "step": 3, "committed": ["r0"], "missing": {"r1": "its lane is turning"},
    "closed": "all replicas are accounted for",
}  # fmt: skip


class Plain:
    """A layout that says nothing but its storages."""

    def __init__(self, storages: dict[str, tuple[int, str]], keep: tuple[str, ...] = ()) -> None:
        self.storages, self.keep = storages, keep

    def to_bytes(self) -> bytes:
        return repr(sorted(self.storages)).encode()


class FakeDaemon:
    """Records requests, answers by script, speaks events on demand."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.replies: dict[str, Reply] = {}
        self.requests: list[dict[str, Any]] = []
        self.ends: list[tuple[str, str]] = []
        self.faults: list[tuple[str, dict[str, Any]]] = []
        self.counted: list[str] = []
        self.sessions: dict[str, Session] = {}
        self._changed = threading.Condition()
        self._thaw = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server: HookServer | None = None

    def start(self) -> FakeDaemon:
        async def serve() -> None:
            told = {"log": lambda event, facts: self.faults.append((event, facts)), "count": self.counted.append}
            options = {"node": "n0", **told, **self.options}
            self.server = HookServer(self.path, self, **options)
            await self.server.start()

        self.run(serve())
        return self

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def stop(self) -> None:
        if self.server is not None:
            self.run(self.server.stop())
            self.server = None

    def freeze(self) -> None:
        """As SIGSTOP would: nothing is answered and no heartbeat written until `thaw`."""
        entered = threading.Event()
        self._thaw.clear()
        self._loop.call_soon_threadsafe(lambda: (entered.set(), self._thaw.wait(20)))
        entered.wait(10)

    def thaw(self) -> None:
        self._thaw.set()

    def end(self) -> None:
        self.thaw()
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the daemon's thread."""

        async def run() -> None:
            function()

        self.run(run())

    def say(self, key: str, event: str, **fields: Any) -> None:
        self.call(lambda: self.sessions[key].event(event, **fields))

    def page(self, key: str) -> ControlPage:
        page = self.sessions[key].page
        assert page is not None
        return page

    def seen(self, method: str, count: int = 1, timeout: float = 10.0) -> dict[str, Any]:
        """The ``count``-th request of that method (from 1), waited for."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(method)) >= count, timeout), (method, self.requests)
        return self.of(method)[count - 1]

    def of(self, method: str) -> list[dict[str, Any]]:
        return [request for request in self.requests if request["method"] == method]

    def until(self, test: Callable[[], bool], timeout: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(test, timeout)

    def connected(self, session: Session) -> None:
        if session.key in self.sessions:
            raise Refused("rank", "a rank that nobody has claimed", session.key)
        self.sessions[session.key] = session

    async def request(self, session: Session, message: dict[str, Any], fds: Fds) -> tuple[dict[str, Any], list[int]]:
        method = message["method"]
        with self._changed:
            self.requests.append(message)
            self._changed.notify_all()
        if method in self.replies:
            return self.replies[method](session, message, fds)
        return {"register": {"digest": "d"}, "report": {"report": None}}.get(method, {}), []

    def disconnected(self, session: Session, reason: str) -> None:
        del self.sessions[session.key]
        with self._changed:
            self.ends.append((session.key, reason))
            self._changed.notify_all()


class Raw:
    """A client that speaks bytes."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(path))
        self.wire = Connection(self.sock)
        self.page = ControlPage.create()

    def hello(self, **changes: Any) -> dict[str, Any]:
        fds = [] if changes.get("side") == "admin" else [self.page.fd]
        return self.ask({**HELLO, **changes}, fds)

    def ask(self, message: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        self.wire.send(message, fds or ())
        return self.wire.receive(10)[0]

    def ended(self) -> bool:
        try:
            self.wire.receive(10)
        except (EOFError, ConnectionResetError):
            return True
        return False

    def close(self) -> None:
        self.wire.close()
        self.page.close()


class Mover:
    """A process that stands for a mover, and the answer to ``receive`` that carries its pidfd."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        self.pidfd = os.pidfd_open(self.child.pid)

    def reply(self, session: Session, message: dict[str, Any], fds: Fds) -> tuple[dict[str, Any], list[int]]:
        return {}, [self.pidfd]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


def soon(test: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait until ``test`` holds."""
    deadline = time.monotonic() + timeout
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.005)
