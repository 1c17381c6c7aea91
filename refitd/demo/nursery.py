"""A process that has imported torch and loaded the weights once, and forks trainers and engines from there.

Importing torch takes seconds; a fork takes milliseconds. The nursery itself never runs a thread and never computes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from refitd.hook.wire import Connection

Options = dict[str, Any]
Body = Callable[[Options, Connection], None]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that made this process ends. Safe between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Nursery:
    """The driver's end. `start` forks: call it before the driver has threads, an event loop or gradients."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self._connection = pid, connection

    @classmethod
    def start(cls, body: Body) -> Nursery:
        """Fork the nursery; each child that it makes runs ``body(options, connection)``."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run_nursery(parent, Connection(theirs), body)
        theirs.close()
        return cls(pid, Connection(ours))

    def spawn(self, options: Options, log: Path) -> tuple[int, socket.socket]:
        """Fork a child whose output goes to the end of ``log``; its pid and the socket to talk to it.

        Raises EOFError where the nursery is dead, TimeoutError after 10 s.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection.send({"options": options, "log": str(log)}, [theirs.fileno()])
        answer, _fds = self._connection.receive(timeout=10)
        return int(answer["pid"]), ours

    def close(self) -> None:
        """End the nursery and everything that it forked."""
        self._connection.close()
        os.waitpid(self.pid, 0)


def tell(driver: Connection, event: str, **facts: Any) -> None:
    """Say in a child what happened, to the driver and to the log; ``at`` is CLOCK_MONOTONIC."""
    message = {"event": event, "at": time.monotonic(), **facts}
    sys.stderr.write(json.dumps(message) + "\n")
    driver.send(message)


def _run_nursery(parent: int, connection: Connection, body: Body) -> NoReturn:
    try:
        _leave_terminal(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        while True:
            request, (fd,) = connection.receive()
            pid = os.fork()
            if pid == 0:
                connection.close()
                _run_child(request, fd, body)
            os.close(fd)
            connection.send({"pid": pid})
    except EOFError:
        os._exit(0)
    except BaseException:  # noqa: BLE001  nothing of the driver may run in here
        traceback.print_exc()
        os._exit(1)


def _run_child(request: dict[str, Any], fd: int, body: Body) -> NoReturn:
    status = 1
    try:
        _leave_terminal(os.getppid())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(output, "w", buffering=1)  # noqa: SIM115  not the parent's streams, for life
        body(request["options"], Connection(socket.socket(fileno=fd)))
        status = 0
    except EOFError:
        status = 0  # the driver is gone: so are we
    except BaseException:  # noqa: BLE001  the reason goes to the log, and the driver sees the exit
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _leave_terminal(parent: int) -> None:
    """A session of its own (Ctrl-C is the driver's), and no life after the parent."""
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
