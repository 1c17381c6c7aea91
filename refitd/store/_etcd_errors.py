"""etcd's and gRPC's errors turned into ours."""

from __future__ import annotations

import grpc

from refitd.errors import (
    LeaseLost,
    PermissionDenied,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    Unauthenticated,
)

# A write that ended for one of these reasons never reached the log.
_NOTHING_WRITTEN = (
    "failed to connect",
    "connections to all backends failing",
    "connection refused",
    "no leader",
    "not leader",
    "raft proposal dropped",
    "dns resolution failed",
    "errors resolving",
)
_BAD_CREDENTIALS = ("authentication failed", "user name is empty", "auth", "invalid auth token")
_AWAY = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
)


class LeaseExists(StoreError):
    """A grant with an id that is taken; seen only by the call that chose the id."""


def translate(error: grpc.RpcError, write: bool, address: str = "") -> StoreError:
    """Our error for one of gRPC's; ``write``: an answer that was lost may hide a change."""
    code, detail = error.code(), error.details() or ""
    text = f"etcd{' ' if address else ''}{address}: {detail or code.name}"
    lower = detail.lower()
    refusal = _refusal(code, lower)
    if refusal is not None:
        return refusal(text)
    if code not in _AWAY:
        return StoreError(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED or (write and not any(mark in lower for mark in _NOTHING_WRITTEN)):
        return StoreTimeout(text)
    return StoreUnavailable(text)


def _refusal(code: grpc.StatusCode, lower: str) -> type[StoreError] | None:
    """The error of an etcd that understood and said no."""
    invalid = code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    if code is grpc.StatusCode.UNAUTHENTICATED or (invalid and any(mark in lower for mark in _BAD_CREDENTIALS)):
        return Unauthenticated
    if code is grpc.StatusCode.FAILED_PRECONDITION and "lease already exists" in lower:
        return LeaseExists
    return {grpc.StatusCode.PERMISSION_DENIED: PermissionDenied, grpc.StatusCode.NOT_FOUND: LeaseLost}.get(code)
