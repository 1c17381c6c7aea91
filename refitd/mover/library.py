"""The library path: the mover as a thread of the client whose memory it moves, under the same commands as a child.

The daemon speaks to the thread as it does to the fork server: ``fork`` with a command socket. The thread then is the
mover at that socket until the socket ends, lets go of everything, and takes the next ``fork``: never two at a time.
Nobody can kill it. Its end is told by a pipe whose writing end it holds as long as it may touch memory; the kernel
closes it with the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref

from refitd.hook.wire import Connection
from refitd.mover.child import Mover, Reporter, obey
from refitd.mover.memory import raise_descriptor_limit
from refitd.mover.thread import MoverThread

log = logging.getLogger("refitd.mover")


class ThreadHost:
    """Runs movers for rank ``key`` in one thread of this process, for the daemon that has ``theirs``.

    ``theirs`` is sent to the daemon and closed by whoever sent it.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        ours, self.theirs = socket.socketpair()
        self._connection = Connection(ours)
        self._commands: socket.socket | None = None
        self._end = -1  # the writing end of the pipe, while there is a mover
        self._cut = False
        raise_descriptor_limit()
        self._thread = MoverThread(self._serve, f"refitd mover {key}", self._fatal)
        self._thread.start()
        _hosts.add(self)

    def cut(self) -> None:
        """Have the mover end: no command reaches it any more, and no word of it the daemon. Does not wait."""
        self._cut = True
        for sock in (self._connection.sock, self._commands):
            if sock is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    sock.shutdown(socket.SHUT_RDWR)

    def ended(self, seconds: float) -> bool:
        """Whether the thread has ended, within ``seconds``: from then on it touches nothing."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child, where the thread is not: let go of what would hide the parent's death."""
        for sock in (self._connection.sock, self._commands, self.theirs):
            if sock is not None:
                sock.close()
        self._close_end()

    def _serve(self) -> None:
        try:
            while not self._cut:
                message, fds = self._connection.receive()
                self._run(str(message["key"]), socket.socket(fileno=fds[0]))
        except (EOFError, OSError):
            return
        finally:
            self._connection.close()

    def _run(self, key: str, commands: socket.socket) -> None:
        """One mover, from its ``fork`` until it has let go of everything."""
        self._commands = commands
        told, self._end = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self._connection.send({"kind": "forked", "pid": os.getpid()}, [told])
            finally:
                os.close(told)
            if not self._cut:
                self._obey(key, commands)
        finally:
            self._commands = None
            commands.close()
            self._close_end()

    def _obey(self, key: str, commands: socket.socket) -> None:
        connection = Connection(commands)
        reporter = Reporter(connection, lambda: None)  # the end of the socket is news enough
        mover = Mover(key, reporter.send, guest=True)
        try:
            obey(connection, mover, reporter)
        except Exception as error:  # noqa: BLE001  it ends this mover, and must not end the client's process
            self._fatal(error)
        finally:
            mover.close()
            connection.close()

    def _close_end(self) -> None:
        end, self._end = self._end, -1
        if end >= 0:
            os.close(end)

    def _fatal(self, error: BaseException) -> None:
        """What would have ended a child ends this mover; the process is the client's."""
        log.error("mover thread of %s ends: %r", self._key, error, exc_info=error)
        if (commands := self._commands) is not None:
            with contextlib.suppress(OSError):
                commands.shutdown(socket.SHUT_RDWR)


_hosts: weakref.WeakSet[ThreadHost] = weakref.WeakSet()


def _abandon_all() -> None:
    for host in list(_hosts):
        host.abandon()


os.register_at_fork(after_in_child=_abandon_all)
