"""People and scripts at the hook's socket: one question, one answer."""

from __future__ import annotations

import os
import socket
from typing import Any

from refitd.errors import DaemonUnavailable, Refused
from refitd.hook.client import default_socket
from refitd.hook.messages import ADMIN, PROTO
from refitd.hook.wire import Connection

ASK_SECONDS = 5.0


def ask(method: str, socket_path: str | None = None, timeout: float = ASK_SECONDS, **fields: Any) -> dict[str, Any]:
    """Ask the daemon at ``socket_path`` (None: the default place) and return its answer's fields.

    Raises DaemonUnavailable where nobody answers within ``timeout`` seconds, Refused where the daemon says no.
    """
    path = socket_path or default_socket()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(timeout)
            sock.connect(path)
            connection = Connection(sock)
            _call(connection, timeout, _hello())
            return _call(connection, timeout, {"id": 2, "method": method, **fields})
        except (OSError, EOFError) as error:
            raise DaemonUnavailable(f"no refitd daemon answers at {path}: {error}") from error


def _hello() -> dict[str, Any]:
    return {
        "id": 1, "method": "hello", "proto": PROTO, "client": f"refitd admin {os.getpid()}", "job": "",
        "side": ADMIN, "group": "", "rank": 0, "world": 1, "incarnation": "",
    }  # fmt: skip


def _call(connection: Connection, timeout: float, message: dict[str, Any]) -> dict[str, Any]:
    connection.send(message)
    answer, fds = connection.receive(timeout)
    for fd in fds:
        os.close(fd)
    if "error" in answer:
        error = answer["error"]
        raise Refused(error["field"] or message["method"], error["expected"], error["got"] or error["message"])
    return {name: value for name, value in answer.items() if name not in ("id", "ok")}
