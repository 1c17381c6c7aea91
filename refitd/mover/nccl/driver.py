"""The thread that owns a lane's communicator: builds it, warms its edges, and takes rounds through their steps."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from refitd.errors import CommunicatorError, TransportError
from refitd.mover.board import Board
from refitd.mover.cuda.device import Device
from refitd.mover.nccl.batches import MOST_BYTES, SLOTS, cut, next_size, room
from refitd.mover.nccl.library import SPIN_PAUSE, SPIN_SECONDS, Communicator, Library, Part, finish, settle
from refitd.mover.nccl.links import Links
from refitd.mover.nccl.promises import Promises
from refitd.mover.nccl.staging import Staging
from refitd.mover.nccl.steps import Flight, Incoming, Outgoing
from refitd.mover.round import Edge, Round, Stopped
from refitd.mover.transport.worker import Worker
from refitd.plan.program import SENT, Bucket
from refitd.stamps import stamp

REVOKE_SECONDS = 1.0
PROBE_SECONDS = 0.5
WARM_BYTES = 64


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
        self._lent: list[Outgoing] = []  # sends that kernels may be packing
        self._flights: deque[Flight] = deque()
        self._since = 0.0  # when the first of them became the first
        self._sizes: dict[Edge, int] = {}  # what a step of an edge may have

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
        self._spare = staging.spare()
        self._share()
        facts = self.board.facts
        rank, name = self._ranks.index(facts.rank), f"refit-{facts.lane}-{facts.token}"
        self._comm = library.init(len(self._ranks), rank, self._id(library), name)
        settle("init", [self._comm], self._timeout, self._tick)
        self._warm(self._comm, staging)
        for edge in self._links.edges:
            self.board.mark_warm(edge)

    def _share(self) -> None:
        """Say how much may come in a step."""
        ups = [edge for edge in self._links.edges if edge[1] == self.board.facts.rank]
        for edge in ups:
            self._links.say(edge, "room", nbytes=room(self._spare, len(ups)))

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
        assert self._staging is not None
        left = _buckets(round_, self._links.edges)
        self._round = round_
        self._promises = Promises(self.board, self._links, self._staging, round_, self._progress)
        step, offered = 0, list[Outgoing]()
        while any(left.values()) and not round_.stopped:
            if not offered:
                offered = self._offer(step, left)
            self._drain(SLOTS - 1)
            receives = self._accept(step, left)
            following = self._offer(step + 1, left) if len(self._flights) < SLOTS - 1 else []
            self._begin(offered, receives)
            step, offered = step + 1, following
        self._begin(offered, [])
        self._drain(0)
        self._promises.end(list(left))

    def _offer(self, step: int, left: Mapping[Edge, list[Bucket]]) -> list[Outgoing]:
        """Pack and announce the next step of every edge that we send over."""
        downs = [edge for edge in left if edge[0] == self.board.facts.rank and left[edge]]
        self._drain(SLOTS - 1)
        offered = []
        for edge in downs:
            batch = cut(self._round.program, left[edge], self._size(edge, len(downs)))
            del left[edge][: len(batch.buckets)]
            if (one := self._promises.offer(edge, step, batch)) is not None:
                self._lent.append(one)
                offered.append(one)
                stamp("nccl.offered", self.board.facts.rank)
        return offered

    def _size(self, edge: Edge, downs: int) -> int:
        most = min(room(self._spare, downs), self._links.room.get(edge, 0))
        return min(most, self._sizes.get(edge, most))

    def _accept(self, step: int, left: Mapping[Edge, list[Bucket]]) -> list[Incoming]:
        """Answer what comes next on every edge that we receive from."""
        receives = []
        for edge, coming in left.items():
            if edge[0] == self.board.facts.rank or not coming:
                continue
            one = self._promises.accept(edge, step, coming)
            if one is None:
                coming.clear()  # this round has no more of it
                continue
            del coming[: len(one.batch.buckets)]
            receives.append(one)
            self._held.append(one)
        return receives

    def _begin(self, offered: Sequence[Outgoing], receives: Sequence[Incoming]) -> None:
        """What both ends agreed on is begun."""
        sends = []
        for one in offered:
            if self._promises.agreed(one):
                sends.append(one)
            else:
                self._lent.remove(one)
                one.release()
        if not sends and not receives:
            return
        assert self._comm is not None
        outgoing = [part for one in sends for part in one.parts(self._number(one.edge))]
        incoming = [part for one in receives for part in one.parts(self._number(one.edge))]
        after = [one.sums.event for one in sends if one.sums.event is not None]
        if not self._flights:
            self._since = time.monotonic()
        self._flights.append(Flight(self._comm.exchange(outgoing, incoming, after), sends, receives))
        stamp("nccl.begun", self.board.facts.rank)

    def _drain(self, most: int) -> None:
        """Wait until no more than ``most`` steps are under way."""
        spun = time.monotonic() + SPIN_SECONDS
        while len(self._flights) > most:
            before = len(self._flights)
            self._progress()
            if self._flights:
                self._tick(self._flights[0].edges)
            now = time.monotonic()
            if len(self._flights) < before:
                spun = now + SPIN_SECONDS
            time.sleep(SPIN_PAUSE if now < spun else min((now - spun) / 20, 0.001))

    def _progress(self) -> bool:
        """Take every step that is under way as far as it goes without waiting; whether any is left."""
        now, landed = time.monotonic(), True
        for flight in self._flights:
            try:
                landed = self._advance(flight, landed)
            except CommunicatorError as error:
                self._blame(flight.edges, error)
        while self._flights and self._flights[0].over:
            self._resize(self._flights.popleft(), now - self._since)
            stamp("nccl.over", self.board.facts.rank)
            self._since = now
        seconds = self.board.limit.patience(self._round.options.progress_timeout)
        if self._flights and now - self._since > seconds:
            self._blame(self._flights[0].edges, CommunicatorError("exchange", f"no end within {seconds:g} s"))
        return bool(self._flights)

    def _advance(self, flight: Flight, may_land: bool) -> bool:
        """Say trailers, unpack, count; whether it has landed. Steps land in order."""
        if not flight.landed and may_land and flight.work.done():
            flight.landed = True
            stamp("nccl.landed", self.board.facts.rank)
            for received in flight.receives:
                self._promises.unpack(received)
        for sent in flight.sends:
            if not sent.trailed and self._promises.trail(sent):
                self._lent.remove(sent)
        if flight.landed:
            for received in flight.receives:
                if self._promises.check(received):
                    self._let_go(received)
            if flight.over:
                self._count_sent(flight)
        return flight.landed

    def _count_sent(self, flight: Flight) -> None:
        for bucket in (bucket for sent in flight.sends for bucket in sent.batch.buckets):
            self._round.count_tx(bucket.link, bucket.nbytes)
            self._round.mark_sent(bucket)

    def _resize(self, flight: Flight, seconds: float) -> None:
        for sent in flight.sends:
            self._sizes[sent.edge] = next_size(self._sizes.get(sent.edge, MOST_BYTES), MOST_BYTES, seconds)

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
        self.abort()
        for received in list(self._held):
            self._let_go(received)
        while self._lent:
            self._lent.pop().release()
        self._flights.clear()
        if self._staging is not None:
            self._staging.close()


def _buckets(round_: Round, edges: Collection[Edge]) -> dict[Edge, list[Bucket]]:
    """Buckets of each edge that is there, in the order of the program."""
    found: dict[Edge, list[Bucket]] = {}
    for bucket in (*round_.outgoing, *round_.incoming.values()):
        if bucket.link in SENT and (bucket.src, bucket.dst) in edges:
            found.setdefault((bucket.src, bucket.dst), []).append(bucket)
    return found
