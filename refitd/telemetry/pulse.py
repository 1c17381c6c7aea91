"""Whether the daemon's loops turn: each says so at every pass, and the watchdog is fed only while all of them do.

A sign of life that knows nothing of the loops would keep a deadlocked daemon alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pulse:
    """The last pass of each loop, by name. May be asked from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}

    def beat(self, name: str) -> None:
        """A loop begins another pass."""
        with self._lock:
            self._last[name] = self._clock()

    def end(self, name: str) -> None:
        """A loop is over; nobody expects it any more."""
        with self._lock:
            self._last.pop(name, None)

    def stuck(self, limit: float) -> str:
        """What stands still for more than ``limit`` seconds, the longest first in words; empty where nothing does."""
        with self._lock:
            now = self._clock()
            ages = sorted(((now - last, name) for name, last in self._last.items()), reverse=True)
        return "; ".join(f"{name} has stood still for {age:.0f} s" for age, name in ages if age > limit)
