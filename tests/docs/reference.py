"""``python tests/docs/reference.py``: the tables of docs/protocol.md that are made from the code, written into it."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pages import DOCS

from refitd.epoch import view
from refitd.hook import messages
from refitd.hook.messages import Kind

PAGE = DOCS / "protocol.md"
_WORDS = {str: "text", int: "number", bool: "true or false", float: "number"}


def tables() -> dict[str, str]:
    """Marker in the page -> its table."""
    return {
        "messages": _table(("message", "way", "fields", "answer"), _messages()),
        "records": _table(("key", "fields"), _records()),
        "parts": _table(("part", "fields"), _parts()),
    }


def filled(page: str) -> str:
    """The page with every table as the code has it."""
    for name, table in tables().items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        page = before + mark + table + "<!-- end -->" + rest.partition("<!-- end -->")[2]
    return page


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _messages() -> Iterable[tuple[str, str, str, str]]:
    for name, fields in messages.REQUESTS.items():
        yield f"`{name}`", "request", _with_optional(name, fields), "; ".join(_shown(messages.ANSWERS[name]))
    for name, fields in messages.EVENTS.items():
        yield f"`{name}`", "event", _with_optional(name, fields), ""


def _with_optional(name: str, fields: Mapping[str, Kind]) -> str:
    optional = _shown(messages.OPTIONAL.get(name, {}))
    return "; ".join([*_shown(fields), *(f"{field} (may be missing)" for field in optional)])


def _shown(fields: Mapping[str, Kind]) -> list[str]:
    return [f"`{name}`: {_kind(kind)}" for name, kind in fields.items()]


def _kind(kind: Kind) -> str:
    nested = kind.fields or (kind.items.fields if kind.items else None)
    return f"{kind.expected} ({', '.join(f'`{name}`' for name in nested)})" if nested else kind.expected


def _records() -> Iterable[tuple[str, str]]:
    below = {
        "members": "node",
        "offers": "node",
        "drains": "node",
        "parked": "node",
        "devices": "id",
        "reports": "revision",
    }
    for name, kind in view._SINGLES.items():
        yield f"`{name}`", _fields(kind)
    for name, kind in view._TABLES.items():
        rest = "replica/node" if name == "acks" else below.get(name, "replica")
        yield f"`{name}/<{rest}>`", _fields(kind)


def _parts() -> Iterable[tuple[str, str]]:
    """Records inside of records, in the order in which they are met."""
    todo = [*view._SINGLES.values(), *view._TABLES.values()]
    seen = list[Any]()
    for kind in todo:
        for hint in typing.get_type_hints(kind).values():
            for part in _inner(hint):
                if part not in seen:
                    seen.append(part)
                    todo.append(part)
    return [(part.__name__, _fields(part)) for part in seen]


def _inner(hint: Any) -> list[Any]:
    found = [part for argument in typing.get_args(hint) for part in _inner(argument)]
    return found + [hint] * (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))


def _fields(kind: Any) -> str:
    packed = (
        {f.name for f in dataclasses.fields(kind) if "packed" in f.metadata}
        if dataclasses.is_dataclass(kind)
        else set()
    )
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if not name.startswith("_")}
    return "; ".join(f"`{name}`: {_hint(hint)}{', packed' * (name in packed)}" for name, hint in hints.items())


def _hint(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if argument is type(None) else _hint(argument) for argument in arguments)
    if typing.get_origin(hint) is tuple:
        return f"list of {_hint(arguments[0])}" if Ellipsis in arguments else f"{len(arguments)} numbers"
    if typing.get_origin(hint) is dict:
        return f"{_hint(arguments[1])} by name"
    return _WORDS.get(hint) or hint.__name__


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    sys.stdout.write(f"{PAGE} is as the code says\n")
