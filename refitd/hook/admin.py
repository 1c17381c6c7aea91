"""People and scripts at the hook's socket: one question, one answer."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from refitd.errors import ConfigError, DaemonUnavailable
from refitd.hook.answers import error_of
from refitd.hook.client import default_socket
from refitd.hook.messages import ADMIN, PROTO, check, check_answer
from refitd.hook.wire import Connection

ASK_SECONDS = 5.0
_PATH_LIMIT = 107  # the kernel's, for the name of a Unix socket


def ask(method: str, socket_path: str | None = None, timeout: float = ASK_SECONDS, **fields: Any) -> dict[str, Any]:
    """Ask the daemon at ``socket_path`` (None: the default place) and return its answer's fields.

    Raises DaemonUnavailable where nobody answers within ``timeout`` seconds, ConfigError for a path that no socket can
    have, and whatever error the daemon answers.
    """
    path = socket_path or default_socket()
    if not 0 < len(os.fsencode(path)) <= _PATH_LIMIT:
        raise ConfigError("hook.socket", f"a path of 1 to {_PATH_LIMIT} bytes", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        connection = Connection(sock)
        try:
            sock.settimeout(timeout)
            sock.connect(path)
            _call(connection, timeout, _hello())
            return _call(connection, timeout, {"id": 2, "method": method, **fields})
        except TimeoutError:
            raise DaemonUnavailable(f"the refitd daemon at {path} does not answer within {timeout:g} s") from None
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DaemonUnavailable(f"no refitd daemon answers at {path}: {reason}") from None
        finally:
            connection.close()


def _hello() -> dict[str, Any]:
    return {
        "id": 1, "method": "hello", "proto": PROTO, "client": f"refitd admin {os.getpid()}", "job": "",
        "side": ADMIN, "group": "", "rank": 0, "world": 1, "incarnation": "",
    }  # fmt: skip


def _call(connection: Connection, timeout: float, message: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(ConnectionError):  # a daemon that refuses us says why before it hangs up
        connection.send(message)
    answer, fds = connection.receive(timeout)
    for fd in fds:
        os.close(fd)
    if "error" in answer:
        raise error_of(check(answer))
    check_answer(message["method"], answer)
    return {name: value for name, value in answer.items() if name not in ("id", "ok")}
