"""How far we get with the daemon: its socket's file, its answer, and whether it lives where we do."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import grp
import os
import pwd
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from refitd.errors import DaemonUnavailable, RefitdError
from refitd.hook.admin import ask
from refitd.hook.peer import peer_of
from refitd.operate.doctor.facts import ANSWERS, FORBIDDEN, NO_DAEMON, REFUSED, SILENT, Daemon

_NAMESPACES = ("ipc", "pid", "user")
_SECONDS = 3.0


def reach(path: str, proc: Path = Path("/proc")) -> Daemon:
    """Ask the daemon at ``path`` for its status. Raises nothing that it says."""
    found = _file(path)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_SECONDS)
            sock.connect(path)
            pid = peer_of(sock).pid
    except TimeoutError:
        return dataclasses.replace(found, contact=SILENT, detail=f"takes no connection within {_SECONDS:g} s")
    except OSError as error:
        contact = FORBIDDEN if error.errno in (errno.EACCES, errno.EPERM) else NO_DAEMON
        return dataclasses.replace(found, contact=contact, detail=error.strerror or str(error))
    found = dataclasses.replace(found, pid=pid, strangers=_strangers(pid, proc))
    try:
        return dataclasses.replace(found, contact=ANSWERS, status=ask("status", path, _SECONDS))
    except DaemonUnavailable as error:
        return dataclasses.replace(found, contact=SILENT, detail=str(error))
    except RefitdError as error:
        return dataclasses.replace(found, contact=REFUSED, detail=str(error))


def _file(path: str) -> Daemon:
    try:
        about = os.stat(path)
    except OSError:
        return Daemon(path)
    owner = _name(lambda: pwd.getpwuid(about.st_uid).pw_name, about.st_uid)
    group = _name(lambda: grp.getgrgid(about.st_gid).gr_name, about.st_gid)
    return Daemon(path, mode=stat.S_IMODE(about.st_mode), owner=owner, group=group)


def _name(find: Callable[[], str], number: int) -> str:
    try:
        return find()
    except KeyError:
        return str(number)


def _strangers(pid: int, proc: Path) -> tuple[str, ...]:
    """Namespaces of a process that are not ours; those that we may not look at are left out."""
    differing = []
    for name in _NAMESPACES:
        with contextlib.suppress(OSError):
            if pid and os.readlink(proc / str(pid) / "ns" / name) != os.readlink(proc / "self/ns" / name):
                differing.append(name)
    return tuple(differing)
