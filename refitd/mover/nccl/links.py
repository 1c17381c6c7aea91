"""Control links beside a communicator: a connection an edge, proven and greeted as those of TCP edges.

They carry what NCCL cannot: the communicator's id, a step's header, the answer to it, its trailer, and by their end
the news of a peer's death, which NCCL tells late or never. Payload goes by NCCL alone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from refitd.errors import ProtocolError, TransportError
from refitd.hook import wire
from refitd.hook.messages import COUNT, FLAG, TEXT, Fields, check_fields
from refitd.hook.wire import Message
from refitd.mover.board import Board
from refitd.mover.round import Edge, Stopped
from refitd.mover.transport.receiver import Receiver
from refitd.mover.transport.sender import Sender
from refitd.mover.transport.stream import TICK_SECONDS, Stream
from refitd.mover.transport.tcp import Address

# A link's words. Down (from the sender of an edge): ``bucket``, ``void`` and ``trailer``; up: ``room`` and ``answer``;
# both ways: the others. A ``bucket`` is the first of ``count``, which go together.
WORDS: Mapping[str, Fields] = {
    "id": {"id": TEXT},
    "bucket": {
        "attempt": COUNT, "generation": COUNT, "revision": COUNT, "bucket": COUNT, "last": COUNT, "count": COUNT,
        "nbytes": COUNT, "plan": TEXT, "token": COUNT,
    },
    "trailer": {"attempt": COUNT, "bucket": COUNT, "checksums": TEXT, "reason": TEXT},
    "room": {"nbytes": COUNT},
    "void": {"attempt": COUNT, "reason": TEXT},
    "probe": {},
    "alive": {},
    "answer": {"attempt": COUNT, "bucket": COUNT, "go": FLAG, "whole": FLAG, "reason": TEXT},
}  # fmt: skip
_QUEUES = {"bucket": "bucket", "void": "bucket", "trailer": "trailer", "answer": "answer"}
_GLANCE_SECONDS = 0.0005  # between two looks at what else is under way


class _Link(Protocol):
    edge: Edge

    def start(self) -> None: ...
    def interrupt(self) -> None: ...
    def join(self) -> None: ...


class Down(Sender):
    """The sender's end: connects, greets, then listens."""

    def __init__(self, board: Board, dst: str, address: tuple[str, int], timeout: float, links: Links) -> None:
        super().__init__(board, dst, address, timeout)
        self._links = links

    def _serve(self) -> None:
        self._deadline = time.monotonic() + self._timeout
        stream = self._warm()
        self._deadline = None
        self._links.listen(self.edge, stream)


class Up(Receiver):
    """The receiver's end: takes the connection that the daemon accepted, greets, then listens."""

    def __init__(self, board: Board, src: str, links: Links) -> None:
        super().__init__(board, src)
        self._links = links

    def _serve(self) -> None:
        self._links.listen(self.edge, self._warm())

    def _tick(self, ticks: int) -> None:  # noqa: ARG002
        """Silence is judged by whoever waits for a word."""
        if self.board.stopping:
            raise Stopped


