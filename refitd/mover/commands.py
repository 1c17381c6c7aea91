"""What each command of the daemon must carry; anything else ends the mover, and the daemon starts another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refitd.errors import ProtocolError
from refitd.hook.messages import COUNT, FLAG, POSITIVE, TEXT, WORD, Fields, check_fields
from refitd.hook.messages import Kind as FieldKind
from refitd.hook.wire import Message
from refitd.mover.round import RunOptions
from refitd.mover.transport.tcp import Address


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _list_of(expected: str, fields: Fields) -> FieldKind:
    item = FieldKind("an object", lambda value: isinstance(value, dict), fields)
    return FieldKind(expected, lambda value: isinstance(value, list), items=item)


SECONDS = FieldKind("seconds above 0", _seconds)
_STORAGES = _list_of("a list of storages", {"name": TEXT, "fd": COUNT, "offset": COUNT, "nbytes": COUNT, "dtype": TEXT})
_CONNECT = _list_of("a list of addresses", {"dst": TEXT, "host": TEXT, "port": POSITIVE})
_ACCEPT = FieldKind("a list of rank keys", lambda v: isinstance(v, list) and all(isinstance(key, str) for key in v))
_PUBLICATION = FieldKind(
    "generation and revision", lambda v: isinstance(v, list) and len(v) == 2 and all(COUNT.test(n) for n in v)
)
_WORDS = FieldKind(
    "an object of rank key to loan word", lambda v: isinstance(v, dict) and all(WORD.test(word) for word in v.values())
)
_ATTEMPT = FieldKind("an integer from 1", lambda value: COUNT.test(value) and value > 0)
_VERIFY = FieldKind("trailer or reread", lambda value: value in ("trailer", "reread"))
DEVICE_OR_UUID = FieldKind("a UUID, or memory on a device, or null", lambda v: v is None or isinstance(v, str | dict))
_NCCL = FieldKind("ranks of a communicator and a host", lambda v: isinstance(v, dict), {"ranks": _ACCEPT, "host": TEXT})
_LANE: Fields = {"lane": TEXT, "token": COUNT}

COMMANDS: Mapping[str, Fields] = {
    "mount": {"memory": TEXT, "storages": _STORAGES, "writable": FLAG, "word_index": COUNT},
    "unmount": {"memory": TEXT},
    "build": {**_LANE, "rank": TEXT, "connect": _CONNECT, "accept": _ACCEPT, "secret": TEXT, "job": TEXT},
    "edge": {**_LANE, "src": TEXT},
    "run": {**_LANE, "attempt": _ATTEMPT, "publication": _PUBLICATION, "words": _WORDS},
    "ready": {**_LANE, "attempt": _ATTEMPT, "src": TEXT, "word": WORD},
    "stand_by": _LANE,
    "revoke": _LANE,
    "limit": {},
    "store": {"away": FLAG},
    "ping": {"n": COUNT},
    "quit": {},
}
_OPTIONAL: Fields = {
    "device": DEVICE_OR_UUID, "timeout": SECONDS, "progress_timeout": SECONDS, "neighbour_timeout": SECONDS,
    "verify": _VERIFY, "nccl": _NCCL, "own": FLAG,
}  # fmt: skip


def check_command(message: Message) -> str:
    """The command's kind. Raises ProtocolError naming the field that is missing or wrong."""
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in COMMANDS:
        raise ProtocolError("kind", "one of " + ", ".join(COMMANDS), repr(kind)[:80])
    check_fields(message, COMMANDS[kind])
    check_fields(message, {name: rule for name, rule in _OPTIONAL.items() if name in message})
    return kind


def parse_connect(message: Message) -> list[Address]:
    """The addresses that a ``build`` names."""
    return [Address(peer["dst"], peer["host"], peer["port"]) for peer in message["connect"]]


def parse_run(message: Message) -> RunOptions:
    """The options of a ``run``."""
    optional = {name: message[name] for name in ("progress_timeout", "neighbour_timeout", "verify") if name in message}
    generation, revision = message["publication"]
    return RunOptions(message["attempt"], (generation, revision), message["words"], **optional)
