"""The driver's picture of its clients: trainers, engines, and replicas that switch together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refitd.demo.cluster import Daemon
from refitd.demo.ledger import Ledger
from refitd.hook.wire import Decoder, Message, encode

RETRY_SECONDS = 0.2
LOOK_SECONDS = 0.25

OnMessage = Callable[["Client", Message], None]


@dataclass
class Client:
    """A trainer or an engine process. ``down``: dead or stopped on purpose; ``deaths`` counts ends nobody ordered."""

    name: str
    options: dict[str, Any]
    daemon: Daemon
    log: Path
    pid: int = 0
    ready: bool = False
    down: bool = False
    lives: int = 0
    past: list[Message] = field(default_factory=list)  # what lives before this one have said since it began
    _sock: socket.socket | None = None
    _before: socket.socket | None = None
    _pump: asyncio.Task[None] | None = None

    @property
    def trains(self) -> bool:
        return bool(self.options["role"] == "trainer")

    @property
    def usable(self) -> bool:
        """Whether it and the daemon of its node run."""
        return self.ready and not self.down and not self.daemon.down

    def attach(self, pid: int, sock: socket.socket, on_message: OnMessage, on_end: Callable[[Client], None]) -> None:
        """Begin a life as process ``pid`` with ``sock`` to talk to it."""
        self.pid, self._before, self._sock, self.ready, self.down = pid, self._sock, sock, False, False
        self.lives += 1
        sock.setblocking(False)
        self._pump = asyncio.create_task(self._read(sock, on_message, on_end))

    async def _read(self, sock: socket.socket, on_message: OnMessage, on_end: Callable[[Client], None]) -> None:
        loop, decoder = asyncio.get_running_loop(), Decoder()
        with sock:
            try:
                while data := await loop.sock_recv(sock, 1 << 16):
                    decoder.feed(data)
                    while (frame := decoder.pop()) is not None:
                        if self._sock is sock:
                            on_message(self, frame[0])
                        else:
                            self.past.append(frame[0])
            except ConnectionError:
                pass
        if self._sock is sock:
            self._sock, self.ready = None, False
            on_end(self)

    def tell(self, **command: Any) -> None:
        """Send a command; a client that is gone hears nothing."""
        if self._sock is not None:
            try:
                self._sock.send(encode(command))
            except OSError:
                self.ready = False

    def tell_before(self, **command: Any) -> None:
        """Send a command to the life before this one, where that was left standing still."""
        if self._before is not None:
            self._before.send(encode(command))

    async def close(self) -> None:
        """Hang up and wait for the pump."""
        if self._pump is not None:
            self._sock = None
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)


@dataclass
class Trainer(Client):
    """What a trainer last said, by step."""

    released: dict[int, str] = field(default_factory=dict)
    reported: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)

    def hear(self, message: Message) -> None:
        match message["event"]:
            case "ready":
                self.ready = True
            case "publish":
                self.published[message["step"]] = message["at"]
            case "released":
                self.released[message["step"]] = message["outcome"]
            case "report":
                self.reported[message["step"]] = message["report"]


@dataclass
class Engine(Client):
    """What an engine rank serves (``step``; None while it does not), and the publication that it took last."""

    step: int | None = None
    taken: tuple[int, int] | None = None
    switched_at: float = 0.0
    dumped: str = ""

    @property
    def replica(self) -> str:
        return str(self.options["replica"])

    @property
    def rank(self) -> int:
        return int(self.options["rank"])


@dataclass
class Replica:
    """Engine ranks that step together: a ticket goes to all of them, and they serve again when all took it."""

    name: str
    engines: list[Engine]
    ledger: Ledger
    ticket: dict[str, Any] | None = None
    spell: int = 0  # of serving together; ends when the replica is held
    failures: list[str] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return all(engine.usable for engine in self.engines)

    @property
    def step(self) -> int | None:
        """The step that all ranks serve; None where they do not serve as one."""
        steps = {engine.step for engine in self.engines}
        return steps.pop() if len(steps) == 1 else None

    @property
    def switched_at(self) -> float:
        """When the last rank had the newest weights (CLOCK_MONOTONIC)."""
        return max(engine.switched_at for engine in self.engines)

    def hear(self, engine: Engine, message: Message) -> None:
        """Take in what one of the ranks said."""
        match message["event"]:
            case "ready":
                engine.ready = True
                if engine.rank:  # a new lead asks for its ticket itself: the open one may be an older publication's
                    self._repeat(engine)
            case "ticket":
                self.hold()
                self.ticket = message["ticket"]
                for each in self.engines:
                    each.taken = None
                    each.tell(do="ticket", ticket=self.ticket)
            case "failed":
                self.failures.append(f"{engine.name}: {message['why']}")
                if engine.rank:  # the lead asks for its next ticket itself
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._repeat, engine)
            case "switched":
                self._switched(engine, message)
            case "held":
                self.ledger.held(self.name, engine.rank, message["step"], message["digest"])
            case "serving" if message["spell"] != self.spell:  # it was on its way while we held the replica
                self.ledger.held(self.name, engine.rank, message["step"], message["digest"])
            case "serving":
                engine.step = message["step"]
                self.ledger.served(self.name, engine.rank, message["step"], message["digest"])
            case "dumped":
                engine.dumped = message["path"]

    def hold(self) -> None:
        """No rank steps: one of them died, or all are about to switch."""
        self.ledger.hold(self.name)
        self.spell += 1
        for each in self.engines:
            each.step = None
            each.tell(do="hold")

    def ended(self, engine: Engine) -> None:
        """A rank is gone, with what it had taken; what the others took under this ticket is theirs."""
        engine.taken = None
        self.hold()

    def _repeat(self, engine: Engine) -> None:
        """Give the ticket to a rank that missed it: its peers may be waiting, in the middle of a receive."""
        if self.ticket is not None and self.ticket["kind"] == "receive" and engine.taken is None:
            engine.tell(do="ticket", ticket=self.ticket)

    def _switched(self, engine: Engine, message: Message) -> None:
        ticket = message["ticket"]
        engine.taken, engine.switched_at = (ticket["generation"], ticket["revision"]), message["at"]
        if all(each.taken == engine.taken for each in self.engines):
            self.ticket = None
            for each in self.engines:
                each.tell(do="serve", spell=self.spell)


async def until(condition: Callable[[], bool], changed: asyncio.Event, seconds: float) -> bool:
    """Wait until ``condition`` holds, looking whenever ``changed`` is set; False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left, LOOK_SECONDS)):  # wait_for of Python 3.11 may swallow a cancellation
                await changed.wait()
    return True
