"""The sending end of a network edge: pack, checksum and send block by block; the loan word decides on the trailer."""

from __future__ import annotations

import contextlib
import select
import socket
import time

from refitd.errors import TransportError
from refitd.hook import wire
from refitd.mover.board import Board
from refitd.mover.frames import REASON_LIMIT, Header, Hello, Trailer
from refitd.mover.reading import Reading
from refitd.mover.round import Round, Stopped
from refitd.mover.transport.stream import TICK_SECONDS, Stream
from refitd.mover.transport.worker import Worker
from refitd.plan.program import NETWORK, Bucket

RETRY_SECONDS = 0.05
_ZEROS = memoryview(bytes(512 << 10))
_NOTHING = memoryview(b"")


class Sender(Worker):
    """Connects to the daemon of ``dst`` (again and again within ``timeout`` seconds), then sends round after round."""

    def __init__(self, board: Board, dst: str, address: tuple[str, int], timeout: float) -> None:
        super().__init__(board, (board.facts.rank, dst))
        self._address, self._timeout = address, timeout
        self._deadline: float | None = None
        self._round: Round | None = None
        self._stream: Stream | None = None

    def _serve(self) -> None:
        self._deadline = time.monotonic() + self._timeout
        stream = self._warm()
        self._deadline = None
        self.board.mark_warm(self.edge)
        while (round_ := self.board.next_round(self._round, self.idle)) is not None:
            self._round = round_
            with contextlib.suppress(Stopped):
                self._send_round(stream, round_)

    # -- building

    def _warm(self) -> Stream:
        """A connection over which both ends have said the same hello. Raises TransportError at the deadline."""
        while True:
            try:
                return self._try_to_warm()
            except (OSError, EOFError) as error:
                self._close_stream()
                reason = f"{type(error).__name__}: {error}"
            self._tick(0, reason)
            time.sleep(RETRY_SECONDS)

    def _try_to_warm(self) -> Stream:
        facts = self.board.facts
        hello = Hello(facts.lane, facts.token, *self.edge, facts.digest)
        claim = {"kind": "edge", "secret": facts.secret, "job": facts.job, "lane": facts.lane, "token": facts.token}
        self._stream = stream = Stream(self._open_socket(), self._tick)
        frame = wire.encode({**claim, "src": self.edge[0], "dst": self.edge[1]})
        stream.send(memoryview(frame + hello.pack()))
        hello.check(Hello.parse(stream.receive_frame()))
        return stream

    def _open_socket(self) -> socket.socket:
        family, kind, proto, _name, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            poller = select.poll()  # select() takes no descriptor above 1023, and a client may have many files open
            poller.register(sock, select.POLLOUT)
            while not poller.poll(1000 * TICK_SECONDS):
                self._tick(0)
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, f"cannot connect to {self._address[0]}:{self._address[1]}")
        except BaseException:
            sock.close()
            raise
        return sock

    def _tick(self, ticks: int, reason: str = "no hello from the peer") -> None:
        if self.board.stopping:
            raise Stopped
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TransportError(self.edge, f"not built within {self._timeout:g} s: {reason}")
        limit = self._round.options.progress_timeout if self._round else float("inf")
        if ticks * TICK_SECONDS >= limit:
            raise TransportError(self.edge, f"no byte taken for {limit:g} s")

    # -- running

    def _send_round(self, stream: Stream, round_: Round) -> None:
        for bucket in round_.outgoing:
            if bucket.dst != self.edge[1]:
                continue
            try:
                self._send_bucket(stream, round_, bucket)
            except TransportError as error:
                round_.fail(self.edge, error.reason)
                self._send_void(stream, round_, bucket, error.reason)
                return
            round_.mark_sent(bucket)

    def _send_bucket(self, stream: Stream, round_: Round, bucket: Bucket) -> None:
        """Send block by block, each still in the cache. Raises TransportError where the loan was withdrawn, Stopped."""
        reading = Reading(round_, bucket)
        lead = self._header(round_, bucket)
        while reading.owed:
            try:
                block = reading.read()
            except (TransportError, Stopped):
                self._pay(stream, round_, lead, reading.owed)
                raise
            trailer = b"" if reading.owed else self._trailer(round_, reading.digest.value)
            self._send_paced(stream, memoryview(lead), block.data, memoryview(trailer))
            round_.count_tx(NETWORK, len(block))
            lead = b""

    def _header(self, round_: Round, bucket: Bucket) -> bytes:
        options = round_.options
        return Header(options.attempt, options.publication, bucket.id, bucket.nbytes, round_.plan_tag).pack()

    def _trailer(self, round_: Round, digest: int, void: bool = False) -> bytes:
        options = round_.options
        return Trailer(options.attempt, options.publication, self.board.facts.token, digest, void).pack()

    def _pay(self, stream: Stream, round_: Round, lead: bytes, owed: int) -> None:
        """End a bucket that cannot be read to its end: the stream stays in step, and the bucket does not exist."""
        stream.send(memoryview(lead))
        while owed:
            zeros = _ZEROS[:owed]
            self._send_paced(stream, _NOTHING, zeros, _NOTHING)
            owed -= len(zeros)
        stream.send(memoryview(self._trailer(round_, 0, void=True)))

    def _send_paced(self, stream: Stream, head: memoryview, payload: memoryview, tail: memoryview) -> None:
        """Send the three as one, ``payload`` as fast as the job's bandwidth cap lets it."""
        if self.board.limit.rate is None:
            stream.send(head, payload, tail)
            return
        for parts in self.board.limit.pace(head, payload, tail, lambda: self._tick(0)):
            stream.send(*parts)

    def _send_void(self, stream: Stream, round_: Round, bucket: Bucket, reason: str) -> None:
        text = reason.encode()[:REASON_LIMIT]
        options = round_.options
        header = Header(options.attempt, options.publication, bucket.id, len(text), round_.plan_tag, void=True)
        stream.send(memoryview(header.pack() + text))

    # -- ending

    def _interrupt(self) -> None:
        if (stream := self._stream) is not None:
            stream.shutdown()

    def _release(self) -> None:
        self._close_stream()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
