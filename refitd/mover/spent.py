"""What a new mover spends its first seconds on, for the daemon's log and `refitd bench mover`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Spent:
    """Seconds by part, added up; each part belongs to one thread. Parts that follow each other do not overlap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count what runs inside as ``part``, also where it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began
