"""Network edges over TCP: one connection an edge and lane token, one thread an edge. Cancel is shutdown."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refitd.mover.board import Board
from refitd.mover.round import Edge, Round
from refitd.mover.transport.receiver import Receiver
from refitd.mover.transport.sender import Sender
from refitd.plan.program import NETWORK


@dataclass(frozen=True, slots=True)
class Address:
    """Where the daemon of rank ``dst`` takes data connections."""

    dst: str
    host: str
    port: int


class TcpTransport:
    """All network edges of one lane: `Sender`s to ``connect``, `Receiver`s from ``accept``."""

    def __init__(self, board: Board, connect: Sequence[Address], accept: Sequence[str], timeout: float) -> None:
        self._board = board
        self._senders = [Sender(board, address.dst, (address.host, address.port), timeout) for address in connect]
        self._receivers: Mapping[str, Receiver] = {src: Receiver(board, src) for src in accept}
        self._round: Round | None = None

    @property
    def edges(self) -> list[Edge]:
        return [worker.edge for worker in (*self._senders, *self._receivers.values())]

    def connect(self) -> None:
        for worker in (*self._senders, *self._receivers.values()):
            worker.start()

    def attach(self, src: str, sock: socket.socket) -> None:
        """Give an accepted connection to the edge from ``src``; it is closed where no such edge waits for one."""
        receiver = self._receivers.get(src)
        if receiver is None or not receiver.attach(sock):
            sock.close()

    def run(self, round_: Round) -> None:
        self._round = round_
        for bucket in round_.outgoing:
            self._require((bucket.src, bucket.dst), round_)
        for bucket in round_.incoming.values():
            if bucket.link == NETWORK:
                self._require((bucket.src, bucket.dst), round_)
        for worker in (*self._senders, *self._receivers.values()):
            worker.rouse()

    def _require(self, edge: Edge, round_: Round) -> None:
        if edge in self._board.broken:
            round_.fail(edge, self._board.broken[edge])
        elif edge not in self._board.warm:
            round_.fail(edge, "edge was not built")

    def progress(self) -> int:
        if self._round is None:
            return 0
        return self._round.traffic.rx[NETWORK] + self._round.traffic.tx[NETWORK]

    def revoke(self) -> None:
        for worker in (*self._senders, *self._receivers.values()):
            worker.interrupt()

    def abort(self) -> None:
        for worker in (*self._senders, *self._receivers.values()):
            worker.join()

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.drop_pending()
