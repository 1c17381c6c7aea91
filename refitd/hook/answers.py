"""Errors as answers, and back: what the daemon raises for a request, the client raises again with the same type."""

from __future__ import annotations

import re
from typing import Any

from refitd.errors import (
    ConfigError,
    InputError,
    LayoutError,
    MismatchError,
    PlanError,
    ProtocolError,
    RefitdError,
    Refused,
    StoreTimeout,
    StoreUnavailable,
)
from refitd.hook.messages import UnknownMethod
from refitd.hook.wire import Message

_CAMEL = re.compile(r"(?<!^)(?=[A-Z])")
_VIOLATIONS = 1000


def code_of(kind: type[RefitdError]) -> str:
    """ProtocolError -> protocol, Refused -> refused, LayoutError -> layout, StoreUnavailable -> store_unavailable."""
    return _CAMEL.sub("_", kind.__name__.removesuffix("Error")).lower()


_INPUT = {code_of(kind): kind for kind in (InputError, ConfigError, ProtocolError, UnknownMethod, Refused)}
_LISTS = {code_of(kind): kind for kind in (LayoutError, MismatchError)}
_OTHERS = {code_of(kind): kind for kind in (PlanError, StoreUnavailable, StoreTimeout)}


def error_answer(error: Exception, request_id: int | None) -> Message:
    """The answer that carries ``error``; what is not refitd's own is told as ``internal`` without details."""
    return {"id": request_id, "error": _describe(error)}


def _describe(error: Exception) -> dict[str, Any]:
    if not isinstance(error, RefitdError):
        return _error("internal", "the daemon failed; its log says more")
    code = code_of(type(error))
    if not isinstance(error, InputError):
        return _error(code, str(error), retryable=isinstance(error, StoreUnavailable | StoreTimeout))
    fields = _error(code, str(error), field=error.field, expected=error.expected, got=error.got)
    if isinstance(error, LayoutError | MismatchError):
        fields["violations"] = [[v.field, v.expected, v.got] for v in error.violations[:_VIOLATIONS]]
    return fields


def _error(
    code: str, message: str, field: str = "", expected: str = "", got: str = "", retryable: bool = False
) -> dict[str, Any]:
    return {
        "code": code, "field": field, "expected": expected, "got": got, "message": message[:4000],
        "retryable": retryable,
    }  # fmt: skip


def error_of(answer: Message) -> RefitdError:
    """The exception that an error answer stands for; a plain RefitdError where its code is not known here."""
    error = answer["error"]
    code, plain = error["code"], InputError(error["field"], error["expected"], error["got"])
    if code in _LISTS:
        rows = error.get("violations") or [[plain.field, plain.expected, plain.got]]
        return _LISTS[code]([InputError(*map(str, row)) for row in rows])
    if code in _INPUT:
        return _INPUT[code](plain.field, plain.expected, plain.got)
    return _OTHERS.get(code, RefitdError)(error["message"])
