"""Records as JSON bytes: frozen dataclasses in, the same dataclasses out, every wrong field named.

Supports what records are made of: int, str, bool, float, None unions, tuples of one type, string-keyed dicts, named
tuples (as lists), nested records, and fields that are written packed (`refitd.epoch.packed`). Unknown fields are
ignored, so that a newer daemon may add some.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from refitd.epoch.identity import ByIdentity
from refitd.epoch.packed import PACKERS
from refitd.errors import ProtocolError

R = TypeVar("R")


def encode(record: Any) -> bytes:
    """Canonical JSON of a record: equal records give equal bytes."""
    kind: type = type(record)
    packed = _packed(kind)
    plain = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in packed}
    shown = {name: _json(value) for name, value in plain.items()}
    shown |= {name: _fragments[kind](getattr(record, name)) for name, kind in packed.items()}
    return ("{" + ",".join(f'"{name}":{shown[name]}' for name in sorted(shown)) + "}").encode()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_fields)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _fragment(pack: Callable[[Any], Any]) -> ByIdentity[Any, str]:
    return ByIdentity(lambda value: _json(pack(value)))


_fragments = {kind: _fragment(pack) for kind, (pack, _unpack_them) in PACKERS.items()}


@functools.cache
def _packed(kind: type) -> dict[str, str]:
    return {f.name: f.metadata["packed"] for f in dataclasses.fields(kind) if "packed" in f.metadata}


def decode(kind: type[R], data: bytes, where: str) -> R:
    """A record of ``kind`` from JSON bytes. Raises ProtocolError naming the field below ``where``."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(where, "a JSON object", f"{data[:40]!r} ({error})") from None
    return typing.cast("R", _build(kind, value, where))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast("type", kind), value, where)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*_tuple(tuple(_hints(kind).values()), value, where))
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _tuple(typing.get_args(kind), value, where)
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {key: _build(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is types.UnionType:
        inner = next(arg for arg in typing.get_args(kind) if arg is not types.NoneType)
        return None if value is None else _build(inner, value, where)
    _expect(type(value) is kind, where, getattr(kind, "__name__", str(kind)), value)
    return value


def _record(kind: type, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    known = {field.name: field for field in dataclasses.fields(kind)}
    missing = [f.name for f in known.values() if f.name not in value and f.default is dataclasses.MISSING]
    _expect(not missing, f"{where}.{missing[0] if missing else ''}", "a value", None)
    hints, packed = _hints(kind), _packed(kind)
    return kind(**{
        name: _unpack(packed[name], value[name], f"{where}.{name}") if name in packed
        else _build(hints[name], value[name], f"{where}.{name}")
        for name in known if name in value
    })  # fmt: skip


@functools.lru_cache(256)
def _same(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """One object for equal tuples: what is known of it need not be found out for each lane."""
    return value


def _unpack(kind: str, value: Any, where: str) -> Any:
    try:
        return _same(PACKERS[kind][1](value))
    except (ValueError, TypeError, AttributeError):
        raise ProtocolError(where, f"groups of {kind}", repr(value)[:80]) from None


def _tuple(args: tuple[Any, ...], value: Any, where: str) -> Any:
    _expect(isinstance(value, list), where, "a list", value)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    _expect(len(value) == len(args), where, f"{len(args)} items", value)
    return tuple(_build(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))


def _expect(holds: bool, where: str, expected: str, got: Any) -> None:
    if not holds:
        raise ProtocolError(where, expected, repr(got)[:80])
