"""Threads of a mover, which may be a process of its own or a guest in a client's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Fatal = Callable[[BaseException], None]


class MoverThread(threading.Thread):
    """A daemon thread that passes on, to the threads it starts, what becomes of an error that nobody foresaw.

    ``on_fatal`` is called with it; None, as in a child, leaves it to the process, which ends of it. A guest must not
    end its host's process: only its own mover.
    """

    def __init__(self, target: Callable[[], Any], name: str, on_fatal: Fatal | None = None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.on_fatal = on_fatal or getattr(threading.current_thread(), "on_fatal", None)

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            if self.on_fatal is None:
                raise
            self.on_fatal(error)
