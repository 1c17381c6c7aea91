"""Faults planted in our own code, to see that the oracle finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refitd.store.base import Compare, CreateRevision, Op, TxnResult

from .loop import PROCESS, loop, sleep
from .store import SimStore


class Sleepy:
    """The store of a leader that is stopped just before a decision of its reaches the store, and wakes much later.

    ``fenced`` False leaves the comparison with its leadership out, as a daemon that has none would.
    """

    def __init__(self, store: SimStore, fenced: bool) -> None:
        self._store, self._fenced = store, fenced
        self.asleep = False
        self.outcomes: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        fences = [c for c in compares if isinstance(c, CreateRevision) and c.key.endswith("/leader")]
        if not (self.asleep and fences):
            return self._store.txn(compares, then, otherwise)
        self.asleep = False
        process = PROCESS.get()
        assert process is not None
        process.pause()
        loop().call_later(20.0, process.resume, context=loop().nobody)
        sleep(0.001)
        kept = compares if self._fenced else [c for c in compares if c not in fences]
        result = self._store.txn(kept, then, otherwise)
        self.outcomes.append(result.ok)
        return result
