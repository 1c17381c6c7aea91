"""One small container for columns: a magic word, a JSON header, int64 arrays. No pickle, no size that is trusted."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError

Ints = NDArray[np.int64]

_HEAD = struct.Struct("<4sI")
_MAGIC = b"RFT1"
MAX_INT = 1 << 48  # no tensor is larger; products of two such numbers are computed in Python or refused first


def encode(kind: str, header: Mapping[str, Any], arrays: Mapping[str, Ints]) -> bytes:
    """Bytes of a record: ``header`` must be JSON, ``arrays`` int64 of any shape."""
    columns = {name: list(array.shape) for name, array in arrays.items()}
    text = json.dumps({"kind": kind, "columns": columns, **header}, separators=(",", ":")).encode()
    body = [np.ascontiguousarray(array, dtype="<i8").tobytes() for array in arrays.values()]
    return b"".join([_HEAD.pack(_MAGIC, len(text)), text, *body])


def decode(kind: str, data: bytes) -> tuple[dict[str, Any], dict[str, Ints]]:
    """Header and read-only arrays of a record of this kind. Raises InputError on anything else."""
    header, body = _split(kind, data)
    columns = header.get("columns")
    if not isinstance(columns, dict):
        raise InputError(f"{kind} columns", "an object of shapes", type(columns).__name__)
    arrays: dict[str, Ints] = {}
    for name, shape in columns.items():
        count = _count(f"{kind} column {name}", shape)
        if 8 * count > len(body):
            raise InputError(f"{kind} column {name}", f"{8 * count} bytes", str(len(body)))
        arrays[name] = np.frombuffer(body, "<i8", count).reshape(shape)
        body = body[8 * count :]
    if len(body):
        raise InputError(kind, "no bytes after the last column", f"{len(body)} bytes")
    return header, arrays


def _split(kind: str, data: bytes) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise InputError(kind, f"at least {_HEAD.size} bytes", str(len(view)))
    magic, length = _HEAD.unpack_from(view)
    if magic != _MAGIC or length > len(view) - _HEAD.size:
        raise InputError(kind, "a refitd record", repr(bytes(view[:12])))
    try:
        header = parse_json(bytes(view[_HEAD.size : _HEAD.size + length]))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{kind} header", "JSON in UTF-8", str(error)[:80]) from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise InputError(f"{kind} header", f"an object of kind {kind}", repr(header)[:80])
    return header, view[_HEAD.size + length :]


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError (RecursionError) where it is none, or an object has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # json alone would keep the last one: a reader of the file may have meant another
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:40]!r} twice in one object")
    return value


def _count(field: str, shape: object) -> int:
    if not isinstance(shape, list) or not 1 <= len(shape) <= 2 or not all(is_int(n) for n in shape):
        raise InputError(field, "a shape of one or two sizes", repr(shape)[:80])
    count = 1
    for size in shape:
        count *= size
    return count


def is_int(value: object, top: int = MAX_INT) -> bool:
    """Whether ``value`` is a plain int in [0, top]."""
    return type(value) is int and 0 <= value <= top


def require_range(field: str, column: Ints, stop: int) -> None:
    """Raise InputError unless every entry of ``column`` lies in [0, stop)."""
    if column.size and (int(column.min()) < 0 or int(column.max()) >= stop):
        raise InputError(field, f"indices in [0, {stop})", f"{int(column.min())} to {int(column.max())}")


def name_fault(field: str, name: object) -> InputError | None:
    """What is wrong with a name: it must be a string that UTF-8 can write, without NUL; sockets and files carry it."""
    if not isinstance(name, str):
        return InputError(field, "a string", repr(name)[:80])
    bad = name.find("\0")
    try:
        name.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair: JSON can say it, UTF-8 cannot
        bad = error.start
    if bad < 0:
        return None
    return InputError(field, "text without NUL and lone surrogates", f"{name[max(0, bad - 40) : bad + 40]!a}")


def strings(field: str, value: object) -> tuple[str, ...]:
    """``value`` as a tuple of strings, or InputError."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(field, "a list of strings", repr(value)[:80])
    return tuple(value)
