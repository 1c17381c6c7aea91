"""Saying something to who reads our output, and may have stopped to."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """A line to stdout. A reader that has seen enough (``head``) is no failure."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        nobody_reads()


def nobody_reads() -> None:
    """What is still to be written to stdout goes nowhere, or the interpreter complains at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
