"""A transaction whose answer was lost: read back, and sent again where that does no harm.

Sent again: when a compare can no longer hold once the transaction has been applied, it is applied at most once however
often it arrives. Recognised: its keys hold what we wrote, under our leases, changed together in one revision that the
store had not reached when we began.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from refitd.errors import StoreError, StoreTimeout, StoreUnavailable
from refitd.store._chance import CHANCE
from refitd.store._etcd_channel import LEAST, Channel
from refitd.store._etcd_codec import from_gets, to_txn
from refitd.store._etcd_endpoint import Metadata, Stubs
from refitd.store.base import Compare, CreateRevision, DeleteOp, GetOp, Item, ModRevision, Op, PutOp, TxnResult

_PAUSE = (0.05, 0.15)  # seconds between looks
_SHARES = 2  # at least so many attempts fit in the time


def at_most_once(compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> bool:
    """Whether a second arrival of the transaction changes nothing."""
    if not all(isinstance(op, GetOp) for op in otherwise):
        return False
    puts = {op.key for op in then if isinstance(op, PutOp)}
    deletes = {op.key for op in then if isinstance(op, DeleteOp)}
    return any(_is_spent(compare, puts, deletes) for compare in compares)


def _is_spent(compare: Compare, puts: set[str], deletes: set[str]) -> bool:
    """Whether a compare that held is false after the writes. A put keeps the create revision of a key that exists."""
    match compare:
        case ModRevision(key, revision):
            return key in puts or (key in deletes and revision != 0)
        case CreateRevision(key, revision):
            return (key in puts and revision == 0) or (key in deletes and revision != 0)
    return False


class Transaction:
    """One transaction on its way."""

    def __init__(
        self, channel: Channel, kind: str, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> None:
        self._channel, self._kind = channel, kind
        self._request = to_txn(compares, then, otherwise)
        self._puts = [op for op in then if isinstance(op, PutOp)]
        self._again = at_most_once(compares, then, otherwise)
        self._legible = bool(self._puts) and not any(isinstance(op, GetOp) for op in then)
        gets = [GetOp(op.key) for op in self._puts]
        self._look = to_txn(compares, then, gets) if self._again else to_txn((), gets, ())
        self._before = channel.revision

    def run(self) -> TxnResult:
        """Its result, within the channel's time. Raises StoreTimeout where it stays unknown, and other StoreErrors."""
        deadline = time.monotonic() + self._channel.timeout
        share = self._channel.timeout / _SHARES if self._again or self._legible else self._channel.timeout
        doubt: StoreTimeout | None = None
        failure: StoreError
        while True:
            left = max(LEAST, min(share, deadline - time.monotonic()))
            try:
                result = self._send(left) if doubt is None else self._settle(left)
            except StoreTimeout as error:
                failure = doubt = doubt or error
            except StoreUnavailable as error:
                failure = doubt or error
            else:
                if result is not None:
                    return result
                if self._again:  # it was refused, or applied and overtaken: nobody can tell
                    raise StoreTimeout(f"{doubt}; its keys have changed since") from None
            if self._channel.closed or not self._worth(doubt) or time.monotonic() > deadline - LEAST:
                raise failure
            time.sleep(min(CHANCE.uniform(*_PAUSE), max(0.0, deadline - time.monotonic())))

    def _worth(self, doubt: StoreTimeout | None) -> bool:
        """Whether another look or attempt may end it."""
        return self._again or (self._legible and doubt is not None)

    def _send(self, seconds: float) -> TxnResult:
        reply = self._call(self._request, seconds)
        return TxnResult(reply.succeeded, reply.header.revision, from_gets(reply.responses))

    def _settle(self, seconds: float) -> TxnResult | None:
        """Look, or send again; None where what is there is not ours."""
        reply = self._call(self._look, seconds)
        if self._again and reply.succeeded:
            return TxnResult(True, reply.header.revision, from_gets(reply.responses))
        revision = self._ours(from_gets(reply.responses))
        return TxnResult(True, revision, ()) if revision else None

    def _ours(self, items: Sequence[Item | None]) -> int:
        """The revision that wrote all of our puts, 0 where that cannot be seen."""
        revisions = {
            item.mod_revision if item and _wrote(op, item) else 0 for op, item in zip(self._puts, items, strict=True)
        }
        revision = revisions.pop() if len(revisions) == 1 else 0
        return revision if self._legible and revision > self._before else 0

    def _call(self, request: Any, seconds: float) -> Any:
        def send(stubs: Stubs, left: float, metadata: Metadata) -> Any:
            return stubs.kv.Txn(request, left, metadata=metadata)

        return self._channel.call(self._kind, send, write=True, repeat=False, timeout=seconds)


def _wrote(op: PutOp, item: Item) -> bool:
    return item.value == op.value and item.lease == (op.lease.id if op.lease else 0)
