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
    began, clock, comm, refused = time.monotonic(), _Clock(), None, ""
    if change.method != FRESH:
        comm, refused = _attempt(library, old, change, meeting, deadline, scratch, clock)
    if comm is not None:
        _abort(old, clock)
        done = Repaired(comm, change.method, clock.seconds)
    else:
        _stop(old, clock)
        done = Repaired(_fresh(library, change, meeting, deadline, scratch, clock), FRESH, clock.seconds, refused)
    counted(done.method, time.monotonic() - began)
    return done


class _Clock:
    """Seconds by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def _attempt(
    library: Library,
    old: Communicator | None,
    change: Change,
    meeting: Meeting,
    deadline: float,
    scratch: int,
    clock: _Clock,
) -> tuple[Communicator | None, str]:
    """The fast way, or why it is not to be. All ranks must have come to its end, or none takes it."""
    comm, why = None, ""
    try:
        with clock.step(change.method):
            comm = (_shrink if change.method == SHRINK else _grow)(library, old, change, meeting, deadline)
        with clock.step("first transfer"):
            _ring(comm, change, scratch, deadline)
    except CommunicatorError as error:
        why = str(error)
    if meeting.agree(change.method, not why, deadline):
        return comm, ""
    _abort(comm, clock)
    return None, why or f"{change.method} failed at another rank"


def _shrink(
    library: Library, old: Communicator | None, change: Change, meeting: Meeting, deadline: float
) -> Communicator:
    del library, meeting
    if old is None:
        raise CommunicatorError(SHRINK, "there is nothing to shrink")
    comm = old.shrink(change.gone, change.died, "refit-shrunk")
    return _made(SHRINK, comm, deadline, old)


def _grow(
    library: Library, old: Communicator | None, change: Change, meeting: Meeting, deadline: float
) -> Communicator:
    if numbers(library.version) < GROWS_FROM:
        raise CommunicatorError(GROW, f"NCCL {library.version} cannot")
    if old is None:
        comm = library.join(change.size, change.rank, bytes.fromhex(meeting.hear("grow id", deadline)), "refit-grown")
        return _made(GROW, comm, deadline)
    id_ = None
    if change.rank == 0:
        id_ = old.grow_id()
        meeting.tell("grow id", id_.hex())
    comm = old.grow(change.size, id_, "refit-grown")
    return _made(GROW, comm, deadline, old)


def _fresh(
    library: Library, change: Change, meeting: Meeting, deadline: float, scratch: int, clock: _Clock
) -> Communicator:
    with clock.step(FRESH):
        if change.rank == 0:
            meeting.tell("id", library.unique_id().hex())
        id_ = bytes.fromhex(meeting.hear("id", deadline))
        comm = _made(FRESH, library.init(change.size, change.rank, id_, "refit-fresh"), deadline)
    try:
        with clock.step("first transfer"):
            _ring(comm, change, scratch, deadline)
    except CommunicatorError:
        _abort(comm, clock)
        raise
    return comm


def _made(what: str, comm: Communicator, deadline: float, old: Communicator | None = None) -> Communicator:
    """``comm`` once it is there; one that does not come about is aborted, so that nothing of it is left."""
    try:
        settle(what, [comm] if old is None else [old, comm], deadline, _idle)
    except CommunicatorError:
        with contextlib.suppress(CommunicatorError):
            comm.abort()
        raise
    return comm


def _ring(comm: Communicator, change: Change, scratch: int, deadline: float) -> None:
    """A few bytes from each rank to the next: connections are made now."""
    if change.size < 2:
        return
    following, before = (change.rank + 1) % change.size, (change.rank - 1) % change.size
    work = comm.exchange([Part(following, scratch, 64)], [Part(before, scratch + 64, 64)])
    finish("first transfer", work, deadline, _idle)


def _stop(old: Communicator | None, clock: _Clock) -> None:
    """Revoke first: an abort after it takes 4 ms where alone it takes half a second."""
    if old is None:
        return
    with clock.step("revoke"), contextlib.suppress(CommunicatorError):
        old.revoke()
        settle("revoke", [old], REVOKE_SECONDS, _idle)
    _abort(old, clock)


def _abort(comm: Communicator | None, clock: _Clock) -> None:
    if comm is not None:
        with clock.step("abort"), contextlib.suppress(CommunicatorError):
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
