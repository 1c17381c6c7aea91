"""A lane's communicator after its ranks have changed: shrink, grow, or a fresh one, each within a deadline.

Any death: revoke, agree, abort, fresh init. NCCL refuses to shrink a communicator once a peer of another host has died,
and a peer of the same host dies without an error. So shrink is for planned leaves and for what is worth a try, grow for
joins where NCCL has it. Whatever does not come to its end in time is aborted, and a fresh communicator is made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from refitd.errors import CommunicatorError
from refitd.mover.nccl.library import GROWS_FROM, Communicator, Library, Part, finish, numbers, settle

FRESH, SHRINK, GROW = "init", "shrink", "grow"  # as the metric calls them
REVOKE_SECONDS = 2.0


class Meeting(Protocol):
    """How the ranks that will share the new communicator agree; every rank calls the same methods in the same order."""

    def tell(self, topic: str, value: str) -> None:
        """Say something to all."""

    def hear(self, topic: str, seconds: float) -> str:
        """What was told. Raises CommunicatorError where nobody does in time."""

    def agree(self, topic: str, good: bool, seconds: float) -> bool:
        """Whether it went well for every rank; also False where one of them does not say so in time."""


class Change(NamedTuple):
    """From a communicator to the next. Ranks of the old one that are in ``gone`` leave, ``size`` ranks are in the new.

    ``rank`` is this one's number in the new; ``died``: those that left did so without a word.
    """

    method: str
    size: int
    rank: int
    gone: tuple[int, ...] = ()
    died: bool = False


@dataclass
class Repaired:
    """The new communicator, by which method it was made, and how it went. ``seconds`` by step."""

    comm: Communicator
    method: str
    seconds: dict[str, float] = field(default_factory=dict)
    refused: str = ""  # why the method that was asked for was not it


def repair(
    library: Library,
    old: Communicator | None,
    change: Change,
    meeting: Meeting,
    deadline: float,
    scratch: int,
    counted: Callable[[str, float], None] = lambda _method, _seconds: None,
) -> Repaired:
    """Make the communicator that ``change`` asks for, fall back to a fresh one, and send a few bytes over it.

    ``deadline``: seconds for each method. ``scratch``: address of 128 bytes of the device. ``counted`` is told method
    and seconds. Raises CommunicatorError where a fresh one fails, too. ``old`` is gone in every case.
    """
    one, began, comm, refused = _Repair(library, change, meeting, deadline, scratch), time.monotonic(), None, ""
    if change.method != FRESH:
        comm, refused = one.attempt(old)
    if comm is not None:
        one.abort(old)
        done = Repaired(comm, change.method, one.seconds)
    else:
        one.stop(old)
        done = Repaired(one.fresh(), FRESH, one.seconds, refused)
    counted(done.method, time.monotonic() - began)
    return done


class _Repair:
    """At one rank. ``seconds`` by step."""

    def __init__(self, library: Library, change: Change, meeting: Meeting, deadline: float, scratch: int) -> None:
        self._library, self._change, self._meeting = library, change, meeting
        self._deadline, self._scratch = deadline, scratch
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def attempt(self, old: Communicator | None) -> tuple[Communicator | None, str]:
        """The fast way, or why it is not to be. All ranks must have come to its end, or none takes it."""
        method, comm, why = self._change.method, None, ""
        try:
            with self._step(method):
                comm = self._shrunk(old) if method == SHRINK else self._grown(old)
            self._ring(comm)
        except CommunicatorError as error:
            why = str(error)
        if self._meeting.agree(method, not why, self._deadline):
            return comm, ""
        self.abort(comm)
        return None, why or f"{method} failed at another rank"

    def _shrunk(self, old: Communicator | None) -> Communicator:
        if old is None:
            raise CommunicatorError(SHRINK, "there is nothing to shrink")
        return self._made(SHRINK, old.shrink(self._change.gone, self._change.died, "refit-shrunk"), old)

    def _grown(self, old: Communicator | None) -> Communicator:
        size, rank = self._change.size, self._change.rank
        if numbers(self._library.version) < GROWS_FROM:
            raise CommunicatorError(GROW, f"NCCL {self._library.version} cannot")
        if old is None:
            id_ = bytes.fromhex(self._meeting.hear("grow id", self._deadline))
            return self._made(GROW, self._library.join(size, rank, id_, "refit-grown"))
        told = None
        if rank == 0:
            told = old.grow_id()
            self._meeting.tell("grow id", told.hex())
        return self._made(GROW, old.grow(size, told, "refit-grown"), old)

    def fresh(self) -> Communicator:
        """Raises CommunicatorError."""
        size, rank = self._change.size, self._change.rank
        with self._step(FRESH):
            if rank == 0:
                self._meeting.tell("id", self._library.unique_id().hex())
            id_ = bytes.fromhex(self._meeting.hear("id", self._deadline))
            comm = self._made(FRESH, self._library.init(size, rank, id_, "refit-fresh"))
        try:
            self._ring(comm)
        except CommunicatorError:
            self.abort(comm)
            raise
        return comm

    def _made(self, what: str, comm: Communicator, old: Communicator | None = None) -> Communicator:
        """``comm`` once it is there; one that does not come about is aborted, so that nothing of it is left."""
        try:
            settle(what, [comm] if old is None else [old, comm], self._deadline, _idle)
        except CommunicatorError:
            with contextlib.suppress(CommunicatorError):
                comm.abort()
            raise
        return comm

    def _ring(self, comm: Communicator) -> None:
        """A few bytes from each rank to the next: connections are made now."""
        size, rank = self._change.size, self._change.rank
        with self._step("first transfer"):
            if size < 2:
                return
            sends = [Part((rank + 1) % size, self._scratch, 64)]
            receives = [Part((rank - 1) % size, self._scratch + 64, 64)]
            finish("first transfer", comm.exchange(sends, receives), self._deadline, _idle)

    def stop(self, old: Communicator | None) -> None:
        """Revoke first: an abort after it takes 4 ms where alone it takes half a second."""
        if old is None:
            return
        with self._step("revoke"), contextlib.suppress(CommunicatorError):
            old.revoke()
            settle("revoke", [old], REVOKE_SECONDS, _idle)
        self.abort(old)

    def abort(self, comm: Communicator | None) -> None:
        if comm is not None:
            with self._step("abort"), contextlib.suppress(CommunicatorError):
                comm.abort()


def methods(version: str, left: Sequence[int], joined: int, died: bool) -> str:
    """Which method DESIGN gives a change: fresh after any death, shrink for a planned leave, grow for a join."""
    if died or (left and joined):
        return FRESH
    if left:
        return SHRINK
    return GROW if joined and numbers(version) >= GROWS_FROM else FRESH


def _idle() -> None:
    """Nothing else is to be done between polls."""
