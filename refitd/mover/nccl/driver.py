"""The thread that owns a lane's communicator: builds it, warms its edges, and takes rounds through their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from refitd.errors import CommunicatorError, TransportError
from refitd.mover.board import Board
from refitd.mover.cuda.device import Device
from refitd.mover.nccl.library import Communicator, Library, Part, Work, finish, settle
from refitd.mover.nccl.links import Links
from refitd.mover.nccl.promises import Incoming, Outgoing, Promises
from refitd.mover.nccl.staging import Staging
from refitd.mover.round import Edge, Round, Stopped
from refitd.mover.transport.worker import Worker
from refitd.plan.program import SENT, Bucket

REVOKE_SECONDS = 1.0
PROBE_SECONDS = 0.5
WARM_BYTES = 64
Steps = Mapping[Edge, Sequence[Bucket]]


class _Flight(NamedTuple):
    """One step on the wire."""

    work: Work
    sends: Sequence[Outgoing]
    receives: Sequence[Incoming]

    @property
    def edges(self) -> list[Edge]:
        return [*(one.edge for one in self.sends), *(one.edge for one in self.receives)]


class Driver(Worker):
    """``ranks`` are the communicator's; ``open_`` gives device and library."""

    def __init__(
        self,
        board: Board,
        links: Links,
        ranks: Sequence[str],
        open_: Callable[[], tuple[Device, Library]],
        timeout: float,
    ) -> None:
        super().__init__(board, (board.facts.rank, board.facts.rank))
        self._links, self._ranks, self._open, self._timeout = links, ranks, open_, timeout
        self._comm: Communicator | None = None
        self._staging: Staging | None = None
        self._held: list[Incoming] = []  # receives that NCCL may be writing into

    def ended(self, seconds: float) -> bool:
        """Wait for the driver's end; whether it came."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def abort(self) -> None:
        """From another thread: whatever the driver is in ends. Returns when NCCL does."""
        if self._comm is not None:
            with contextlib.suppress(CommunicatorError):
                self._comm.abort()

    def _serve(self) -> None:
        try:
            self._build()
            round_: Round | None = None
            while (round_ := self.board.next_round(round_, self.idle)) is not None:
                self._run(round_)
        except CommunicatorError as error:
            for edge in self._links.edges:
                self.board.break_edge(edge, str(error))
        except TransportError as error:
            self.board.break_edge(error.edge, error.reason)

    # -- building

    def _build(self) -> None:
        """Links, id, communicator, and a few bytes over every edge: connections are made here, never in a refit."""
        if not self._links.wait(lambda: self._links.ready() or bool(self.board.broken), float("inf")):
            raise Stopped
        if self.board.broken:
            raise Stopped  # it has been told, and the lane will turn
        device, library = self._open()
        device.activate()
        self._staging = staging = Staging(device)
        facts = self.board.facts
        rank, name = self._ranks.index(facts.rank), f"refit-{facts.lane}-{facts.token}"
        self._comm = library.init(len(self._ranks), rank, self._id(library), name)
        settle("init", [self._comm], self._timeout, self._tick)
        self._warm(self._comm, staging)
        for edge in self._links.edges:
            self.board.mark_warm(edge)

    def _id(self, library: Library) -> bytes:
        """Made by the first rank, and passed on by everybody who hears it: not all ranks have a link to the first."""
        if self._ranks[0] == self.board.facts.rank:
            self._links.id = library.unique_id().hex()
        elif not self._links.wait(lambda: bool(self._links.id or self.board.broken), self._timeout):
            raise CommunicatorError("init", f"no id from {self._ranks[0]} within {self._timeout:g} s")
        if self.board.broken:
            raise Stopped
        for edge in self._links.edges:
            self._links.say(edge, "id", id=self._links.id)
        return bytes.fromhex(self._links.id)

    def _warm(self, comm: Communicator, staging: Staging) -> None:
        parts = {edge: Part(self._number(edge), staging.slot(edge, 0, WARM_BYTES), WARM_BYTES)
                 for edge in self._links.edges}  # fmt: skip
        sends = [part for edge, part in parts.items() if edge[0] == self.board.facts.rank]
        receives = [part for edge, part in parts.items() if edge[0] != self.board.facts.rank]
        finish("warm", comm.exchange(sends, receives), self._timeout, self._tick)

    def _number(self, edge: Edge) -> int:
        return self._ranks.index(self._links.peer(edge))

    def _tick(self, edges: Collection[Edge] = ()) -> None:
        """Raises Stopped where the lane stops, TransportError where a link of ``edges`` (or any, of none) is gone."""
        if self.board.stopping:
            raise Stopped
        broken = self.board.broken
        if gone := next((edge for edge in broken if edge in edges or not edges), None):
            raise TransportError(gone, broken[gone])

    # -- running

    def _run(self, round_: Round) -> None:
        steps = _steps(round_, self._links.edges)
        assert self._staging is not None
        promises = Promises(self.board, self._links, self._staging, round_)
        flight: _Flight | None = None
        for step in range(max(map(len, steps.values()), default=0)):
            if round_.stopped:
                break
            due = {edge: buckets[step] for edge, buckets in steps.items() if step < len(buckets)}
            following = self._step(promises, step, due)
            self._land(round_, promises, flight)
            flight = following
        self._land(round_, promises, flight)

    def _step(self, promises: Promises, step: int, due: Mapping[Edge, Bucket]) -> _Flight | None:
        """Announce ours, answer theirs, begin what both ends agreed on. What was promised is begun."""
        rank = self.board.facts.rank
        offered = [promises.offer(edge, step, bucket) for edge, bucket in due.items() if edge[0] == rank]
        receives = []
        for edge, bucket in due.items():
            if edge[0] != rank and (coming := promises.accept(edge, step, bucket)) is not None:
                receives.append(coming)
                self._held.append(coming)
        sends = [one for one in offered if one is not None and promises.agreed(one)]
        if not sends and not receives:
            return None
        assert self._comm is not None
        outgoing = [Part(self._number(one.edge), one.address, one.bucket.nbytes) for one in sends]
        incoming = [Part(self._number(one.edge), one.address, one.bucket.nbytes) for one in receives]
        return _Flight(self._comm.exchange(outgoing, incoming), sends, receives)

    def _land(self, round_: Round, promises: Promises, flight: _Flight | None) -> None:
        if flight is None:
            return
        seconds, edges = round_.options.progress_timeout, flight.edges
        try:
            finish("exchange", flight.work, seconds, lambda: self._tick(edges))
        except CommunicatorError as error:
            self._blame(edges, error)
        for sent in flight.sends:
            round_.count_tx(sent.bucket.link, sent.bucket.nbytes)
            round_.mark_sent(sent.bucket)
        for received in flight.receives:
            with contextlib.suppress(Stopped):
                promises.check(received)
            self._let_go(received)

    def _blame(self, edges: Collection[Edge], error: CommunicatorError) -> None:
        """NCCL does not say who keeps it waiting: it is who does not answer on his link, else it may be anybody."""
        suspects = self._links.silent(edges, PROBE_SECONDS)
        for edge in suspects:
            self.board.break_edge(edge, f"{error}: its peer is silent")
        if suspects:
            raise Stopped
        for edge in edges:
            self.board.break_edge(edge, str(error))
        raise Stopped

    def _let_go(self, received: Incoming) -> None:
        if received in self._held:
            self._held.remove(received)
            received.release()

    # -- ending

    def _interrupt(self) -> None:
        """It sees that the board stops, at the latest after a tick."""

    def _release(self) -> None:
        """Mounted memory is let go of only when nothing can write to it any more."""
        if self._comm is not None:
            with contextlib.suppress(CommunicatorError):
                self._comm.revoke()
                settle("revoke", [self._comm], REVOKE_SECONDS, lambda: None)
            with contextlib.suppress(CommunicatorError):
                self._comm.abort()
        for received in list(self._held):
            self._let_go(received)
        if self._staging is not None:
            self._staging.close()


def _steps(round_: Round, edges: Collection[Edge]) -> Steps:
    """Buckets of each edge that is there, in the order of the program."""
    found: dict[Edge, list[Bucket]] = {}
    for bucket in (*round_.outgoing, *round_.incoming.values()):
        if bucket.link in SENT and (bucket.src, bucket.dst) in edges:
            found.setdefault((bucket.src, bucket.dst), []).append(bucket)
    return found
