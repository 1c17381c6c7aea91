"""Named points at which a test may stop, kill or misdirect a process. Free of cost unless armed.

Armed by ``REFITD_FAILPOINTS=<path of a unix socket>``: each point that is reached sends one JSON line there and
waits for one line back, ``go`` or ``skip``. ``skip`` plants a fault: the caller leaves the step out. A tester that
goes away means ``go``.

Every effect that a process is about to have on another is a point too: each write to the store, message to a client or
a mover, and word of a control page. With ``REFITD_EFFECTS=<path of a file>`` as well, the one that the file names is
reported, as ``effect:<what>``; or all of them, for ``*``.
"""

from __future__ import annotations

import json
import os
import socket

PHASES = ("offer", "prepare", "transfer", "verify", "commit", "apply")
_ENV, _EFFECTS = "REFITD_FAILPOINTS", "REFITD_EFFECTS"


def armed() -> bool:
    """Whether a tester listens: where none does, nobody need make room for a process to be stopped in."""
    return bool(os.environ.get(_ENV))


def failpoint(name: str, **facts: str | int) -> bool:
    """Report that ``name`` was reached; True when the caller must leave the step out."""
    path = os.environ.get(_ENV)
    if not path:
        return False
    return _ask(path, {"name": name, "pid": os.getpid(), **facts}) == "skip"


def effect(what: str) -> None:
    """Report that ``what`` comes next: after it, others can tell that this process was here."""
    path = os.environ.get(_EFFECTS)
    if path and _armed(path) in ("*", what):
        failpoint(f"effect:{what}")


def _armed(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _ask(path: str, message: dict[str, str | int]) -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(path)
            sock.sendall(json.dumps(message).encode() + b"\n")
            with sock.makefile("r") as lines:
                return lines.readline().strip() or "go"
    except OSError:
        return "go"
