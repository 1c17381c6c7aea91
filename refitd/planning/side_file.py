"""Side files: the layouts of all ranks of one side, in JSON (docs/planning-cli.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refitd.errors import InputError, LayoutError
from refitd.layout import Layout, codec, side_from_layouts
from refitd.layout.side import Side
from refitd.layout_file import load_layout

FORMAT = 1
_KEYS = {"refitd_side", "ranks"}
_RANK_KEYS = {"node", "domain", "layout"}


def load_side(path: Path) -> Side:
    """Read a side file and the layouts that it names, relative to it.

    Raises InputError (file, JSON, a field of it) or LayoutError (a layout that contradicts itself).
    """
    field = f"side file {path}"
    layouts: dict[str, Layout] = {}
    places: dict[str, tuple[str, str]] = {}
    read: dict[Path, Layout] = {}
    for key, row in _ranks(field, _document(field, path)):
        places[key] = _text(f"{field} {key} node", row["node"]), _text(f"{field} {key} domain", row["domain"])
        try:
            layouts[key] = _layout(f"{field} {key} layout", row["layout"], path.parent, read)
        except LayoutError as error:
            bad = [InputError(f"{key}: {v.field}", v.expected, v.got) for v in error.violations]
            raise LayoutError(bad) from None
    return side_from_layouts(layouts, places)


def _document(field: str, path: Path) -> dict[str, Any]:
    try:
        value = codec.parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(field, "a readable file", error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(field, "JSON in UTF-8", str(error)[:80]) from None
    if not isinstance(value, dict) or value.keys() != _KEYS:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise InputError(field, f"an object with the keys {sorted(_KEYS)}", f"{got}"[:80])
    if type(value["refitd_side"]) is not int or value["refitd_side"] != FORMAT:
        raise InputError(f"{field} refitd_side", str(FORMAT), repr(value["refitd_side"])[:40])
    return value


def _ranks(field: str, document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    table = document["ranks"]
    if not isinstance(table, dict) or not table:
        raise InputError(f"{field} ranks", "an object with at least one rank key", repr(table)[:80])
    for key, row in table.items():
        if not isinstance(row, dict) or row.keys() != _RANK_KEYS:
            got = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{field} {key}", f"an object with the keys {sorted(_RANK_KEYS)}", f"{got}"[:80])
        yield key, row


def _layout(field: str, value: object, folder: Path, read: dict[Path, Layout]) -> Layout:
    """``value`` is the name of a layout file, or a layout itself. A file that several ranks name is read once."""
    if isinstance(value, dict):
        layout = Layout.from_json(value)
        layout.check()
        return layout
    path = folder / _text(field, value)
    if path not in read:
        read[path] = load_layout(path)
    return read[path]


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(field, "a string", repr(value)[:40])
    return value
