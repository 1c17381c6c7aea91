"""What the two ends of an edge say to each other about a bucket before NCCL moves it, and the check afterwards.

A bucket without its trailer does not exist: the word that announces it carries the trailer, said after the last byte
was read from lent memory and the loan word re-read. Whoever said "go" begins; whoever did not, does not.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from refitd.errors import InputError, TransportError
from refitd.mover.board import Board
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.nccl.links import Links
from refitd.mover.nccl.staging import Staging
from refitd.mover.round import Edge, Round, Stopped
from refitd.plan.program import Bucket

SUPERSEDED = "the round is over at its destination"


class Outgoing:
    """A bucket that is packed and announced."""

    def __init__(self, edge: Edge, bucket: Bucket, address: int) -> None:
        self.edge, self.bucket, self.address = edge, bucket, address


class Incoming:
    """A bucket that may come. ``in_place``: straight into mounted memory, which is held until `release`."""

    def __init__(self, edge: Edge, bucket: Bucket, address: int, checksum: str, hold: ExitStack | None) -> None:
        self.edge, self.bucket, self.address, self.checksum = edge, bucket, address, checksum
        self._hold = hold

    @property
    def in_place(self) -> bool:
        return self._hold is not None

    def release(self) -> None:
        if self._hold is not None:
            self._hold.close()


class Promises:
    """Of one round; used by the driver's thread."""

    def __init__(self, board: Board, links: Links, staging: Staging, round_: Round) -> None:
        self._board, self._links, self._staging, self._round = board, links, staging, round_

    def offer(self, edge: Edge, step: int, bucket: Bucket) -> Outgoing | None:
        """Pack and announce; None where that cannot be, which both ends then know."""
        round_ = self._round
        if self._lost(edge):
            return None
        try:
            with round_.touching():
                address, checksum = self._packed(edge, step, bucket)
        except (TransportError, InputError) as error:
            reason = error.reason if isinstance(error, TransportError) else str(error)
            round_.fail(edge, reason)
            self._links.say(edge, "void", attempt=round_.options.attempt, reason=reason)
            return None
        except Stopped:
            return None
        self._pace(bucket.nbytes)
        self._links.say(edge, "bucket", checksum=f"{checksum:016x}", **self._names(bucket))
        return Outgoing(edge, bucket, address)

    def _packed(self, edge: Edge, step: int, bucket: Bucket) -> tuple[int, int]:
        word = self._round.options.words.get(bucket.src)
        memory = self._round.lender(bucket, word)
        address = self._staging.slot(edge, step, bucket.nbytes)
        checksum = self._staging.pack(self._round, bucket, memory, address)
        self._round.require_loan(bucket, memory, word)
        return address, checksum

    def _pace(self, nbytes: int) -> None:
        """As fast as the job's bandwidth cap lets it."""
        while nbytes:
            nbytes -= self._board.limit.take(nbytes, self._stop)

    def _stop(self) -> None:
        if self._board.stopping:
            raise Stopped

    def agreed(self, sent: Outgoing) -> bool:
        """Whether the other end takes the bucket. Raises TransportError where it does not answer, Stopped."""
        round_, edge = self._round, sent.edge
        attempt = round_.options.attempt

        def answered() -> bool:
            while (word := self._links.next(edge, ("answer",))) and word["attempt"] < attempt:
                self._links.take(edge)
            return word is not None or edge in self._board.broken

        patience = self._board.limit.patience(round_.options.progress_timeout)
        if not self._links.wait(answered, patience):
            raise TransportError(edge, f"no answer for {patience:g} s")
        with self._board.cond:
            if edge in self._board.broken:
                return False
            word = self._links.take(edge)
        if (word["attempt"], word["bucket"]) != (attempt, sent.bucket.id):
            raise TransportError(edge, f"an answer for bucket {word['bucket']}, not {sent.bucket.id}")
        if not word["go"]:
            round_.fail(edge, word["reason"])
        return bool(word["go"])

    def accept(self, edge: Edge, step: int, bucket: Bucket) -> Incoming | None:
        """Wait until the bucket is announced, and answer. None where it will not come, or is not wanted."""
        round_, word = self._round, self._announced(edge)
        if word is None:
            return None
        if word["kind"] == "void":
            round_.fail(edge, word["reason"])
            return None
        incoming, reason = self._welcome(edge, step, bucket, word)
        if incoming is None:
            round_.fail(edge, reason)
        self._links.say(edge, "answer", attempt=word["attempt"], bucket=word["bucket"], go=not reason, reason=reason)
        return incoming

    def _announced(self, edge: Edge) -> dict[str, Any] | None:
        """The word of this attempt that comes next; older ones are refused on the way."""
        round_, attempt = self._round, self._round.options.attempt
        if self._lost(edge):
            return None
        stale: list[dict[str, Any]] = []

        def said() -> bool:
            while (word := self._links.next(edge, ("bucket", "void"))) and word["attempt"] < attempt:
                stale.append(self._links.take(edge))
            return (word is not None and word["attempt"] == attempt) or round_.stopped or edge in self._board.broken

        patience = self._board.limit.patience(round_.options.progress_timeout)
        in_time = self._links.wait(said, patience)
        for old in (word for word in stale if word["kind"] == "bucket"):
            named = {"attempt": old["attempt"], "bucket": old["bucket"]}
            self._links.say(edge, "answer", go=False, reason=SUPERSEDED, **named)
        if not in_time:
            raise TransportError(edge, f"no bucket announced for {patience:g} s")
        with self._board.cond:
            word = self._links.next(edge, ("bucket", "void"))
            mine = word is not None and word["attempt"] == attempt and edge not in self._board.broken
            return self._links.take(edge) if mine else None

    def _welcome(self, edge: Edge, step: int, bucket: Bucket, word: dict[str, Any]) -> tuple[Incoming | None, str]:
        """Room for the bucket, or why there is none."""
        round_ = self._round
        for field, ours in self._names(bucket).items():
            if word[field] != ours:
                return None, f"{field} of bucket {bucket.id}: expected {ours}, got {word[field]}"
        hold = ExitStack()
        try:
            hold.enter_context(round_.touching())
            memory = round_.destination(bucket)
            place = self._staging.place(round_, bucket, memory)
            if place and isinstance(memory, DeviceMemory):
                hold.enter_context(memory.pinned(bucket))
                return Incoming(edge, bucket, place, word["checksum"], hold), ""
        except TransportError as error:
            hold.close()
            return None, error.reason
        except (Stopped, InputError) as error:
            hold.close()
            return None, str(error) or SUPERSEDED
        hold.close()
        return Incoming(edge, bucket, self._staging.slot(edge, step, bucket.nbytes), word["checksum"], None), ""

    def check(self, received: Incoming) -> None:
        """Unpack what has come, and count it if its sum is the trailer's. Raises Stopped, DeviceError."""
        round_, bucket = self._round, received.bucket
        with round_.touching():
            try:
                memory = round_.destination(bucket)
                found = self._staging.unpack(round_, bucket, memory, received.address, received.in_place)
                if f"{found:016x}" != received.checksum:
                    reason = f"checksum of bucket {bucket.id}: expected {received.checksum}, got {found:016x}"
                    raise TransportError(received.edge, reason)
            except TransportError as error:
                round_.fail(received.edge, error.reason)
                return
            round_.count_rx(bucket.link, bucket.nbytes)
            round_.mark_verified(bucket)

    def _lost(self, edge: Edge) -> bool:
        return edge in self._round.failures or edge in self._board.broken or edge not in self._board.warm

    def _names(self, bucket: Bucket) -> dict[str, Any]:
        """What both ends must mean by this bucket."""
        options = self._round.options
        generation, revision = options.publication
        return {
            "attempt": options.attempt, "generation": generation, "revision": revision, "bucket": bucket.id,
            "nbytes": bucket.nbytes, "plan": self._round.plan_tag.hex(), "token": self._board.facts.token,
        }  # fmt: skip
