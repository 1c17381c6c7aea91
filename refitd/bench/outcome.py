"""How every benchmark ends: what it says, what it writes, and its exit status."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_PLACES = ("--out", "--plot")  # of one machine; they say nothing about the numbers


def failed(error: Exception, as_json: bool) -> int:
    """Say why there are no numbers; exit status 1."""
    print(f"refitd bench: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"ok": False, "reason": str(error)}))
    return 1


def finished(document: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Write ``document`` to ``arguments.out``, where given, and print it with ``arguments.json``; exit status 0."""
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(document))
    return 0


def command(name: str, argv: Sequence[str]) -> str:
    """The command that made the numbers, without the places of its output."""
    words = iter(argv)
    kept: list[str] = []
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif not word.startswith(tuple(f"{place}=" for place in _PLACES)):
            kept.append(word)
    return shlex.join(["refitd", "bench", name, *kept])
