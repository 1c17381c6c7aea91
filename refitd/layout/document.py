"""The layout file's JSON document (docs/layout.md): `Layout` to plain values and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from refitd.errors import InputError, LayoutError
from refitd.layout.box import Box, Piece

if TYPE_CHECKING:
    from refitd.layout.layout import Layout

FORMAT = 1
_KEYS = {"refitd_layout", "tensors", "storages", "pieces", "keep", "tied"}
Records = tuple[
    dict[str, tuple[list[int], str]], dict[str, tuple[int, str]], list[Piece], list[str], dict[str, str]
]  # fmt: skip


def to_json(layout: Layout) -> dict[str, Any]:
    """The document of a layout."""
    return {
        "refitd_layout": FORMAT,
        "tensors": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in layout.tensors.items()},
        "storages": {name: {"elements": numel, "dtype": dtype} for name, (numel, dtype) in layout.storages.items()},
        "pieces": [
            {
                "tensor": piece.tensor,
                "lo": list(piece.box.lo),
                "hi": list(piece.box.hi),
                "storage": piece.storage,
                "offset": piece.offset,
                "strides": list(piece.strides),
            }
            for piece in layout.pieces()
        ],
        "keep": list(layout.keep),
        "tied": dict(layout.tied),
    }


def records(value: object) -> Records:
    """The records of a document, as `Layout.from_pieces` takes them. Raises LayoutError with every wrong field."""
    bad: list[InputError] = []
    top = _object("layout", value, {"refitd_layout", "tensors", "storages", "pieces"}, _KEYS, bad)
    version = top.get("refitd_layout", FORMAT)
    if type(version) is not int or version != FORMAT:  # True and 1.0 are equal to 1
        bad.append(InputError("layout refitd_layout", str(FORMAT), repr(version)[:40]))
    tensors = {name: (_ints(f"{f} shape", row, "shape", bad), _text(f, row, "dtype", bad))
               for name, f, row in _entries(top, "tensors", {"shape", "dtype"}, bad)}  # fmt: skip
    storages = {name: (_int(f, row, "elements", bad), _text(f, row, "dtype", bad))
                for name, f, row in _entries(top, "storages", {"elements", "dtype"}, bad)}  # fmt: skip
    pieces = [_piece(f"pieces[{i}]", row, bad) for i, row in enumerate(_list("pieces", top.get("pieces", []), bad))]
    keep = [item for item in _list("keep", top.get("keep", []), bad) if _is_text("keep", item, bad)]
    tied = top.get("tied", {})
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        bad.append(InputError("tied", "an object alias -> name", repr(tied)[:80]))
    if bad:
        raise LayoutError(bad)
    return tensors, storages, pieces, keep, tied


def _piece(field: str, value: object, bad: list[InputError]) -> Piece:
    keys = {"tensor", "lo", "hi", "storage", "offset", "strides"}
    row = _object(field, value, keys, keys, bad)
    lo, hi, strides = (tuple(_ints(f"{field} {key}", row, key, bad)) for key in ("lo", "hi", "strides"))
    offset = _int(field, row, "offset", bad)
    return Piece(_text(field, row, "tensor", bad), Box(lo, hi), _text(field, row, "storage", bad), offset, strides)


def _entries(
    top: dict[str, Any], key: str, keys: set[str], bad: list[InputError]
) -> list[tuple[str, str, dict[str, Any]]]:
    table = top.get(key, {})
    if not isinstance(table, dict):
        bad.append(InputError(key, "an object", type(table).__name__))
        return []
    return [(name, f"{key} {name}", _object(f"{key} {name}", row, keys, keys, bad)) for name, row in table.items()]


def _object(field: str, value: object, need: set[str], known: set[str], bad: list[InputError]) -> dict[str, Any]:
    if not isinstance(value, dict):
        bad.append(InputError(field, f"an object with {sorted(need)}", type(value).__name__))
        return {}
    if need - value.keys() or value.keys() - known:
        bad.append(InputError(field, f"the keys {sorted(need)}", f"{sorted(map(str, value))}"[:120]))
    return value


def _list(field: str, value: object, bad: list[InputError]) -> list[Any]:
    if isinstance(value, list):
        return value
    bad.append(InputError(field, "a list", type(value).__name__))
    return []


def _ints(field: str, row: dict[str, Any], key: str, bad: list[InputError]) -> list[int]:
    items = row.get(key, [])
    if isinstance(items, list) and all(type(item) is int for item in items):
        return items
    bad.append(InputError(field, "a list of ints", repr(items)[:80]))
    return []


def _int(field: str, row: dict[str, Any], key: str, bad: list[InputError]) -> int:
    value = row.get(key, 0)
    if type(value) is int:
        return value
    bad.append(InputError(f"{field} {key}", "an int", repr(value)[:40]))
    return 0


def _text(field: str, row: dict[str, Any], key: str, bad: list[InputError]) -> str:
    value = row.get(key, "")
    return value if _is_text(f"{field} {key}", value, bad) else ""


def _is_text(field: str, value: object, bad: list[InputError]) -> bool:
    if not isinstance(value, str):
        bad.append(InputError(field, "a string", repr(value)[:40]))
    return isinstance(value, str)
