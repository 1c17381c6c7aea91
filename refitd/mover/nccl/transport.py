"""The ``nccl`` transport: one communicator for all network edges of a lane, driven in steps by one thread.

Step k moves the k-th batch of buckets of every edge of this rank, as one group. A sender starts to pack and announces
the batch on the edge's control link; the receiver answers; what both have agreed on, both begin. So no end ever waits
inside NCCL for a peer that never meant to come, and since every rank goes through its steps in the same order, no
circle of ranks can wait for each other. The trailer follows once all has been read and the loan word is still the
same. Several steps are under way at a time: packed, on the wire, unpacked, summed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from refitd.mover.board import Board
from refitd.mover.cuda.device import Device
from refitd.mover.nccl.driver import Driver
from refitd.mover.nccl.library import Library
from refitd.mover.nccl.links import Links
from refitd.mover.round import Edge, Round
from refitd.mover.transport.tcp import Address
from refitd.plan.program import SENT

ABORT_AFTER_SECONDS = 1.5  # of waiting for the driver: then its communicator is aborted under its feet


class Group(NamedTuple):
    """``ranks``: keys of all ranks of the communicator, in its order; the first makes the id.

    ``open``: the device and the library, called in the thread that will use them. Raises DeviceError,
    CommunicatorError.
    """

    ranks: tuple[str, ...]
    open: Callable[[], tuple[Device, Library]]


class NcclTransport:
    """All network edges of one lane. The same lines as `TcpTransport`, whose connections carry its control links."""

    def __init__(
        self, board: Board, connect: Sequence[Address], accept: Sequence[str], timeout: float, group: Group
    ) -> None:
        self._board = board
        self._links = Links(board, connect, accept, timeout)
        self._driver = Driver(board, self._links, group.ranks, group.open, timeout)
        self._round: Round | None = None

    @property
    def edges(self) -> list[Edge]:
        return self._links.edges

    def connect(self) -> None:
        if self._links.edges:
            self._links.start()
            self._driver.start()

    def attach(self, src: str, sock: socket.socket) -> None:
        """Give an accepted connection to the edge from ``src``; it is closed where no such edge waits for one."""
        self._links.attach(src, sock)

    def run(self, round_: Round) -> None:
        self._round = round_
        for bucket in (*round_.outgoing, *(b for b in round_.incoming.values() if b.link in SENT)):
            edge = bucket.src, bucket.dst
            if edge in self._board.broken:
                round_.fail(edge, self._board.broken[edge])
            elif edge not in self._board.warm:
                round_.fail(edge, "edge was not built")
        self._driver.rouse()

    def progress(self) -> int:
        if self._round is None:
            return 0
        traffic = self._round.traffic
        return sum(traffic.rx[link] + traffic.tx[link] for link in SENT)

    def revoke(self) -> None:
        """The driver sees that the board stops, revokes its communicator and ends."""
        self._links.interrupt()

    def abort(self) -> None:
        """May wait for as long as NCCL's abort does: a mover that stays in here is killed by its daemon."""
        if not self._driver.ended(ABORT_AFTER_SECONDS):
            self._driver.abort()
        self._driver.join()
        self._links.join()

    def close(self) -> None:
        self._links.close()
