"""Every message between a client and its daemon: which fields it must have and of which type.

Requests have ``id`` and ``method``; answers repeat the ``id`` with ``ok`` or ``error``; events have ``event``.
Unknown fields are ignored, so that a newer peer may add some. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from refitd.errors import ProtocolError
from refitd.hook.wire import Message

PROTO = 1


class Outcome(StrEnum):
    """What `Offer.released` says; both mean that the weights may change again."""

    RELEASED = "RELEASED"
    SKIPPED = "SKIPPED"


RELEASED, SKIPPED = Outcome.RELEASED, Outcome.SKIPPED
TRAINER, ENGINE, ADMIN = "trainer", "engine", "admin"
IN_PLACE, HOST_SHADOW, DEVICE_SHADOW = "in_place", "host_shadow", "device_shadow"
SHADOWS = (HOST_SHADOW, DEVICE_SHADOW)
_HANDLE = re.compile("[0-9a-f]{128}")
_NAME = re.compile(r"[A-Za-z0-9_.:@+=-]{1,128}")


class UnknownMethod(ProtocolError):
    """The request's method is not one of this protocol version."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may hold: words for the error, a test, and fields of its own where it is an object."""

    expected: str
    test: Callable[[Any], bool]
    fields: Mapping[str, Kind] | None = None
    items: Kind | None = None

    def check(self, field: str, value: Any) -> None:
        """Raises ProtocolError naming ``field``."""
        if not self.test(value):
            raise ProtocolError(field, self.expected, _shown(value))
        if self.fields and value is not None:
            check_fields(value, self.fields, f"{field}.")
        if self.items and value is not None:
            for i, item in enumerate(value):
                self.items.check(f"{field}[{i}]", item)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value < high


def _one_of(*choices: str) -> Kind:
    return Kind("one of " + ", ".join(choices), lambda value: value in choices)


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.expected}, or null", lambda v: v is None or kind.test(v), kind.fields, kind.items)


def _record(**fields: Kind) -> Kind:
    return Kind("an object", lambda value: isinstance(value, dict), fields)


def _list_of(items: Kind) -> Kind:
    return Kind("a list", lambda value: isinstance(value, list), items=items)


