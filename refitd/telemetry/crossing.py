"""Asks the daemon's event loop from other threads, so that what it owns is only ever read there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
SECONDS = 2.0  # less than any scrape's timeout, so that a stuck loop is told and not guessed


class Crossing:
    """Runs functions in ``loop`` for threads that may wait at most ``seconds`` for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float = SECONDS) -> None:
        self._loop, self._seconds = loop, seconds

    def ask(self, function: Callable[[], T]) -> T:
        """The function's result. Raises what it raises, and TimeoutError where the loop does not turn."""
        answer: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(_run, function, answer)
        except RuntimeError:
            raise TimeoutError("the daemon's loop is closed") from None
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            if answer.cancel() or not answer.done():
                raise TimeoutError(f"the daemon's loop has not turned for {self._seconds:g} s") from None
            raise


def _run(function: Callable[[], T], answer: Future[T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # nobody waits any more
    try:
        answer.set_result(function())
    except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
        answer.set_exception(error)
