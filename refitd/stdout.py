"""Saying something to who reads our output, and may have stopped to."""

from __future__ import annotations

import json
import os
import sys


def say(text: str) -> None:
    """A line to stdout. A reader that has seen enough (``head``) is no failure; what it did not read goes nowhere."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end


def complain(program: str, error: Exception, as_json: bool) -> None:
    """What is wrong, to stderr for people and, with ``as_json``, as an object to stdout."""
    sys.stderr.write(f"{program}: {error}\n")
    if as_json:
        fields = {name: getattr(error, name) for name in ("field", "expected", "got") if hasattr(error, name)}
        say(json.dumps({"ok": False, "reason": str(error), **fields}))
