"""The network between hosts: delays, lost segments that come late, cuts in one direction or both, connections."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from .loop import Process, loop

ETCD = "etcd"
_RETRANSMIT = 0.2
KERNEL = contextvars.Context()  # of nobody: the wires go on when processes end


class Net:
    """Which way messages can pass now, and how long each takes. Hosts are named as nodes; the store is ``etcd``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.cuts: dict[tuple[str, str], int] = {}
        self.loss = 0.0
        self.slow: dict[str, float] = {}  # host -> seconds added to what it sends and receives
        self._connections: list[Connection] = []
        self._sweep_at = 64  # so many of them are looked through for those that have closed
        self._passed: list[Callable[[], None]] = []

    def cut(self, source: str, target: str) -> None:
        """From here on nothing passes this way; cuts add up."""
        self.cuts[source, target] = self.cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        left = self.cuts.get((source, target), 0) - 1
        if left > 0:
            self.cuts[source, target] = left
        else:
            self.cuts.pop((source, target), None)

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self.cuts

    def delay(self, source: str, target: str) -> float:
        """Seconds until a message arrives; a lost one is sent again, at last every two seconds, or one that is lost ten
        times in a row would come after minutes."""
        base = self._rng.uniform(0.0002, 0.003) if source != target else self._rng.uniform(0.00005, 0.0005)
        base += self.slow.get(source, 0.0) + self.slow.get(target, 0.0)
        again = _RETRANSMIT
        while source != target and self.loss and self._rng.random() < self.loss:
            base, again = base + again, min(2 * again, 2.0)
        return base

    async def carry(self, source: str, target: str) -> None:
        """Return when a message sent now has arrived; a cut holds it up until it is healed."""
        await asyncio.sleep(self.delay(source, target))
        again = _RETRANSMIT
        while not self.passes(source, target):
            await asyncio.sleep(again)
            again = min(2 * again, 2.0)

    def connect(self, near: tuple[str, Process], far: str) -> tuple[End, End]:
        """Both ends of a new connection; the far one belongs to nobody yet."""
        connection = Connection(self, near[0], far)
        connection.ends[0].owned_by(near[1])
        if len(self._connections) >= self._sweep_at:  # not at each: a thousand nodes have tens of thousands
            self._connections = [known for known in self._connections if known.open]
            self._sweep_at = 2 * len(self._connections) + 64
        self._connections.append(connection)
        return connection.ends

    def reset(self, rng: random.Random, host: str | None = None) -> bool:
        """Break one connection (of a host) as a middle box would; False where there is none."""
        found = [c for c in self._connections if c.open and (host is None or host in c.hosts)]
        if found:
            rng.choice(found).reset()
        return bool(found)


class Connection:
    """Two ends; what one sends the other receives, in order."""

    def __init__(self, net: Net, near: str, far: str) -> None:
        self.net, self.hosts = net, (near, far)
        self.ends = End(self, 0), End(self, 1)

    @property
    def open(self) -> bool:
        return not (self.ends[0].closed or self.ends[1].closed)

    def reset(self) -> None:
        for end in self.ends:
            end.lose()


class End:
    """One end of a connection."""

    def __init__(self, connection: Connection, side: int) -> None:
        self._connection, self._side = connection, side
        self._inbox: deque[Any] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._outbox: deque[Any] = deque()
        self._sending = False
        self.closed = self.lost = False

    def owned_by(self, process: Process) -> None:
        """The kernel closes it with this process."""
        process.on_death.append(self.close)

    @property
    def peer(self) -> End:
        return self._connection.ends[1 - self._side]

    def close(self) -> None:
        """The peer reads what was sent, then end of file."""
        if not self.closed:
            self.closed = True
            self._push(EOFError("the peer closed the connection"))

    def send(self, message: Any) -> None:
        if not self.closed and not self.lost:
            self._push(message)

    def _push(self, message: Any) -> None:
        self._outbox.append(message)
        if not self._sending:
            self._sending = True
            loop().call_soon(self._carry_next, context=KERNEL)

    def _carry_next(self, again: float = _RETRANSMIT) -> None:
        source, target = self._connection.hosts[self._side], self._connection.hosts[1 - self._side]
        net = self._connection.net
        loop().call_later(net.delay(source, target), self._arrive, again, context=KERNEL)

    def _arrive(self, again: float) -> None:
        source, target = self._connection.hosts[self._side], self._connection.hosts[1 - self._side]
        if not self._connection.net.passes(source, target):
            loop().call_later(again, self._arrive, min(2 * again, 2.0), context=KERNEL)
            return
        self.peer.deliver(self._outbox.popleft())
        if self._outbox:
            self._carry_next()
        else:
            self._sending = False

    def deliver(self, message: Any) -> None:
        self._inbox.append(message)
        self._notify()

    def lose(self) -> None:
        """The connection was reset."""
        self.lost = True
        self._inbox.append(ConnectionResetError("reset"))
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def receive(self) -> Any:
        """The next message. Raises EOFError, ConnectionResetError."""
        while not self._inbox:
            self._wake = loop().create_future()
            await self._wake
        message = self._inbox[0]
        if isinstance(message, Exception):
            raise message
        return self._inbox.popleft()


class Socket:
    """What a daemon takes for an accepted socket: it has a number to hand on, and is closed afterwards."""

    def __init__(self, end: End, number: int, holder: Process) -> None:
        self.end, self.number, self.passed = end, number, False
        holder.on_death.append(self.close)

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        if not self.passed:
            self.end.close()
