"""What the two ends of an edge say to each other about a step, before NCCL moves it and afterwards.

The sender starts to pack and announces; the receiver answers; whoever said "go" begins, and so does whoever heard it.
What was promised is moved even if its loan ends meanwhile, out of buffers that are our own. When the last byte of lent
memory was read, the loan word is read again, and only then is the trailer said: checksums, or that the buckets are
void. A bucket without its trailer does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from refitd.errors import InputError, TransportError
from refitd.mover.board import Board
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.nccl.batches import Batch
from refitd.mover.nccl.links import Links
from refitd.mover.nccl.staging import Staging, Sums
from refitd.mover.nccl.steps import Incoming, Outgoing
from refitd.mover.round import Edge, Round, Stopped
from refitd.plan.program import Bucket

SUPERSEDED = "the round is over at its destination"
_HEX = 16  # digits of a checksum


class Promises:
    """Of one round; used by the driver's thread. ``meanwhile`` is called while it waits for a word."""

    def __init__(
        self, board: Board, links: Links, staging: Staging, round_: Round, meanwhile: Callable[[], bool]
    ) -> None:
        self._board, self._links, self._staging, self._round = board, links, staging, round_
        self._meanwhile = meanwhile

    # -- sending

    def offer(self, edge: Edge, step: int, batch: Batch) -> Outgoing | None:
        """Start to pack, and announce; None where that cannot be, which both ends then know."""
        round_ = self._round
        if self._lost(edge):
            return None
        try:
            self._pace(batch.payload)  # first: what is packed keeps the round, and its memory
            outgoing = self._packed(edge, step, batch)
        except (TransportError, InputError) as error:
            reason = error.reason if isinstance(error, TransportError) else str(error)
            round_.fail(edge, reason)
            self._links.say(edge, "void", attempt=round_.options.attempt, reason=reason)
            return None
        except Stopped:
            return None
        try:
            self._links.say(edge, "bucket", **self._names(batch.buckets))
        except BaseException:
            outgoing.release()
            raise
        return outgoing

    def _packed(self, edge: Edge, step: int, batch: Batch) -> Outgoing:
        """Memory is held from the first look at its loan word until it has been read."""
        first, words = batch.buckets[0], self._round.options.words
        with ExitStack() as hold:
            hold.enter_context(self._round.touching())
            memory = self._round.lender(first, words.get(first.src))
            if isinstance(memory, DeviceMemory):
                hold.enter_context(memory.pinned(first))
            address = self._staging.slot(edge, step, batch.extent)
            sums = self._staging.pack(self._round, batch, memory, batch.places(address))
            return Outgoing(edge, batch, address, sums, memory, hold.pop_all())

    def _pace(self, nbytes: int) -> None:
        """As fast as the job's bandwidth cap lets it."""
        while nbytes:
            nbytes -= self._board.limit.take(nbytes, self._tick)

    def _tick(self) -> None:
        if self._board.stopping or self._round.stopped:
            raise Stopped
        self._meanwhile()

    def agreed(self, sent: Outgoing) -> bool:
        """Whether the other end takes them. Raises TransportError where it does not answer, Stopped."""
        round_, edge = self._round, sent.edge
        attempt, first = round_.options.attempt, sent.batch.buckets[0]

        def answered() -> bool:
            while (word := self._links.next(edge, "answer")) and word["attempt"] < attempt:
                self._links.take(edge, "answer")
            return word is not None or edge in self._board.broken

        patience = self._board.limit.patience(round_.options.progress_timeout)
        if not self._links.wait(answered, patience, self._meanwhile):
            raise TransportError(edge, f"no answer for {patience:g} s")
        with self._board.cond:
            if edge in self._board.broken:
                return False
            word = self._links.take(edge, "answer")
        if (word["attempt"], word["bucket"]) != (attempt, first.id):
            raise TransportError(edge, f"an answer for bucket {word['bucket']}, not {first.id}")
        if not word["go"]:
            round_.fail(edge, word["reason"])
        sent.whole = word["whole"]
        return bool(word["go"])

    def trail(self, sent: Outgoing) -> bool:
        """Say the trailer, once all has been packed; whether it has been said. Raises TransportError, DeviceError."""
        if sent.trailed or not sent.sums.done():
            return sent.trailed
        values, reason = sent.sums.values(), ""
        first = sent.batch.buckets[0]
        try:
            self._round.require_loan(first, sent.memory, self._round.options.words.get(first.src))
        except TransportError as error:
            reason = error.reason
            self._round.fail(sent.edge, reason)
        sent.release()
        sent.trailed = True
        checksums = "".join(f"{values[id_]:0{_HEX}x}" for id_ in sent.batch.ids)
        attempt = self._round.options.attempt
        self._links.say(sent.edge, "trailer", attempt=attempt, bucket=first.id, checksums=checksums, reason=reason)
        return True

    # -- receiving

    def accept(self, edge: Edge, step: int, coming: Sequence[Bucket]) -> Incoming | None:
        """Wait until a step of ``coming`` is announced, and answer. None where it will not come, or is not wanted."""
        round_, word = self._round, self._announced(edge)
        if word is None:
            return None
        if word["kind"] == "void":
            self.give_up(edge, word["reason"])
            return None
        incoming, reason = self._welcome(edge, step, coming, word)
        whole = incoming is not None and incoming.whole
        named = {"attempt": word["attempt"], "bucket": word["bucket"]}
        if incoming is None:
            round_.fail(edge, reason)
        self._links.say(edge, "answer", go=incoming is not None, whole=whole, reason=reason, **named)
        if incoming is None:
            self.give_up(edge, reason)
        return incoming

    def give_up(self, edge: Edge, reason: str) -> None:
        """Nothing more of this round is taken from ``edge``: whatever its sender still announces is refused."""
        self._round.fail(edge, reason)
        self._links.refuse(edge, self._round.options.attempt, reason)

    def end(self, edges: Sequence[Edge]) -> None:
        """The round is over here."""
        for edge in edges:
            if edge[1] == self._round.rank and edge not in self._board.broken:
                self._links.refuse(edge, self._round.options.attempt, SUPERSEDED)

    def _announced(self, edge: Edge) -> dict[str, Any] | None:
        """The word of this attempt that comes next; older ones are refused by the links."""
        round_, attempt = self._round, self._round.options.attempt
        if self._lost(edge):
            return None

        def said() -> bool:
            word = self._links.next(edge, "bucket")
            mine = word is not None and word["attempt"] == attempt
            return mine or round_.stopped or self._lost(edge)  # a trailer that came meanwhile may have been void

        self._links.refuse(edge, attempt - 1, SUPERSEDED)
        patience = self._board.limit.patience(round_.options.progress_timeout)
        if not self._links.wait(said, patience, self._meanwhile):
            raise TransportError(edge, f"no bucket announced for {patience:g} s")
        with self._board.cond:
            word = self._links.next(edge, "bucket")
            mine = word is not None and word["attempt"] == attempt and not self._lost(edge)
            return self._links.take(edge, "bucket") if mine else None

    def _welcome(
        self, edge: Edge, step: int, coming: Sequence[Bucket], word: dict[str, Any]
    ) -> tuple[Incoming | None, str]:
        """Room for the buckets, or why there is none."""
        round_, batch = self._round, Batch(tuple(coming[: max(word["count"], 1)]))
        for field, ours in self._names(batch.buckets).items():
            if word[field] != ours:
                return None, f"{field} of bucket {batch.buckets[0].id}: expected {ours}, got {word[field]}"
        try:
            with ExitStack() as hold:
                hold.enter_context(round_.touching())
                memory = round_.destination(batch.buckets[0])
                places = self._staging.places(round_, batch, memory)
                if places and isinstance(memory, DeviceMemory):
                    hold.enter_context(memory.pinned(batch.buckets[0]))
                    return Incoming(edge, batch, places, hold.pop_all()), ""
        except TransportError as error:
            return None, error.reason
        except (Stopped, InputError) as error:
            return None, str(error) or SUPERSEDED
        return Incoming(edge, batch, batch.places(self._staging.slot(edge, step, batch.extent)), None), ""

    def unpack(self, received: Incoming) -> None:
        """Start to unpack what has come. Raises DeviceError."""
        first = received.batch.buckets[0]
        try:
            with ExitStack() as hold:
                hold.enter_context(self._round.touching())
                memory = self._round.destination(first)
                if isinstance(memory, DeviceMemory):
                    hold.enter_context(memory.pinned(first))
                where = received.places
                received.found = self._staging.unpack(self._round, received.batch, memory, where, received.in_place)
                received.keep(hold.pop_all())
        except (TransportError, InputError) as error:
            self.give_up(received.edge, error.reason if isinstance(error, TransportError) else str(error))
            received.checked = True
        except Stopped:
            received.checked = True

    def check(self, received: Incoming) -> bool:
        """Count what has been unpacked, if its sums are the trailer's; whether all is known. Raises DeviceError."""
        if received.checked or received.found is None:
            return received.checked
        sums, again = received.found
        if not sums.done() or (again is not None and not again.done()):
            return False
        trailer = self._trailer(received)
        if trailer is None:
            return False
        received.checked = True
        reason = trailer["reason"] or _difference(received, trailer["checksums"], sums.values(), again)
        if reason:
            self.give_up(received.edge, reason)
            return True
        for bucket in received.batch.buckets:
            self._round.count_rx(bucket.link, bucket.nbytes)
        self._round.mark_all_verified(received.batch.buckets)
        return True

    def _trailer(self, received: Incoming) -> dict[str, Any] | None:
        """Its trailer, if it has come; that of a step before it is left to that step."""
        attempt, first, edge = self._round.options.attempt, received.batch.buckets[0].id, received.edge
        with self._board.cond:
            while (word := self._links.next(edge, "trailer")) and word["attempt"] < attempt:
                self._links.take(edge, "trailer")
            mine = word is not None and (word["attempt"], word["bucket"]) == (attempt, first)
            return self._links.take(edge, "trailer") if mine else None

    # -- both

    def _lost(self, edge: Edge) -> bool:
        return edge in self._round.failures or edge in self._board.broken or edge not in self._board.warm

    def _names(self, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """What both ends must mean by these buckets."""
        options = self._round.options
        generation, revision = options.publication
        return {
            "attempt": options.attempt, "generation": generation, "revision": revision, "bucket": buckets[0].id,
            "last": buckets[-1].id, "count": len(buckets), "nbytes": sum(bucket.nbytes for bucket in buckets),
            "plan": self._round.plan_tag.hex(), "token": self._board.facts.token,
        }  # fmt: skip


def _difference(received: Incoming, checksums: str, found: Mapping[int, int], again: Sums | None) -> str:
    """Of the first bucket whose sum is not the trailer's, or that reads back as something else; empty where none is."""
    back = found if again is None else again.values()
    for number, id_ in enumerate(received.batch.ids):
        told = checksums[number * _HEX : (number + 1) * _HEX]
        if told != f"{found[id_]:0{_HEX}x}":
            return f"checksum of bucket {id_}: expected {told}, got {found[id_]:0{_HEX}x}"
        if back[id_] != found[id_]:
            return f"bucket {id_} reads back differently"
    return ""
