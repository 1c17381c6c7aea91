"""systemd's sd_notify: tells the service manager how the daemon is. Does nothing where there is none."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends states to ``$NOTIFY_SOCKET``. Each call returns whether the manager took the message."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._told = ""
        limit = environ.get("WATCHDOG_USEC", "")
        self.watchdog_interval = int(limit) / 2e6 if ours and limit.isdecimal() and int(limit) else None
        """Seconds between two watchdog() calls, None when nobody waits for them."""

    def ready(self, status: str = "") -> bool:
        """The daemon listens."""
        return self._send("READY=1", *_status(status))

    def status(self, text: str) -> bool:
        """One line for ``systemctl status``."""
        self._told = text
        return self._send(*_status(text))

    def tell(self, text: str) -> bool:
        """The same, where it is not what was told last."""
        return text != self._told and self.status(text)

    def watchdog(self) -> bool:
        """The daemon's loop turns; call it from that loop and nowhere else."""
        return self.watchdog_interval is not None and self._send("WATCHDOG=1")

    def reloading(self) -> bool:
        """The configuration is being read again; `ready` ends that. The time lets the manager order the two."""
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        """The daemon shuts down."""
        return self._send("STOPPING=1", *_status(status))

    def extend(self, seconds: float) -> bool:
        """Starting or stopping takes ``seconds`` more."""
        return self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def _send(self, *lines: str) -> bool:
        if not self._address or not lines:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False  # the manager's trouble must not become ours
        return True


def _status(text: str) -> tuple[str, ...]:
    return (f"STATUS={' '.join(text.split())}",) if text else ()
