"""Our words in etcd's messages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refitd.store._etcd_endpoint import etcdrpc
from refitd.store.base import Compare, CreateRevision, DeleteOp, Item, ModRevision, Op, PutOp, Span


def key_range(span: Span) -> tuple[bytes, bytes]:
    """etcd's first key and range end for a span; a zero byte stands for the first key and for no end."""
    return span.first.encode() or b"\0", span.end.encode() or b"\0"


def to_item(kv: Any) -> Item:
    """Our Item for etcd's KeyValue."""
    return Item(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def to_txn(compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> Any:
    """etcd's request for a transaction."""
    return etcdrpc.TxnRequest(
        compare=[_compare(c) for c in compares], success=[_op(o) for o in then], failure=[_op(o) for o in otherwise]
    )


def from_gets(responses: Any) -> tuple[Item | None, ...]:
    """What the GetOps of a transaction found, in order."""
    ranges = [r.response_range for r in responses if r.WhichOneof("response") == "response_range"]
    return tuple(to_item(r.kvs[0]) if r.kvs else None for r in ranges)


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
