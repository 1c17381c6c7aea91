"""Reads a watch in the background, and checks what it gave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from refitd.errors import StoreError
from refitd.store import Event, Put, Resync, Store


class Collector(threading.Thread):
    """Reads a watch until it ends. ``error``: what ended it, if that was not close()."""

    def __init__(self, watch: Any) -> None:
        super().__init__(daemon=True)
        self.watch, self.events = watch, list[Event]()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self.watch:
                self.events.append(event)
        except StoreError as error:
            self.error = error

    def wait_for(self, number: int, seconds: float = 10.0) -> list[Event]:
        until(lambda: len(self.events) >= number, seconds)
        return self.events

    def wait_for_revision(self, revision: int, seconds: float = 20.0) -> list[Event]:
        """The events, once they reach a revision."""
        until(lambda: any(revision_of(event) >= revision for event in self.events[-1:]), seconds)
        return self.events


def revision_of(event: Event) -> int:
    return event.item.mod_revision if isinstance(event, Put) else event.revision


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for something; whether it came."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def assert_no_gap(events: list[Event], first: int, last: int) -> None:
    """Every revision from ``first`` to ``last`` once and in order; a Resync stands for all up to its own."""
    reached = first - 1
    for event in events:
        revision = revision_of(event)
        assert revision == reached + 1 or (isinstance(event, Resync) and revision >= reached), (reached, event)
        reached = revision
    assert reached == last


def insist(store: Store, key: str, value: bytes, seconds: float = 30.0) -> int:
    """Put until it is acknowledged; the revision. Each try writes another value, so none is taken for another."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return store.put(key, value)
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
