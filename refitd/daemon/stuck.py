"""Mover threads of clients that did not end when they were cut off: what they may still have mapped is not free."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from dataclasses import dataclass

from refitd.errors import Refused
from refitd.mover.handle import MoverHandle


@dataclass(frozen=True, slots=True)
class _Thread:
    key: str
    end: int  # readable once the thread has let go, or its process has ended
    memories: frozenset[str]

    @property
    def ended(self) -> bool:
        poller = select.poll()
        poller.register(self.end, select.POLLIN)
        return bool(poller.poll(0))


class Stuck:
    """Threads that count as gone and are not."""

    def __init__(self) -> None:
        self._threads: list[_Thread] = []

    def add(self, handle: MoverHandle, memories: Iterable[str]) -> None:
        """``memories``: the rank keys whose memory it has mapped."""
        self._threads.append(_Thread(handle.key, os.dup(handle.pidfd), frozenset(memories)))

    def require_free(self, memory: str) -> None:
        """Raises Refused where one of them may still have the memory of rank ``memory`` mapped."""
        for thread in [thread for thread in self._threads if thread.ended]:
            self._threads.remove(thread)
            os.close(thread.end)
        holders = sorted(thread.key for thread in self._threads if memory in thread.memories)
        if holders:
            raise Refused("release", f"the mover threads of {', '.join(holders)} to let go of {memory}", "no answer")

    def close(self) -> None:
        while self._threads:
            os.close(self._threads.pop().end)