def is_name(value: Any) -> bool:
    """Whether ``value`` may name a job, run or replica: it becomes part of store keys."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and value not in (".", "..")


COUNT = Kind("an integer from 0", _integer(0, 1 << 63))
POSITIVE_BYTES = Kind("bytes, from 1", _integer(1, 1 << 63))
POSITIVE = Kind("an integer from 1", _integer(1, 1 << 31))
RATE = Kind("whole bytes per second, 10**6 to 10**15", _integer(10**6, 10**15 + 1))
STEP = Kind("an integer", _integer(-(1 << 63), 1 << 63))
WORD = Kind("an unsigned 64-bit integer", _integer(0, 1 << 64))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
NAME = Kind("a name of 1 to 128 letters, digits or _.:@+=-", is_name)
NAME_OR_EMPTY = Kind(f"{NAME.expected}, or empty", lambda value: value == "" or is_name(value))
NAMES = _list_of(TEXT)
REASONS = Kind(
    "an object of text to text", lambda v: isinstance(v, dict) and all(isinstance(text, str) for text in v.values())
)
TICKET = _record(
    kind=_one_of("receive", "apply"),
    job=NAME, replica=NAME, generation=COUNT, revision=COUNT, step=STEP, token=COUNT,
)  # fmt: skip
REPORT = _record(generation=COUNT, revision=COUNT, step=STEP, committed=NAMES, missing=REASONS, closed=TEXT)
MEMORY = _list_of(_record(name=TEXT, fd=COUNT, offset=COUNT, nbytes=COUNT))


def _is_block(value: Any) -> bool:
    """Whether ``value`` may describe device memory: see `refitd.hook.gpu.export.DeviceExport`."""
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        return False
    if value.get("kind") == "ipc":
        return bool(_HANDLE.fullmatch(str(value.get("handle")))) and COUNT.test(value.get("nbytes"))
    segments = value.get("segments")
    good = isinstance(segments, list) and bool(segments) and all(POSITIVE_BYTES.test(nbytes) for nbytes in segments)
    return value.get("kind") == "vmm" and COUNT.test(value.get("fd")) and good


BLOCK = Kind("an IPC handle of 64 bytes, or segments with a descriptor each", _is_block)
DEVICE = _record(
    uuid=TEXT, blocks=_list_of(BLOCK), storages=_list_of(_record(name=TEXT, block=COUNT, offset=COUNT, nbytes=COUNT))
)
LENT = _record(memory=MEMORY, device=_or_null(DEVICE))
STATE = _record(generation=COUNT, revision=COUNT, step=STEP, token=COUNT, dirty=FLAG)

Fields = Mapping[str, Kind]
REQUESTS: Mapping[str, Fields] = {
    "hello": {
        "proto": COUNT, "client": TEXT, "job": NAME_OR_EMPTY, "side": _one_of(TRAINER, ENGINE, ADMIN),
        "group": NAME_OR_EMPTY, "rank": COUNT, "world": POSITIVE, "incarnation": TEXT,
    },
    "register": {"mode": _one_of(TRAINER, IN_PLACE, *SHADOWS), "keep": NAMES, "state": _or_null(STATE)},
    "publish": {"seq": COUNT, "step": STEP, "word": WORD, "memory": _or_null(MEMORY)},
    "withdraw": {"seq": COUNT, "reason": TEXT},
    "report": {"seq": COUNT, "close": FLAG, "min_replicas": _or_null(COUNT)},
    "receive": {"ticket": TICKET, "word": WORD, "memory": MEMORY},
    "relent": {"word": WORD},
    "committed": {"ticket": TICKET},
    "applied": {"ticket": TICKET},
    "release": {},
    "status": {},
    "pause": {"job": NAME, "reason": TEXT},
    "resume": {"job": NAME},
    "drain": {"cancel": FLAG},
    "limit": {"job": NAME, "rate": _or_null(RATE)},
}  # fmt: skip
_LOAN: Fields = {"loan": WORD}  # the word of the receive that it is about
OPTIONAL: Mapping[str, Fields] = {
    "register": {"device": _or_null(TEXT), "path": _one_of("auto", "library"), "shadow": _or_null(LENT)},
    "publish": {"device": _or_null(DEVICE)},
    "receive": {"device": _or_null(DEVICE)},
    "relend": _LOAN, "commit": _LOAN, "failed": _LOAN,
}  # fmt: skip
ANSWERS: Mapping[str, Fields] = {
    **{method: {} for method in REQUESTS},
    "hello": {"proto": COUNT, "server": TEXT, "node": TEXT},
    "register": {"digest": TEXT},
    "report": {"report": _or_null(REPORT)},
    "status": {"node": TEXT},
    "pause": {"reason": TEXT},
    "resume": {"reason": TEXT},
    "drain": {"drained": FLAG, "reason": TEXT},
    "limit": {"reason": TEXT},
}
EVENTS: Mapping[str, Fields] = {
    "planned": {"seq": COUNT},
    "released": {"seq": COUNT, "outcome": _one_of(RELEASED, SKIPPED), "reason": TEXT},
    "report": {"seq": COUNT, "report": REPORT},
    "ticket": {"ticket": _or_null(TICKET)},
    "relend": {"reason": TEXT},
    "commit": {"ticket": TICKET},
    "failed": {"reason": TEXT},
}
ERROR = _record(code=TEXT, field=TEXT, expected=TEXT, got=TEXT, message=TEXT, retryable=FLAG)


def check_fields(message: Mapping[str, Any], fields: Fields, prefix: str = "") -> None:
    """Raises ProtocolError for the first field that is missing or of another type; unknown fields pass."""
    for name, kind in fields.items():
        if name not in message:
            raise ProtocolError(prefix + name, kind.expected, "nothing")
        kind.check(prefix + name, message[name])


def check(message: Message) -> Message:
    """Check a request, an event or an error answer and return it.

    Raises ProtocolError naming field, expected and got; UnknownMethod for a request that this version does not have.
    """
    if "event" in message:
        check_fields(message, _schema(EVENTS, "event", message["event"]))
        _check_optional(message, message["event"])
    elif "method" in message:
        COUNT.check("id", message.get("id"))
        check_fields(message, _schema(REQUESTS, "method", message["method"]))
        _check_optional(message, message["method"])
        if message["method"] == "hello":
            _check_hello(message)
    elif "error" in message:
        ERROR.check("error", message["error"])
    else:
        raise ProtocolError("message", "method, event or error", "none of them")
    return message


def _check_optional(message: Message, name: str) -> None:
    check_fields(message, {field: kind for field, kind in OPTIONAL.get(name, {}).items() if field in message})


def check_answer(method: str, message: Message) -> Message:
    """Check the good answer to ``method`` and return it. Raises ProtocolError."""
    if message.get("ok") is not True:
        raise ProtocolError("ok", "true", _shown(message.get("ok")))
    check_fields(message, ANSWERS[method])
    return message


def _schema(schemas: Mapping[str, Fields], field: str, name: Any) -> Fields:
    if not isinstance(name, str) or name not in schemas:
        kind = UnknownMethod if field == "method" else ProtocolError
        raise kind(field, "one of " + ", ".join(sorted(schemas)), _shown(name))
    return schemas[name]


def _check_hello(message: Message) -> None:
    if message["proto"] != PROTO:
        raise ProtocolError("proto", str(PROTO), str(message["proto"]))
    if message["rank"] >= message["world"]:
        raise ProtocolError("rank", f"less than world {message['world']}", str(message["rank"]))
    if message["side"] != ADMIN:
        NAME.check("job", message["job"])
        NAME.check("group", message["group"])


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an engine is asked to do next: `kind` is ``receive`` (in_place) or ``apply`` (shadow)."""

    kind: str
    job: str
    replica: str
    generation: int
    revision: int
    step: int
    token: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Ticket:
        """Raises ProtocolError."""
        TICKET.check("ticket", value)
        return cls(**{name: value[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a publication, the same on every rank: replicas that committed, and why others did not."""

    generation: int
    revision: int
    step: int
    committed: list[str]
    missing: dict[str, str]
    closed: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Report:
        """Raises ProtocolError."""
        REPORT.check("report", value)
        return cls(**{name: value[name] for name in cls.__slots__})
