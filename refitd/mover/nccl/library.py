"""All that refitd asks of NCCL, as a seam: `nccl4py.py` has the library itself, tests and CPU benchmarks a fake one.

Nothing here blocks for long: what takes time is begun, and `settle` polls it, within a bound, until it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from refitd.errors import CommunicatorError

SETTLED, IN_PROGRESS = "", "in progress"
ID_BYTES = 128
LEAST_VERSION, GROWS_FROM = (2, 28, 9), (2, 29, 2)
_POLL_SECONDS = 0.0002
SPIN_SECONDS, SPIN_PAUSE = 0.002, 0.000005  # so long, a look follows the other (no pause at all would starve threads)
_PAUSE_SECONDS = 0.0001  # between looks at work that is under way: what it ends late is a share of a step


class Part(NamedTuple):
    """``nbytes`` contiguous bytes at ``address`` of the device, to or from rank ``peer`` of the communicator."""

    peer: int
    address: int
    nbytes: int


class Work(Protocol):
    """What one `Communicator.exchange` began."""

    def done(self) -> bool:
        """Whether all of it has been sent and is in memory. Raises CommunicatorError where it never will be."""


class Communicator(Protocol):
    """Used by one thread; `state`, `revoke` and `abort` also by another."""

    def state(self) -> str:
        """`SETTLED`, `IN_PROGRESS`, or what has failed."""

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], after: Sequence[Any] = ()) -> Work:
        """Begin all of it as one group, after what was begun before, and after the device's events ``after``.

        Raises CommunicatorError.
        """

    def revoke(self) -> None:
        """Begin to stop what is under way; `state` settles when nothing is. Raises CommunicatorError."""

    def abort(self) -> None:
        """Stop and free everything. Every rank must do it; it may take long, or for ever. Harmless when repeated."""

    def shrink(self, excluded: Sequence[int], broken: bool, name: str) -> Communicator:
        """Begin a communicator without the ranks ``excluded``, called by the others. ``broken``: work is under way.

        Poll both: this one is not settled before the new one is there. Raises CommunicatorError.
        """

    def grow_id(self) -> bytes:
        """For one rank: what those that join must be told. Raises CommunicatorError."""

    def grow(self, size: int, id_: bytes | None, name: str) -> Communicator:
        """Begin a communicator of ``size`` ranks; ``id_`` by the rank that asked for it. Raises CommunicatorError."""


class Library(Protocol):
    """One NCCL, loaded in this process, and the device that is current in the calling thread."""

    version: str

    def unique_id(self) -> bytes:
        """`ID_BYTES` that all ranks of a new communicator must be told. Raises CommunicatorError."""

    def init(self, size: int, rank: int, id_: bytes, name: str) -> Communicator:
        """Begin a communicator. Raises CommunicatorError."""

    def join(self, size: int, rank: int, id_: bytes, name: str) -> Communicator:
        """Begin to join one that grows. Raises CommunicatorError."""


def numbers(version: str) -> tuple[int, ...]:
    """``"2.28.9"`` as (2, 28, 9); what is no number ends it."""
    found: list[int] = []
    for part in version.replace("+", ".").split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def usable(version: str) -> str:
    """Why NCCL of that version cannot be used; empty where it can."""
    if not version:
        return "NCCL is not installed"
    least = ".".join(map(str, LEAST_VERSION))
    return "" if numbers(version) >= LEAST_VERSION else f"NCCL {version} is older than {least}"


def settle(what: str, parties: Sequence[Communicator], seconds: float, tick: Callable[[], None]) -> None:
    """Poll until all are settled; ``tick`` is called between polls and may raise.

    Raises CommunicatorError where one fails, or has not settled after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        states = [one.state() for one in parties]
        if failed := next((state for state in states if state not in (SETTLED, IN_PROGRESS)), ""):
            raise CommunicatorError(what, failed)
        if IN_PROGRESS not in states:
            return
        if time.monotonic() > deadline:
            raise CommunicatorError(what, f"not done within {seconds:g} s")
        tick()
        time.sleep(_POLL_SECONDS)


def finish(what: str, work: Work, seconds: float, tick: Callable[[], None]) -> None:
    """Poll ``work`` until it is done, as `settle` does. Raises CommunicatorError."""
    deadline, spun = time.monotonic() + seconds, time.monotonic() + SPIN_SECONDS
    pause = SPIN_PAUSE
    while not work.done():
        if time.monotonic() > deadline:
            raise CommunicatorError(what, f"no end within {seconds:g} s")
        tick()
        time.sleep(pause)
        if time.monotonic() > spun:
            pause = min(pause * 1.5, _PAUSE_SECONDS)
