"""Where the movers of a client's memory run: in children of the daemon, or in a thread of the client (`library`)."""

from __future__ import annotations

import logging
import socket
from typing import Protocol

from refitd.errors import DaemonUnavailable, InputError

AUTO, CHILD, LIBRARY = "auto", "child", "library"
PATHS = (AUTO, CHILD, LIBRARY)
STOP_SECONDS = 2.0
log = logging.getLogger("refitd.hook")


def _thread_host() -> type[Host]:
    """The only way from this room to the mover's, for who wants it. Raises ImportError where its packages are not."""
    from refitd.mover.library import ThreadHost

    return ThreadHost


class Host(Protocol):
    """A thread that runs movers for the daemon that has the socket `theirs`: `refitd.mover.library.ThreadHost`."""

    theirs: socket.socket

    def __init__(self, key: str) -> None: ...
    def cut(self) -> None: ...
    def ended(self, seconds: float) -> bool: ...


class Executor:
    """One client's thread, where it has one: never two at a time, also from one daemon to the next."""

    def __init__(self, key: str, path: str) -> None:
        """Raises InputError for a ``path`` that there is not, or that needs packages which are not there."""
        self.key, self.asked = key, path
        if path not in PATHS:
            raise InputError("path", " or ".join(PATHS), repr(path))
        if path == LIBRARY:
            try:
                _thread_host()
            except ImportError as error:
                raise InputError("path", "the packages that a mover needs, beside this client", str(error)) from error
        self.path, self.reason = CHILD, "no daemon has said"
        self._host: Host | None = None

    def begin(self, told: str, device: str | None) -> tuple[str, Host | None]:
        """What to ask of a daemon whose configuration says ``told``, and the thread that it may use.

        With ``auto`` there is one where the weights are on a ``device``: memory of the host reaches every child. The
        thread of an earlier registration must have ended. Raises DaemonUnavailable where it has not.
        """
        if not self.end():
            raise DaemonUnavailable("the mover thread of the last connection has not ended")
        path = self.asked if self.asked != AUTO or told not in PATHS else told
        if path == CHILD or (path == AUTO and device is None):
            return path, None
        try:
            self._host = _thread_host()(self.key)
        except ImportError as error:
            log.warning("%s: no mover thread can help where a child fails: %s", self.key, error)
            path = CHILD
        return path, self._host

    def chosen(self, path: str, reason: str) -> None:
        """The daemon's word for it."""
        if (path, reason) != (self.path, self.reason):
            self.path, self.reason = path, reason
            log.info("%s: weights are moved on the %s path: %s", self.key, path, reason)

    def cut(self) -> None:
        """The daemon is given up: no command of it is carried out any more."""
        if self._host is not None:
            self._host.cut()

    def end(self, seconds: float = STOP_SECONDS) -> bool:
        """Cut the thread off and wait for its end; False where it has not ended within ``seconds``."""
        self.cut()
        if self._host is not None and not self._host.ended(seconds):
            return False
        self._host = None
        return True
