"""What the service manager hands over at the start: listening sockets, by name (systemd's sd_listen_fds).

A socket that outlives the daemon keeps the clients that connect while it restarts: the kernel queues them.
https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from refitd.errors import ConfigError

FIRST_FD = 3
_NAMES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def passed_sockets(environ: MutableMapping[str, str] | None = None, first: int = FIRST_FD) -> dict[str, socket.socket]:
    """The sockets that were handed to this process, ours from now on; a socket without a name is ``unknown``.

    The variables are removed, so that no child takes the sockets for its own. Raises ConfigError naming LISTEN_FDS for
    a descriptor that is no socket.
    """
    environ = os.environ if environ is None else environ
    pid, count, names = (environ.pop(name, "") for name in _NAMES)
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    given = names.split(":") if names else []
    found = {}
    for index in range(int(count)):
        name = given[index] if index < len(given) and given[index] else "unknown"
        found[name] = _socket(first + index, name)
    return found


def _socket(fd: int, name: str) -> socket.socket:
    os.set_inheritable(fd, False)
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError("LISTEN_FDS", "sockets", f"{name}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
