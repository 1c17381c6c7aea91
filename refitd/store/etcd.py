"""``etcd://host:port[,host:port]``: the store of a cluster."""

from __future__ import annotations

import builtins
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tenacity

from refitd.errors import InputError, LeaseLost, StoreUnavailable
from refitd.store._etcd_channel import Channel, Credentials, etcdrpc, parse_addresses
from refitd.store._etcd_watch import EtcdWatch, key_range, to_item
from refitd.store.base import (
    Compare,
    CreateRevision,
    DeleteOp,
    Item,
    Lease,
    ModRevision,
    Op,
    PutOp,
    TxnResult,
    check_key,
    check_ops,
)

T = TypeVar("T")
_LEAST = 0.05  # seconds that a last attempt is given


class EtcdLease:
    """A lease of an EtcdStore. ``ttl`` is what etcd granted."""

    def __init__(self, store: EtcdStore, lease_id: int, ttl: float) -> None:
        self._store, self.id, self.ttl = store, lease_id, ttl

    def keepalive(self) -> float:
        """Renew; the seconds now left. Raises LeaseLost, StoreUnavailable, StoreTimeout."""
        return self._store._renew(self.id)

    def revoke(self) -> None:
        """Give the lease up, with its keys; nothing happens when it is gone already."""
        self._store._revoke(self.id)

    def __repr__(self) -> str:
        return f"EtcdLease({self.id:x}, ttl={self.ttl})"


class EtcdStore:
    """A Store in etcd. ``addresses``: ``host:port[,host:port]``; ``request_timeout``: seconds a call may take.

    Nothing is sent before the first call, so an etcd that is away does not keep anybody from starting.
    """

    def __init__(self, addresses: str, credentials: Credentials | None = None, request_timeout: float = 2.0) -> None:
        self._channel = Channel(parse_addresses(addresses), credentials or Credentials(), request_timeout)
        self._timeout = request_timeout
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    def get(self, key: str) -> Item | None:
        """The key as it is now, or None."""
        check_key("get.key", key)
        reply = self._read(etcdrpc.RangeRequest(key=key.encode()))
        return to_item(reply.kvs[0]) if reply.kvs else None

    def list(self, prefix: str) -> tuple[list[Item], int]:
        """All items below ``prefix``, by key, and the revision that they were read at."""
        first, end = key_range(prefix)
        reply = self._read(etcdrpc.RangeRequest(key=first, range_end=end))
        return [to_item(kv) for kv in reply.kvs], reply.header.revision

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write; the revision it got. Raises LeaseLost; StoreTimeout when the outcome is unknown."""
        check_key("put.key", key)
        return int(self._channel.call("kvstub", "Put", _put(PutOp(key, value, lease)), write=True).header.revision)

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        """Do ``then`` when every compare holds, else ``otherwise``, as one change with one revision."""
        check_ops("then", then)
        check_ops("otherwise", otherwise)
        for part in (*compares, *then, *otherwise):
            check_key("txn.key", part.key)
        request = etcdrpc.TxnRequest(
            compare=[_compare(c) for c in compares], success=[_op(o) for o in then], failure=[_op(o) for o in otherwise]
        )
        reply = self._channel.call("kvstub", "Txn", request, write=True)
        return TxnResult(reply.succeeded, reply.header.revision, _gets(reply.responses))

    def grant(self, ttl_seconds: float) -> EtcdLease:
        """A new lease of ``ttl_seconds``, rounded up to whole seconds, or more when etcd insists."""
        if ttl_seconds <= 0:
            raise InputError("grant.ttl_seconds", "more than 0", str(ttl_seconds))
        request = etcdrpc.LeaseGrantRequest(TTL=math.ceil(ttl_seconds))
        reply = self._channel.call("leasestub", "LeaseGrant", request, write=True)
        return EtcdLease(self, reply.ID, float(reply.TTL))

    def watch(self, prefix: str, from_revision: int = 0) -> EtcdWatch:
        """Changes with revision ``from_revision`` and later; 0 starts with a Resync."""
        if self._channel.closed:
            raise StoreUnavailable("the store was closed")
        watch = EtcdWatch(self._channel, self.list, prefix, from_revision)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """End all watches and close the sockets; later calls raise StoreUnavailable."""
        for watch in tuple(self._watches):
            watch.close()
        self._channel.close()

    def compact(self, revision: int) -> None:
        """Forget the history up to and including ``revision``."""
        request = etcdrpc.CompactionRequest(revision=revision, physical=True)
        self._channel.call("kvstub", "Compact", request, write=True)

    def _read(self, request: Any) -> Any:
        return self._retry(lambda left: self._channel.call("kvstub", "Range", request, write=False, timeout=left))

    def _renew(self, lease_id: int) -> float:
        ttl = self._retry(lambda left: self._renew_once(lease_id, left))
        if ttl <= 0:  # etcd's way to say that it does not know the lease
            raise LeaseLost(f"lease {lease_id:x} expired or was revoked")
        return ttl

    def _renew_once(self, lease_id: int, timeout: float) -> float:
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease_id)

        def ask(client: Any, metadata: Any) -> float:
            call = client.leasestub.LeaseKeepAlive(iter((request,)), timeout, metadata=metadata)
            try:
                return float(next(call).TTL)
            except StopIteration:
                raise StoreUnavailable("etcd ended the keepalive without an answer") from None
            finally:
                call.cancel()

        return float(self._channel.use(ask, write=False))

    def _revoke(self, lease_id: int) -> None:
        try:
            self._channel.call("leasestub", "LeaseRevoke", etcdrpc.LeaseRevokeRequest(ID=lease_id), write=True)
        except LeaseLost:
            return

    def _retry(self, attempt: Callable[[float], T]) -> T:
        """Only for calls that change nothing, or the same when sent twice: repeat while the store is away."""
        deadline = time.monotonic() + self._timeout
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(self._timeout),
            wait=tenacity.wait_random(0.05, 0.2),
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, StoreUnavailable) and not self._channel.closed),
            reraise=True,
        )
        return retrying(lambda: attempt(max(_LEAST, deadline - time.monotonic())))


def _put(op: PutOp) -> Any:
    return etcdrpc.PutRequest(key=op.key.encode(), value=op.value, lease=op.lease.id if op.lease else 0)


def _compare(compare: Compare) -> Any:
    target, key = etcdrpc.Compare, compare.key.encode()
    match compare:
        case CreateRevision(_, revision):
            return target(result=target.EQUAL, target=target.CREATE, key=key, create_revision=revision)
        case ModRevision(_, revision):
            return target(result=target.EQUAL, target=target.MOD, key=key, mod_revision=revision)
        case _:
            return target(result=target.EQUAL, target=target.VALUE, key=key, value=compare.value)


def _op(op: Op) -> Any:
    match op:
        case PutOp():
            return etcdrpc.RequestOp(request_put=_put(op))
        case DeleteOp(key):
            return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key.encode()))
        case _:
            return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=op.key.encode()))


def _gets(responses: Any) -> tuple[Item | None, ...]:
    ranges: builtins.list[Any] = [r.response_range for r in responses if r.WhichOneof("response") == "response_range"]
    return tuple(to_item(r.kvs[0]) if r.kvs else None for r in ranges)
