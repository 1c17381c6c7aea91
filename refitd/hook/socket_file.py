"""The daemon's socket file: claimed without ever taking it from a daemon that lives.

Only a refused connection (ECONNREFUSED) to a socket says that nobody is behind it. All others, a full backlog or a
missing permission included, may be a live daemon, and then the path stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from refitd.errors import ConfigError, Refused

FIELD = "hook.socket"
_LOCK_SECONDS = 2.0
_PATH_LIMIT = 100  # of the kernel's 107 bytes; the rest is for the name under which the new socket is made


class SocketFile:
    """A listening Unix socket with a name in the file system, readable and writable by owner and group."""

    def __init__(self, path: str | Path, backlog: int = 128) -> None:
        """Claim ``path``; a folder that is missing is made with mode 0750.

        Raises Refused where a daemon may be alive behind it, ConfigError where the path cannot be used.
        """
        self.path = os.path.abspath(path)
        if len(os.fsencode(self.path)) > _PATH_LIMIT:
            raise ConfigError(FIELD, f"a path of at most {_PATH_LIMIT} bytes", self.path)
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o750, exist_ok=True)
            with _locked(f"{self.path}.lock"):
                _require_free(self.path)
                self.listener = _listen(self.path, backlog)
        except OSError as error:
            raise ConfigError(FIELD, "a path where a socket can be made", f"{self.path}: {error.strerror}") from None
        self._inode = _inode(self.path)

    def close(self) -> None:
        """Stop listening and remove the file, unless another daemon has replaced it meanwhile."""
        self.listener.close()
        with contextlib.suppress(OSError):
            if _inode(self.path) == self._inode:
                os.unlink(self.path)


class PassedSocket:
    """A listening socket that somebody else made and goes on holding; the file in the file system is theirs."""

    def __init__(self, path: str | Path, listener: socket.socket) -> None:
        """Raises ConfigError where ``listener`` is not a Unix socket that listens at ``path``."""
        self.path, self.listener = os.path.abspath(path), listener
        address = listener.getsockname() if listener.family == socket.AF_UNIX else "another family"
        if address != self.path or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ConfigError(FIELD, f"the path of the socket that was passed ({address})", self.path)

    def close(self) -> None:
        """Stop accepting; whoever connects from now on waits for the next daemon."""
        self.listener.close()


def _inode(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the side file's lock; it is left in place because removing a lock file lets two holders in."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise Refused(FIELD, "a path that no other daemon is claiming", path)
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _require_free(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):  # connecting to a regular file is refused too, so this must be asked first
        raise ConfigError(FIELD, "a socket or nothing", f"{path}: another kind of file")
    outcome = _probe(path)
    if isinstance(outcome, ConnectionRefusedError | FileNotFoundError):
        return
    if isinstance(outcome, PermissionError):
        raise ConfigError(FIELD, "a socket that this user may open", f"{path}: permission denied")
    detail = "a daemon answers" if outcome is None else outcome.strerror
    raise Refused(FIELD, "a path without a live daemon", f"{path}: {detail}")


def _probe(path: str) -> OSError | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError as error:
            return error
    return None


def _listen(path: str, backlog: int) -> socket.socket:
    """Listen under another name and rename: whoever finds the path finds a socket that answers."""
    fresh = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(fresh)
        os.chmod(fresh, 0o660)
        sock.listen(backlog)
        sock.setblocking(False)
        os.rename(fresh, path)
    except BaseException:
        sock.close()
        raise
    return sock
