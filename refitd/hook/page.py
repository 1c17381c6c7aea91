"""The control page: a few uint64 words that a client and its daemon share, each written by one side only.

Every word is written by one aligned 8-byte store, so a reader sees the old value or the new one, also when the
writer dies in between. What needs several words at once (the ticket that was taken) has two slots and a count that
says which one is valid.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from refitd.errors import ProtocolError
from refitd.failpoints import effect
from refitd.hook.memfd import check_memory, create_memory, map_shared

PAGE_BYTES = 4096

LOAN, HEARTBEAT, DIRTY, GENERATION, REVISION, TOKEN, SHADOW_LOAN, TAKEN_COUNT = range(8)
_SLOTS = (8, 11)  # two slots of (generation, revision, token): the ticket that the lead took last
_SHADOW = 14  # generation, revision: what the shadow holds; written by the daemon, (0, 0) while it is being filled
CLAIM = 16  # written once, by the daemon
_WORD_MASK = (1 << 64) - 1


class Taken(NamedTuple):
    """What names a ticket: the lead writes it here before the ticket leaves pending() (or receive() returns)."""

    generation: int
    revision: int
    token: int


def _word(index: int, text: str) -> Any:
    def read(page: ControlPage) -> int:
        return page.read(index)

    def write(page: ControlPage, value: int) -> None:
        page.write(index, value)

    return property(read, write, doc=text)


class ControlPage:
    """One mapped control page. `close` releases the mapping and the descriptor."""

    loan_word: int = _word(LOAN, "Changed by the client before its memory may change.")
    heartbeat: int = _word(HEARTBEAT, "CLOCK_MONOTONIC ns, written by the daemon every 100 ms.")
    dirty: int = _word(DIRTY, "1 while the client must not serve; written by the client.")
    generation: int = _word(GENERATION, "Generation of the publication that is served (0: none).")
    revision: int = _word(REVISION, "Revision of the publication that is served (0: none).")
    token: int = _word(TOKEN, "Lane token by which the publication came.")
    shadow_loan_word: int = _word(SHADOW_LOAN, "Written by the daemon only, for the shadow's memory.")
    claim: int = _word(CLAIM, "When the process came, by the store's revision; written by the first daemon it meets.")

    def __init__(self, fd: int) -> None:
        """Map ``fd`` and own it from here on, also when this raises. Use `create` or `map`."""
        self.fd = fd
        try:
            self._map = map_shared(fd, PAGE_BYTES)
        except BaseException:
            os.close(fd)
            raise
        self._words: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(self._map, dtype=np.uint64)

    @classmethod
    def create(cls) -> ControlPage:
        """A new page of zeros."""
        return cls(create_memory("refitd-page", PAGE_BYTES))

    @classmethod
    def map(cls, fd: int) -> ControlPage:
        """Map a page that a peer sent; ``fd`` stays the caller's. Raises ProtocolError where it could shrink."""
        check_memory(fd, PAGE_BYTES, "control page")
        if (size := os.fstat(fd).st_size) != PAGE_BYTES:
            raise ProtocolError("control page", f"{PAGE_BYTES} bytes", str(size))
        return cls(os.dup(fd))

    def read(self, index: int) -> int:
        """Word ``index``."""
        return int(self._words[index])

    def write(self, index: int, value: int) -> None:
        """Write word ``index`` with one store, modulo 2**64."""
        if index != HEARTBEAT:
            first, second = _SLOTS
            effect(f"word {index - second + first if second <= index < _SHADOW else index}")  # slots take turns
        self._words[index] = value & _WORD_MASK

    def bump_loan(self) -> int:
        """Change the loan word: nothing read from this client's memory since may be committed. Returns the new word."""
        self.loan_word = (self.loan_word + 1) & _WORD_MASK
        return self.loan_word

    @property
    def taken(self) -> Taken | None:
        """The ticket that the client took last, or None: what a daemon in doubt asks."""
        count = self.read(TAKEN_COUNT)
        while count:
            start = _SLOTS[count & 1]
            found = Taken(*(self.read(start + i) for i in range(3)))
            if (again := self.read(TAKEN_COUNT)) == count:
                return found
            count = again
        return None

    def take(self, taken: Taken) -> None:
        """Record that a ticket is being handed out; valid as a whole once the count was stored."""
        count = self.read(TAKEN_COUNT) + 1
        for i, value in enumerate(taken):
            self.write(_SLOTS[count & 1] + i, value)
        self.write(TAKEN_COUNT, count)

    @property
    def shadow_publication(self) -> tuple[int, int]:
        """Generation and revision of the publication that the shadow holds as a whole; (0, 0) for none."""
        return self.read(_SHADOW), self.read(_SHADOW + 1)

    def set_shadow_publication(self, generation: int, revision: int) -> None:
        """The daemon's word on its shadow: zero before the first byte moves, the publication once all is verified."""
        self.write(_SHADOW, 0)
        self.write(_SHADOW + 1, revision)
        self.write(_SHADOW, generation)

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def close(self) -> None:
        """Unmap and close; harmless when repeated. Words may not be touched afterwards."""
        if self.fd >= 0:
            del self._words
            self._map.close()
            os.close(self.fd)
            self.fd = -1