class Links:
    """All control links of a lane. Words that came wait here, by edge, until the driver takes them."""

    def __init__(self, board: Board, connect: Sequence[Address], accept: Sequence[str], timeout: float) -> None:
        self._board = board
        self._downs = [Down(board, to.dst, (to.host, to.port), timeout, self) for to in connect]
        self._ups = {src: Up(board, src, self) for src in accept}
        self._streams: dict[Edge, Stream] = {}
        self._sending = {link.edge: threading.Lock() for link in self._all()}
        self.id = ""  # the communicator's, once somebody has said it
        self._alive: set[Edge] = set()
        self.room: dict[Edge, int] = {}  # what a step may have at most, as its receiver has said
        self.edges = [link.edge for link in self._all()]
        self._heard: dict[tuple[Edge, str], deque[Message]] = {
            (edge, kind): deque() for edge in self.edges for kind in _QUEUES.values()
        }
        self._refused: dict[Edge, tuple[int, str]] = dict.fromkeys(self.edges, (-1, ""))  # attempts up to it, and why

    def _all(self) -> list[_Link]:
        return [*self._downs, *self._ups.values()]

    def peer(self, edge: Edge) -> str:
        """Who is at the other end."""
        return edge[1] if edge[0] == self._board.facts.rank else edge[0]

    def start(self) -> None:
        for link in self._all():
            link.start()

    def attach(self, src: str, sock: socket.socket) -> None:
        """Give an accepted connection to the edge from ``src``; it is closed where no such edge waits for one."""
        up = self._ups.get(src)
        if up is None or not up.attach(sock):
            sock.close()

    def ready(self) -> bool:
        """Whether every edge has its link. The board's condition is held."""
        return len(self._streams) == len(self.edges)

    def listen(self, edge: Edge, stream: Stream) -> None:
        """For a link's thread: take in words until the peer is gone. Raises EOFError, OSError, ProtocolError."""
        with self._board.cond:
            self._streams[edge] = stream
            self._board.cond.notify_all()
        while True:
            word = stream.receive_frame()
            kind = word.get("kind")
            if not isinstance(kind, str) or kind not in WORDS:
                raise ProtocolError("word of a link", "one of " + ", ".join(WORDS), repr(kind)[:80])
            check_fields(word, WORDS[kind])
            self._hear(edge, kind, word)

    def _hear(self, edge: Edge, kind: str, word: Message) -> None:
        if kind == "probe":
            self.say(edge, "alive")
            return
        with self._board.cond:
            if kind == "id":
                self.id = self.id or word["id"]
            elif kind == "room":
                self.room[edge] = word["nbytes"]
            elif kind == "alive":
                self._alive.add(edge)
            elif _QUEUES[kind] == "bucket" and word["attempt"] <= self._refused[edge][0]:
                self._deny(edge, word)
            else:
                self._heard[edge, _QUEUES[kind]].append(word)
            self._board.cond.notify_all()

    def refuse(self, edge: Edge, attempt: int, reason: str) -> None:
        """Answer no to whatever the sender of ``edge`` has announced, and will, under ``attempt`` or before it."""
        with self._board.cond:
            if attempt > self._refused[edge][0]:
                self._refused[edge] = attempt, reason
            words = self._heard[edge, "bucket"]
            while words and words[0]["attempt"] <= attempt:
                self._deny(edge, words.popleft())

    def _deny(self, edge: Edge, word: Message) -> None:
        """An edge that has broken meanwhile has been told already."""
        if word["kind"] == "bucket":
            named = {"attempt": word["attempt"], "bucket": word["bucket"]}
            with contextlib.suppress(TransportError):
                self.say(edge, "answer", go=False, whole=False, reason=self._refused[edge][1], **named)

    def say(self, edge: Edge, kind: str, **fields: object) -> None:
        """Send a word. Raises TransportError where the link has broken."""
        try:
            with self._sending[edge]:
                self._streams[edge].send(memoryview(wire.encode({"kind": kind, **fields})))
        except OSError as error:
            raise TransportError(edge, f"{type(error).__name__}: {error}") from error

    def next(self, edge: Edge, queue: str) -> Message | None:
        """The oldest word of an edge, left where it is: ``bucket`` (or void), ``trailer`` or ``answer``.

        The board's condition is held.
        """
        words = self._heard[edge, queue]
        return words[0] if words else None

    def take(self, edge: Edge, queue: str) -> Message:
        """The oldest such word of an edge. The board's condition is held."""
        return self._heard[edge, queue].popleft()

    def silent(self, edges: Collection[Edge], seconds: float) -> list[Edge]:
        """Those of ``edges`` whose peers do not say within ``seconds`` that they live. Raises Stopped."""
        self._alive.clear()
        asked = [edge for edge in edges if self._asked(edge)]
        self.wait(lambda: self._alive.issuperset(asked), seconds)
        return [edge for edge in edges if edge not in self._alive]

    def _asked(self, edge: Edge) -> bool:
        try:
            self.say(edge, "probe")
        except TransportError:
            return False
        return True

    def wait(self, done: Callable[[], bool], seconds: float, meanwhile: Callable[[], bool] | None = None) -> bool:
        """Wait for ``done``, which is asked with the board's condition held. False after ``seconds`` of silence.

        ``meanwhile`` is called again and again, and says whether there is more for it to do. Ticks are counted, not
        clocked. Raises Stopped where the lane stops.
        """
        silent, board = 0.0, self._board
        while True:
            busy = meanwhile is not None and meanwhile()
            pause = _GLANCE_SECONDS if busy else TICK_SECONDS
            with board.cond:
                if done():
                    return True
                if board.stopping:
                    raise Stopped
                if not board.cond.wait(pause):
                    silent += pause
                if done():
                    return True
            if silent >= seconds:
                return False

    def interrupt(self) -> None:
        for link in self._all():
            link.interrupt()

    def join(self) -> None:
        for link in self._all():
            link.join()

    def close(self) -> None:
        for up in self._ups.values():
            up.drop_pending()
