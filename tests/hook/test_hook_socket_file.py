"""Case N1: the daemon's socket file is never taken from a daemon that may be alive."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from refitd.errors import ConfigError, Refused
from refitd.hook import socket_file
from refitd.hook.socket_file import SocketFile


def _stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()


def test_fresh_path(tmp_path: Path) -> None:
    """The folder is made with mode 0750 and the socket with 0660; both socket and listener are gone after close."""
    path = tmp_path / "run" / "hook.sock"
    made = SocketFile(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750 & ~_umask()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    made.close()
    assert os.listdir(path.parent) == ["hook.sock.lock"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    """A socket that refuses connections is dead and is replaced."""
    path = tmp_path / "hook.sock"
    _stale(path)
    made = SocketFile(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
    made.close()


def test_live_socket_is_refused(tmp_path: Path) -> None:
    """A daemon that lives keeps its socket, also one that accepts nothing and whose backlog is full."""
    path = tmp_path / "hook.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(str(path))
        live.listen(0)
        inode = path.stat().st_ino
        with pytest.raises(Refused, match=r"hook\.socket.*a daemon answers"):
            SocketFile(path)
        with pytest.raises(Refused, match=r"hook\.socket.*temporarily unavailable"):  # the first probe filled it
            SocketFile(path)
        assert path.stat().st_ino == inode


def test_regular_file_is_refused(tmp_path: Path) -> None:
    """A regular file at the path is refused and keeps its content."""
    path = tmp_path / "hook.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"hook\.socket.*another kind of file"):
        SocketFile(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), BlockingIOError(11, "again")])
def test_other_failures_are_not_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """EACCES and EAGAIN on connect leave the path as it is."""
    path = tmp_path / "hook.sock"
    _stale(path)
    inode = path.stat().st_ino
    monkeypatch.setattr(socket_file, "_probe", lambda path: error)
    with pytest.raises((ConfigError, Refused), match=r"hook\.socket"):
        SocketFile(path)
    assert path.stat().st_ino == inode


def test_two_claim_a_stale_path(tmp_path: Path) -> None:
    """Of several daemons that start at once on a stale path exactly one gets it."""
    path = tmp_path / "hook.sock"
    _stale(path)

    def claim(_index: int) -> SocketFile | None:
        try:
            return SocketFile(path)
        except Refused:
            return None

    with ThreadPoolExecutor(4) as pool:
        won = [made for made in pool.map(claim, range(4)) if made is not None]
    assert len(won) == 1
    won[0].close()


def test_side_file_is_locked_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process claims the path, a start gives up after a bounded wait."""
    monkeypatch.setattr(socket_file, "_LOCK_SECONDS", 0.05)
    path = tmp_path / "hook.sock"
    with (tmp_path / "hook.sock.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="no other daemon is claiming"):
            SocketFile(path)
    assert not path.exists()


def test_successor_keeps_its_file(tmp_path: Path) -> None:
    """Closing does not remove a socket that another daemon has put there since."""
    path = tmp_path / "hook.sock"
    old = SocketFile(path)
    old.listener.close()
    new = SocketFile(path)
    old.close()
    assert path.exists()
    new.close()


def test_long_path(tmp_path: Path) -> None:
    """A path that the kernel cannot hold is a configuration error."""
    with pytest.raises(ConfigError, match="at most 100 bytes"):
        SocketFile(tmp_path / ("x" * 200))
