"""``etcd://host:port[,host:port]``: the store of a cluster."""

from __future__ import annotations

import math
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

from refitd.errors import InputError, LeaseLost, StoreUnavailable
from refitd.store._etcd_channel import Channel
from refitd.store._etcd_codec import key_range, to_item
from refitd.store._etcd_endpoint import Credentials, Metadata, Stubs, etcdrpc
from refitd.store._etcd_errors import LeaseExists
from refitd.store._etcd_txn import Transaction
from refitd.store._etcd_watch import EtcdWatch
from refitd.store.base import Compare, Counts, Item, Keys, Lease, Op, PutOp, TxnResult, check_key, check_txn, span_of


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
        self.counts = Counts()
        self._channel = Channel(addresses, credentials or Credentials(), request_timeout, self.counts)
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    @property
    def endpoint(self) -> str:
        """``host:port`` of the server that is asked now."""
        return self._channel.endpoint.address

    @property
    def away(self) -> bool:
        """Whether a server failed, and none has answered since."""
        return self._channel.away

    def get(self, key: str) -> Item | None:
        """The key as it is now, or None."""
        check_key("get.key", key)
        reply = self._range("get", etcdrpc.RangeRequest(key=key.encode()))
        return to_item(reply.kvs[0]) if reply.kvs else None

    def list(self, keys: Keys) -> tuple[list[Item], int]:
        """All items of a prefix or a span, by key, and the revision that they were read at."""
        first, end = key_range(span_of(keys))
        reply = self._range("list", etcdrpc.RangeRequest(key=first, range_end=end))
        return [to_item(kv) for kv in reply.kvs], reply.header.revision

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write; the revision it got. Raises LeaseLost; StoreTimeout when the outcome is unknown."""
        check_key("put.key", key)
        return Transaction(self._channel, "put", (), (PutOp(key, value, lease),), ()).run().revision

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        """Do ``then`` when every compare holds, else ``otherwise``, as one change with one revision.

        When the answer is lost, its keys are read back, and it is sent again where that does no harm.
        """
        check_txn(compares, then, otherwise)
        return Transaction(self._channel, "txn", compares, then, otherwise).run()

    def grant(self, ttl_seconds: float) -> EtcdLease:
        """A new lease of ``ttl_seconds``, rounded up to whole seconds, or more when etcd insists."""
        if ttl_seconds <= 0:
            raise InputError("grant.ttl_seconds", "more than 0", str(ttl_seconds))
        # We choose the id, so that a grant whose answer was lost can be asked for again.
        number = secrets.randbits(62) | 1 << 62  # not of random, whose seed a program may set
        request = etcdrpc.LeaseGrantRequest(TTL=math.ceil(ttl_seconds), ID=number)

        def ask(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.lease.LeaseGrant(request, seconds, metadata=metadata)

        try:
            ttl = self._channel.call("grant", ask, write=True).TTL
        except LeaseExists:
            ttl = self._granted(number)
        return EtcdLease(self, number, float(ttl))

    def watch(self, keys: Keys, from_revision: int = 0) -> EtcdWatch:
        """Changes with revision ``from_revision`` and later; 0 starts with a Resync. One stream, however many spans."""
        if self._channel.closed:
            raise StoreUnavailable("the store was closed")
        watch = EtcdWatch(self._channel, self.list, span_of(keys), from_revision)
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

        def ask(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.kv.Compact(request, seconds, metadata=metadata)

        self._channel.call("compact", ask, write=True, repeat=False)

    def _range(self, kind: str, request: Any) -> Any:
        def ask(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.kv.Range(request, seconds, metadata=metadata)

        return self._channel.call(kind, ask)

    def _granted(self, lease_id: int) -> int:
        """The time that etcd granted when the answer was lost."""
        request = etcdrpc.LeaseTimeToLiveRequest(ID=lease_id)

        def ask(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.lease.LeaseTimeToLive(request, seconds, metadata=metadata)

        return int(self._channel.call("grant", ask).grantedTTL)

    def _renew(self, lease_id: int) -> float:
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease_id)

        def ask(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            call = stubs.lease.LeaseKeepAlive(iter((request,)), seconds, metadata=metadata)
            try:
                return self._of_the_leader(next(call))
            except StopIteration:
                raise StoreUnavailable("etcd ended the keepalive without an answer") from None
            finally:
                call.cancel()

        ttl = float(self._channel.call("keepalive", ask).TTL)
        if ttl <= 0:  # etcd's way to say that it does not know the lease
            raise LeaseLost(f"lease {lease_id:x} expired or was revoked")
        return ttl

    def _of_the_leader(self, reply: Any) -> Any:
        """A leader that was frozen still renews leases when it wakes, although another one counts their time.

        etcd-io/etcd#15247, in all of 3.4 before 3.4.26: the term gives it away.
        """
        if reply.header.raft_term < self._channel.term:
            raise StoreUnavailable("an etcd that no longer leads renewed the lease")
        return reply

    def _revoke(self, lease_id: int) -> None:
        request = etcdrpc.LeaseRevokeRequest(ID=lease_id)

        def ask(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.lease.LeaseRevoke(request, seconds, metadata=metadata)

        try:
            self._channel.call("revoke", ask, write=True)
        except LeaseLost:
            return
