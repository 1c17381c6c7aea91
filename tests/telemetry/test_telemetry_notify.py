"""What the service manager hears."""

from __future__ import annotations

import os
import pathlib
import socket
import uuid
from collections.abc import Iterator

import pytest

from refitd.telemetry.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket and its name for the environment."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@refitd-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name[1:] if name.startswith("@") else name)
        sock.settimeout(2)
        yield sock, name


def test_states_are_sent(manager: tuple[socket.socket, str]) -> None:
    """Each call is one datagram in systemd's words; a status is one line."""
    sock, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
    calls = [
        (lambda: notifier.ready("3 lanes"), b"READY=1\nSTATUS=3 lanes"),
        (notifier.ready, b"READY=1"),
        (lambda: notifier.status("two\nlines"), b"STATUS=two lines"),
        (notifier.watchdog, b"WATCHDOG=1"),
        (lambda: notifier.extend(1.5), b"EXTEND_TIMEOUT_USEC=1500000"),
        (notifier.stopping, b"STOPPING=1"),
    ]
    for call, expected in calls:
        assert call() is True
        assert sock.recv(1000) == expected


def test_the_watchdog_is_for_the_named_process_only(manager: tuple[socket.socket, str]) -> None:
    """Half the limit between signs of life; none when another process, or none, is watched."""
    _, name = manager
    base = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000"}
    assert Notifier(base | {"WATCHDOG_PID": str(os.getpid())}).watchdog_interval == 15.0
    assert Notifier(base).watchdog_interval == 15.0
    for environ in (base | {"WATCHDOG_PID": "1"}, {"NOTIFY_SOCKET": name}, base | {"WATCHDOG_USEC": "x"}):
        notifier = Notifier(environ)
        assert notifier.watchdog_interval is None
        assert notifier.watchdog() is False


def test_without_a_manager_nothing_happens(tmp_path: pathlib.Path) -> None:
    """No socket, or a dead one, is no error."""
    assert Notifier({}).ready() is False
    assert Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready() is False
