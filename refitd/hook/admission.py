"""What the server demands before a handler sees a message: hello, descriptors, and errors as answers."""

from __future__ import annotations

import re
from typing import Any

from refitd.errors import InputError, ProtocolError, RefitdError, StoreTimeout, StoreUnavailable
from refitd.hook.memfd import check_memory
from refitd.hook.messages import ADMIN, HOST_SHADOW, UnknownMethod, check
from refitd.hook.page import ControlPage
from refitd.hook.session import Fds, Session
from refitd.hook.wire import Message

_CAMEL = re.compile(r"(?<!^)(?=[A-Z])")


def admit(session: Session, message: Message, fds: Fds) -> None:
    """Fill the session from its hello and map its control page. Raises ProtocolError."""
    if message.get("method") != "hello":
        raise ProtocolError("method", "hello", repr(message.get("method"))[:80])
    check(message)
    session.client, session.job, session.side = message["client"], message["job"], message["side"]
    session.group, session.incarnation = message["group"], message["incarnation"]
    session.rank, session.world = message["rank"], message["world"]
    if session.side != ADMIN:
        _require(fds, 1)
        session.page = ControlPage.map(fds[0])


def check_descriptors(message: Message, fds: Fds) -> None:
    """Raises ProtocolError where a request's descriptors are missing, too small or could shrink."""
    if message["method"] == "hello":
        raise ProtocolError("method", "one hello", "a second hello")
    if message["method"] == "register":
        _require(fds, 2 if message["mode"] == HOST_SHADOW else 1)
    for i, entry in enumerate(message.get("memory") or ()):
        field = f"memory[{i}]"
        if entry["fd"] >= len(fds):
            raise ProtocolError(f"{field}.fd", f"less than {len(fds)}", str(entry["fd"]))
        check_memory(fds[entry["fd"]], entry["offset"] + entry["nbytes"], field)


def _require(fds: Fds, count: int) -> None:
    if len(fds) < count:
        raise ProtocolError("fds", f"{count} descriptors", str(len(fds)))


def error_answer(error: Exception, request_id: int | None) -> Message:
    """The answer that carries ``error``; what is not refitd's own is told as ``internal`` without details."""
    return {"id": request_id, "error": _describe(error)}


def _describe(error: Exception) -> dict[str, Any]:
    if not isinstance(error, RefitdError):
        return _error("internal", "the daemon failed; its log says more")
    code = "unknown_method" if isinstance(error, UnknownMethod) else _code(error)
    if isinstance(error, InputError):
        return _error(code, str(error), field=error.field, expected=error.expected, got=error.got)
    return _error(code, str(error), retryable=isinstance(error, StoreUnavailable | StoreTimeout))


def _error(
    code: str, message: str, field: str = "", expected: str = "", got: str = "", retryable: bool = False
) -> dict[str, Any]:
    return {
        "code": code, "field": field, "expected": expected, "got": got, "message": message[:4000],
        "retryable": retryable,
    }  # fmt: skip


def _code(error: RefitdError) -> str:
    """ProtocolError -> protocol, Refused -> refused, LayoutError -> layout, StoreUnavailable -> store_unavailable."""
    return _CAMEL.sub("_", type(error).__name__.removesuffix("Error")).lower()
