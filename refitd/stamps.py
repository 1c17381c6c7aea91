"""Named moments of a refit, for a benchmark that asks where its time goes. Free of cost unless somebody asks.

Asked by ``REFITD_STAMPS=<folder>``: each process keeps a file of its own there, mapped, and every moment is a line of
it: CLOCK_MONOTONIC in nanoseconds, which all processes share, the moment's name, and whom it is about. Nothing
is written by a system call, so that a stamp takes about a microsecond.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ENV = "REFITD_STAMPS"
_BYTES = 4 << 20  # some 60,000 moments; later ones are dropped


class Stamp(NamedTuple):
    """``at``: monotonic seconds. ``key``: a rank, or what else the moment is about."""

    at: float
    name: str
    key: str


class _Book:
    """The file of this process."""

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, f"{os.getpid()}.stamps"), "w+b") as file:
            os.truncate(file.fileno(), _BYTES)
            self._page = mmap.mmap(file.fileno(), _BYTES)
        self._end, self._lock = 0, threading.Lock()

    def write(self, line: bytes) -> None:
        with self._lock:
            start, self._end = self._end, self._end + len(line)
            if self._end <= _BYTES:
                self._page[start : self._end] = line


_folder = os.environ.get(_ENV, "")
_book: _Book | None = None
_opening = threading.Lock()


def stamp(name: str, key: str = "") -> None:
    """This is the moment ``name`` of ``key``; neither has a space in it."""
    if _folder:
        _write(name, key)


def _write(name: str, key: str) -> None:
    line = f"{time.monotonic_ns()} {name} {key}\n".encode()
    book = _book or _open()
    if book is not None:
        book.write(line)


def _open() -> _Book | None:
    """One file a process, made by its first stamp. Where it cannot be made, nobody is harmed by that."""
    global _folder, _book  # noqa: PLW0603  what a process has one of
    with _opening:
        if _book is None and _folder:
            try:
                _book = _Book(_folder)
            except OSError:
                _folder = ""
        return _book


@contextlib.contextmanager
def collecting(folder: Path) -> Iterator[None]:
    """This process, and those that it starts meanwhile, keep their moments in ``folder``."""
    global _folder, _book
    before, _folder, _book = _folder, str(folder), None
    os.environ[_ENV] = _folder
    try:
        yield
    finally:
        _folder, _book = before, None
        os.environ[_ENV] = before


def read(folder: Path) -> list[Stamp]:
    """What all processes have noted so far, by time."""
    lines = [line for path in folder.glob("*.stamps") for line in path.read_bytes().split(b"\0", 1)[0].splitlines()]
    fields = [line.decode().split(" ") for line in lines]
    return sorted(Stamp(int(at) / 1e9, name, key) for at, name, key in fields)


def _forget() -> None:
    """A forked child keeps a file of its own."""
    global _book, _opening
    _book, _opening = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
