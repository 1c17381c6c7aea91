"""The communicators of one lane, over which its steps go in turn: while one ends a step, the next has begun another.

A step ends with a kernel that drains and begins with one that fills; between two of one communicator the wire is idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from refitd.errors import CommunicatorError
from refitd.mover.nccl.library import ID_BYTES, Communicator, Library, settle

COUNT = 1  # over NVLink two took 45.3 ms for 16 GB, one 45.7 (32 blocks; tests/device/tuned.py)
_HEX = 2 * ID_BYTES


def new_ids(library: Library) -> str:
    """Of all of them, for one rank to make and every rank to hear. Raises CommunicatorError."""
    return "".join(library.unique_id().hex() for _ in range(COUNT))


class Together:
    """Both ends of an edge count a round's steps alike, so both take the same communicator for each."""

    def __init__(self) -> None:
        self._all: list[Communicator] = []

    def make(
        self, library: Library, ranks: int, rank: int, ids: str, name: str, wait: Callable[[Communicator], None]
    ) -> None:
        """One after the other; ``wait`` returns when one is settled. Raises CommunicatorError, and what it raises."""
        for number, start in enumerate(range(0, len(ids), _HEX)):
            id_ = bytes.fromhex(ids[start : start + _HEX])
            self._all.append(library.init(ranks, rank, id_, f"{name}-{number}"))
            wait(self._all[-1])

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._all)

    def of(self, step: int) -> Communicator:
        return self._all[step % len(self._all)]

    def revoke(self, seconds: float) -> None:
        """Return when nothing is under way any more, or one has failed, or after ``seconds``."""
        begun: Sequence[Communicator] = [one for one in self._all if _done(one.revoke)]
        with contextlib.suppress(CommunicatorError):
            settle("revoke", begun, seconds, lambda: None)

    def abort(self) -> None:
        """From any thread."""
        for one in list(self._all):
            _done(one.abort)


def _done(call: Callable[[], None]) -> bool:
    try:
        call()
    except CommunicatorError:
        return False
    return True
