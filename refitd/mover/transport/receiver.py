"""The receiving end of a network edge: take a bucket, check its trailer, only then count it.

Where the destination is as dense as the payload, the bytes go straight there. Nobody may use them before they count:
the memory is dirty until its whole publication is verified. Elsewhere a buffer takes them, and they are written later.
"""

from __future__ import annotations

import contextlib
import socket

import numpy as np

from refitd.errors import ProtocolError, TransportError
from refitd.mover.board import Board
from refitd.mover.frames import HEADER_BYTES, REASON_LIMIT, TRAILER_BYTES, Checksum, Header, Hello, Trailer
from refitd.mover.round import Round, Stopped
from refitd.mover.transport.stream import CHUNK_BYTES, TICK_SECONDS, Stream
from refitd.mover.transport.worker import Worker
from refitd.plan.execute import Bytes
from refitd.plan.program import NETWORK, Bucket

_STALE_LIMIT = 1 << 30  # a bucket of an attempt that we no longer know may claim no more


class Receiver(Worker):
    """Waits for the connection that the daemon accepted from ``src``, then takes what comes."""

    def __init__(self, board: Board, src: str) -> None:
        super().__init__(board, (src, board.facts.rank))
        self._pending: socket.socket | None = None
        self._accepting = True
        self._stream: Stream | None = None
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._silent_round: Round | None = None
        self._silent_from = 0

    def attach(self, sock: socket.socket) -> bool:
        """Offer an accepted connection; False where the edge has one already."""
        with self.board.cond:
            if not self._accepting or self._pending is not None or self.board.stopping:
                return False
            self._pending = sock
            self.board.cond.notify_all()
        return True

    def drop_pending(self) -> None:
        """Close a connection that was offered and never taken."""
        if self._pending is not None:
            self._pending.close()
            self._pending = None

    def _serve(self) -> None:
        stream = self._warm()
        self.board.mark_warm(self.edge)
        while True:
            header = Header.unpack(stream.receive(HEADER_BYTES))
            round_ = self.board.round_for(header.attempt, self.idle)
            if round_ is None:
                raise Stopped
            with contextlib.suppress(Stopped):
                self._take(stream, round_, header)

    # -- building

    def _warm(self) -> Stream:
        while True:
            self._stream = stream = Stream(self._next_socket(), self._tick)
            try:
                self._say_hello(stream)
            except (EOFError, OSError):  # the sender gave up on this connection and will come again
                stream.close()
            else:
                return stream

    def _next_socket(self) -> socket.socket:
        with self.board.cond:
            self.board.cond.wait_for(lambda: self.board.stopping or self._pending is not None)
            if self.board.stopping or self._pending is None:
                raise Stopped
            sock, self._pending = self._pending, None
        return sock

    def _say_hello(self, stream: Stream) -> None:
        facts = self.board.facts
        hello = Hello(facts.lane, facts.token, *self.edge, facts.digest)
        theirs = Hello.parse(stream.receive_frame())
        stream.send(memoryview(hello.pack()))  # also where they differ, so that both ends can name it
        hello.check(theirs)
        with self.board.cond:
            self._accepting = False

    # -- running

    def _take(self, stream: Stream, round_: Round, header: Header) -> None:
        if header.attempt < round_.options.attempt:
            self._drain(stream, header)
        elif header.void:
            self._take_void(stream, round_, header)
        else:
            self._take_bucket(stream, round_, header)

    def _drain(self, stream: Stream, header: Header) -> None:
        """Read past a bucket of an attempt that has been superseded: it never counts."""
        if header.nbytes > _STALE_LIMIT:
            raise ProtocolError("bucket nbytes", f"at most {_STALE_LIMIT}", str(header.nbytes))
        stream.receive_into(self._room(header.nbytes))
        if not header.void:
            Trailer.unpack(stream.receive(TRAILER_BYTES))

    def _take_void(self, stream: Stream, round_: Round, header: Header) -> None:
        if header.nbytes > REASON_LIMIT:
            raise ProtocolError("void reason", f"at most {REASON_LIMIT} bytes", str(header.nbytes))
        round_.fail(self.edge, bytes(stream.receive(header.nbytes)).decode(errors="replace"))

    def _take_bucket(self, stream: Stream, round_: Round, header: Header) -> None:
        bucket = self._expected(round_, header)
        digest = Checksum(bucket.id)
        in_place = self._receive_in_place(stream, round_, header, bucket, digest)
        if not in_place:
            self._receive_buffered(stream, round_, bucket, digest)
        trailer = Trailer.unpack(stream.receive(TRAILER_BYTES))
        if trailer.void:
            return
        self._check(round_, bucket, trailer, digest.value)
        with round_.touching():
            try:
                if not in_place:
                    round_.write(bucket, self._buffer[: bucket.nbytes])
            except TransportError as error:
                round_.fail(self.edge, error.reason)
            else:
                round_.mark_verified(bucket)

    def _place(self, stream: Stream, round_: Round, header: Header, bucket: Bucket) -> memoryview | None:
        try:
            with round_.touching():
                return round_.place_of(bucket)
        except Stopped:
            self._drain(stream, header)
            raise

    def _receive_buffered(self, stream: Stream, round_: Round, bucket: Bucket, digest: Checksum) -> None:
        def seen(chunk: memoryview) -> None:
            round_.count_rx(NETWORK, len(chunk))
            digest.update(chunk)

        stream.receive_into(self._room(bucket.nbytes), seen)

    def _receive_in_place(
        self, stream: Stream, round_: Round, header: Header, bucket: Bucket, digest: Checksum
    ) -> bool:
        """Straight into memory, let go of at least every tick. False where it cannot be."""
        place = self._place(stream, round_, header, bucket)
        if place is None:
            return False
        left = len(place)
        try:
            with round_.touching():
                while left:
                    chunk = place[-left:][:CHUNK_BYTES]
                    got = stream.receive_some(chunk)
                    digest.update(chunk if got == len(chunk) else chunk[:got])
                    left -= got
                    stream.tick(got)
                    round_.go_on()
        except Stopped:
            place = chunk = None  # nothing is mapped for a round that is over
            stream.receive_into(self._room(left))
            stream.receive(TRAILER_BYTES)
            raise
        finally:
            round_.count_rx(NETWORK, bucket.nbytes - left)
        return True

    def _expected(self, round_: Round, header: Header) -> Bucket:
        """The bucket that the header announces. Raises ProtocolError where the round expects no such bucket here."""
        bucket = round_.incoming.get(header.bucket)
        options = round_.options
        if bucket is None or bucket.link != NETWORK or bucket.src != self.edge[0] or bucket.id in round_.verified:
            raise ProtocolError("bucket", f"one that is still to come from {self.edge[0]}", str(header.bucket))
        expected = Header(options.attempt, options.publication, bucket.id, bucket.nbytes, round_.plan_tag)
        if header != expected:
            raise ProtocolError(f"header of bucket {bucket.id}", str(expected), str(header))
        return bucket

    def _check(self, round_: Round, bucket: Bucket, trailer: Trailer, digest: int) -> None:
        options = round_.options
        expected = Trailer(options.attempt, options.publication, self.board.facts.token, digest)
        if trailer.checksum != digest:
            raise ProtocolError(f"checksum of bucket {bucket.id}", f"{trailer.checksum:016x}", f"{digest:016x}")
        if trailer != expected:
            raise ProtocolError(f"trailer of bucket {bucket.id}", str(expected), str(trailer))

    def _room(self, nbytes: int) -> memoryview:
        if self._buffer.size < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer.data[:nbytes]

    def _tick(self, ticks: int) -> None:
        if self.board.stopping:
            raise Stopped
        round_ = self.board.round
        if round_ is not self._silent_round or ticks == 1:
            self._silent_from = 0 if ticks == 1 else ticks
            self._silent_round = round_
        if round_ is None or round_.stopped or not round_.expects(self.edge[0]):
            return
        limit = round_.options.progress_timeout
        if (ticks - self._silent_from) * TICK_SECONDS >= limit:
            raise TransportError(self.edge, f"no byte for {limit:g} s")

    # -- ending

    def _interrupt(self) -> None:
        if (stream := self._stream) is not None:
            stream.shutdown()

    def _release(self) -> None:
        with self.board.cond:
            self._accepting = False
        if self._stream is not None:
            self._stream.close()
