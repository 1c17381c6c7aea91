"""The fork server: imports torch once, then forks movers on request. It never touches CUDA.

Run as ``python -m refitd.mover.forkserver <socket fd> <parent pid>``. One thread, so that forking is safe. It ends when
its socket does, or when its parent dies; its movers end with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys

from refitd.errors import ProtocolError
from refitd.hook.wire import Connection, Message

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies; leave at once where it has died already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class ForkServer:
    """Serves ``fork`` requests on one socket and reaps the children."""

    def __init__(self, sock: socket.socket) -> None:
        self._connection = Connection(sock)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._children: dict[int, int] = {}  # pidfd -> pid

    def serve(self) -> None:
        """Run until the daemon hangs up."""
        self._connection.send({"kind": "ready", "pid": os.getpid()})
        while True:
            for key, _events in self._selector.select():
                if key.fd in self._children:
                    self._reap(key.fd)
                elif not self._request():
                    return

    def _request(self) -> bool:
        try:
            message, fds = self._connection.receive()
        except (EOFError, OSError, ProtocolError):
            return False
        self._fork(message, fds[0])
        return True

    def _fork(self, message: Message, fd: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_mover(parent, str(message["key"]), fd)
        os.close(fd)
        pidfd = os.pidfd_open(pid)  # before anyone can reap it, so it cannot name another process
        self._children[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._connection.send({"kind": "forked", "pid": pid}, [pidfd])

    def _become_mover(self, parent: int, key: str, fd: int) -> None:
        status = 1
        try:
            die_with(parent)
            self._selector.close()
            self._connection.close()
            for pidfd in self._children:
                os.close(pidfd)
            from refitd.mover.child import main

            status = main(socket.socket(fileno=fd), key)
        except BaseException:  # noqa: BLE001  a fork must never return into the server's loop
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.waitpid(self._children.pop(pidfd), 0)
        os.close(pidfd)


def main(argv: list[str]) -> int:
    """Entry point: ``argv`` is the socket's descriptor and the parent's pid."""
    die_with(int(argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which ends us in its own order
    import torch

    import refitd.mover.child  # noqa: F401  imported once here, shared by every fork

    torch.set_num_threads(1)
    gc.freeze()  # a mover's collector need not walk through torch
    ForkServer(socket.socket(fileno=int(argv[0]))).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
