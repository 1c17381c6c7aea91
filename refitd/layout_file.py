"""Layout files: JSON on disk (docs/layout.md)."""

from __future__ import annotations

import json
from pathlib import Path

from refitd.errors import InputError
from refitd.layout import Layout, codec


def load_layout(path: str | Path) -> Layout:
    """Read a layout file and check it. Raises InputError (file, JSON) or LayoutError (content)."""
    try:
        value = codec.parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"layout file {path}", "a readable file", error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"layout file {path}", "JSON in UTF-8, each key once", str(error)[:80]) from None
    layout = Layout.from_json(value)
    layout.check()
    return layout


def save_layout(layout: Layout, path: str | Path) -> None:
    """Write a layout file."""
    Path(path).write_text(json.dumps(layout.to_json(), indent=1) + "\n", encoding="utf-8")
