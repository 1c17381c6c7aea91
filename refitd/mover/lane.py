"""One lane under one token: its transports, its rounds, and what the daemon is told about them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from refitd.failpoints import armed
from refitd.hook.wire import Message
from refitd.mover.board import Board, LaneFacts
from refitd.mover.limit import NO_LIMIT, Limit
from refitd.mover.memory import Memory
from refitd.mover.round import Edge, Round, RunOptions
from refitd.mover.thread import MoverThread
from refitd.mover.transport import Transport
from refitd.mover.transport.peer import PeerTransport, Warm
from refitd.mover.transport.tcp import Address, TcpTransport
from refitd.mover.watch import PROGRESS_SECONDS, RoundWatch, state_of
from refitd.plan.program import Program

if TYPE_CHECKING:
    from refitd.mover.nccl.transport import Group, NcclTransport

IDLE_GRACE_SECONDS = 0.25  # peers of a lane that turns do not all hang up at the same moment
NOTHING: Mapping[str, Any] = MappingProxyType({"attempt": 0, "verified": [], "rx": {}, "tx": {}})
Report = Callable[[Message], None]


class Lane:
    """Commands come from one control thread; a supervisor thread of its own reports to the daemon.

    ``memories`` is the mover's table of mounted memory, shared and live. ``report`` may be called from any thread.
    ``warm`` gets kernels ready; the lane is built when it has. With a ``group`` NCCL moves what the network moves.
    """

    def __init__(
        self,
        facts: LaneFacts,
        program: Program,
        memories: Mapping[str, Memory],
        report: Report,
        connect: Sequence[Address] = (),
        accept: Sequence[str] = (),
        timeout: float = 10.0,
        limit: Limit = NO_LIMIT,
        warm: Warm | None = None,
        group: Group | None = None,
    ) -> None:
        self.facts, self._program, self._memories = facts, program, memories
        self._board = Board(facts, limit)
        self._net = _network(self._board, connect, accept, timeout, group)
        self._peer = PeerTransport(self._board, warm)
        self._transports: Sequence[Transport] = (self._net, self._peer)
        self._timeout = timeout
        self._report = report
        self._ready: dict[tuple[int, str], int] = {}
        self._told: set[Edge] = set()  # broken edges that the daemon knows of
        self._watch: RoundWatch | None = None
        self._telling = threading.Lock()
        self._supervisor = MoverThread(self._supervise, f"lane {facts.lane}")

    @property
    def token(self) -> int:
        return self.facts.token

    def start(self) -> None:
        """Begin to build; ``built`` or ``failed`` is reported."""
        for transport in self._transports:
            transport.connect()
        self._supervisor.start()

    def attach(self, src: str, sock: socket.socket) -> None:
        """Give the lane a connection that the daemon accepted; the lane owns it from here on."""
        self._net.attach(src, sock)

    def run(self, options: RunOptions, program: Program | None = None) -> None:
        """Begin a round; one that is under way is halted first. ``program`` replaces the built one for this round."""
        previous = self._board.round
        if previous is not None and options.attempt <= previous.options.attempt:
            self.refuse(options.attempt, f"stale attempt: {previous.options.attempt} is current")
            return
        if previous is not None:
            previous.halt()
        round_ = Round(program or self._program, options, self._memories, self._board.cond)
        with self._board.cond:
            for transport in self._transports:
                transport.run(round_)
            round_.ready = {src: word for (attempt, src), word in self._ready.items() if attempt == options.attempt}
            self._ready = {key: word for key, word in self._ready.items() if key[0] > options.attempt}
            self._board.round = round_
            if not armed():
                round_.open()
            if armed() or round_.finished():  # the supervisor opens what a tester may hold, and tells what is done
                self._board.cond.notify_all()
        self._peer.hurry(round_)
        if round_.finished() and not round_.held:
            self._tell()

    def ready(self, attempt: int, src: str, word: int) -> None:
        """Stage 1 of ``attempt`` may read ``src`` while its loan word is ``word``; may come before the run does."""
        with self._board.cond:
            round_ = self._board.round
            if round_ is not None and attempt == round_.options.attempt:
                round_.ready[src] = word
            elif round_ is None or attempt > round_.options.attempt:
                self._ready[attempt, src] = word
            self._board.cond.notify_all()

    def let_go(self) -> None:
        """This rank's memory is mounted no more: on return nobody writes there. A round that was to has failed then."""
        round_ = self._board.round
        if round_ is None or round_.stopped or len(round_.verified) == len(round_.incoming):
            return
        round_.halt()
        self._send("failed", edge=None, reason=f"memory of {self.facts.rank} was let go of", **state_of(round_))

    def stand_by(self) -> bool:
        """A run is to come within moments; False where nothing can be done for it. Raises DeviceError."""
        return not self._board.broken and self._peer.stand_by()

    @property
    def hung(self) -> bool:
        """Whether it waits for a device that will not answer any more."""
        return self._peer.hung

    def heed_store(self, away: bool) -> None:
        """Count no time against neighbours while ``away``."""
        self._board.store_away = away

    def revoke(self) -> Mapping[str, Any]:
        """Stop everything; on return nothing of the lane is read or written (I5).

        Returns the last round's attempt, verified bucket ids, and payload bytes by link (see `NOTHING`).
        """
        self._board.stop()
        for transport in self._transports:
            transport.revoke()
        round_ = self._board.round
        if round_ is not None:
            round_.stop()
        for transport in self._transports:  # first: a call of a library that hangs keeps memory until it is aborted
            transport.abort()
        if round_ is not None:
            round_.halt()
        for transport in self._transports:
            transport.close()
        self._supervisor.join()
        return NOTHING if round_ is None else state_of(round_)

    def refuse(self, attempt: int, reason: str) -> None:
        """Report that a command was not carried out."""
        self._send("failed", attempt=attempt, edge=None, reason=reason, verified=[])

    # -- the supervisor

    def _send(self, kind: str, **fields: Any) -> None:
        self._report({"kind": kind, "lane": self.facts.lane, "token": self.facts.token, **fields})

    def _supervise(self) -> None:
        self._watch_build()
        while self._wait_for_news():
            if (round_ := self._board.round) is not None and not round_.opened:
                round_.open()
            self._tell()
            if self._untold() and self._wait_grace():
                self._report_idle_breaks()

    def _tell(self) -> None:
        """Say what is new of the current round; what is done is said by the thread that did it, which is awake."""
        with self._telling:
            if (round_ := self._board.round) is None:
                return
            if self._watch is None or self._watch.round is not round_:
                self._told |= self._watch.told & self._board.broken.keys() if self._watch is not None else set()
                self._watch = RoundWatch(round_, self._send)
            self._watch.report()

    def _watch_build(self) -> None:
        edges, board = {*self._net.edges, *self._peer.edges}, self._board
        with board.cond:
            board.cond.wait_for(
                lambda: board.stopping or board.broken or edges <= board.warm, self._timeout + PROGRESS_SECONDS
            )
            stopping, broken, cold = board.stopping, dict(board.broken), edges - board.warm
        if not stopping and not broken and not cold:
            self._send("built")
        elif not stopping:
            late = f"not built within {self._timeout:g} s: no connection"
            for edge, reason in (broken or dict.fromkeys(sorted(cold), late)).items():
                self._report_break(edge, reason)

    def _wait_for_news(self) -> bool:
        """False when the lane stops. Returns at least every `PROGRESS_SECONDS`."""
        board = self._board
        with board.cond:
            board.cond.wait_for(lambda: board.stopping or self._has_news(), PROGRESS_SECONDS)
            return not board.stopping

    def _has_news(self) -> bool:
        round_, watch = self._board.round, self._watch
        new_round = round_ is not None and (watch is None or watch.round is not round_)
        return new_round or (watch is not None and watch.has_news()) or bool(self._untold())

    def _untold(self) -> set[Edge]:
        told = self._told | (self._watch.told if self._watch is not None else set())
        return self._board.broken.keys() - told

    def _wait_grace(self) -> bool:
        """Wait whether the break turns out to be part of a turn; False when it did."""
        with self._board.cond:
            return not self._board.cond.wait_for(lambda: self._board.stopping, IDLE_GRACE_SECONDS)

    def _report_idle_breaks(self) -> None:
        """Edges that broke outside a round are reported under attempt 0; inside one the round has told."""
        for edge in sorted(self._untold()):
            self._report_break(edge, self._board.broken[edge])

    def _report_break(self, edge: Edge, reason: str) -> None:
        self._told.add(edge)
        self._send("failed", attempt=0, edge=list(edge), reason=reason, verified=[])


def _network(
    board: Board, connect: Sequence[Address], accept: Sequence[str], timeout: float, group: Group | None
) -> TcpTransport | NcclTransport:
    if group is None:
        return TcpTransport(board, connect, accept, timeout)
    from refitd.mover.nccl.transport import NcclTransport  # a mover without a device never loads it

    return NcclTransport(board, connect, accept, timeout, group)
