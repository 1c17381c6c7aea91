"""Sockets that the service manager hands over, and what the service manager hears of a reload."""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket
from collections.abc import Iterator

import pytest

from refitd.errors import ConfigError
from refitd.hook.server import HookServer
from refitd.hook.socket_file import PassedSocket
from refitd.telemetry.activation import passed_sockets
from refitd.telemetry.notify import Notifier


@pytest.fixture
def listener(tmp_path: pathlib.Path) -> Iterator[socket.socket]:
    """A socket that listens at ``hook.sock``, as a service manager makes it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "hook.sock"))
        sock.listen()
        yield sock


def handed_over(listener: socket.socket) -> tuple[int, dict[str, str]]:
    """A descriptor of its own for the process that is activated, and its environment."""
    fd = os.dup(listener.fileno())
    os.set_inheritable(fd, True)
    return fd, {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "hook", "HOME": "/root"}


def test_sockets_come_by_name(listener: socket.socket) -> None:
    """The socket is ours: nonblocking, closed on exec; the variables are gone, so that no child believes them."""
    fd, environ = handed_over(listener)
    found = passed_sockets(environ, first=fd)
    assert list(found) == ["hook"]
    assert (found["hook"].fileno(), found["hook"].getblocking(), os.get_inheritable(fd)) == (fd, False, False)
    assert environ == {"HOME": "/root"}
    found["hook"].close()


def test_a_socket_without_a_name(listener: socket.socket) -> None:
    """systemd calls it unknown, and so do we."""
    fd, environ = handed_over(listener)
    del environ["LISTEN_FDNAMES"]
    found = passed_sockets(environ, first=fd)
    assert list(found) == ["unknown"]
    found["unknown"].close()


@pytest.mark.parametrize("change", [{"LISTEN_PID": "1"}, {"LISTEN_FDS": "x"}, {"LISTEN_FDS": ""}])
def test_what_is_meant_for_others_is_left_alone(change: dict[str, str]) -> None:
    """Variables of another process, or without sense, hand over nothing."""
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", **change}
    assert passed_sockets(environ) == {}
    assert passed_sockets({}) == {}


def test_a_descriptor_that_is_no_socket_is_refused(tmp_path: pathlib.Path) -> None:
    """The error names the variable."""
    with (tmp_path / "file").open("w") as file:
        environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "hook"}
        with pytest.raises(
            ConfigError, match=r"LISTEN_FDS: expected sockets, got hook: Socket operation on non-socket"
        ):
            passed_sockets(environ, first=file.fileno())


def test_the_socket_must_be_the_one_of_the_configuration(tmp_path: pathlib.Path, listener: socket.socket) -> None:
    """Another path, another family, or a socket that does not listen is a ConfigError of hook.socket."""
    with socket.socket() as other, pytest.raises(ConfigError, match=r"hook\.socket: .*another family"):
        PassedSocket(tmp_path / "hook.sock", other)
    with pytest.raises(
        ConfigError, match=rf"hook\.socket: expected the path .*hook\.sock\), got {tmp_path}/else\.sock"
    ):
        PassedSocket(tmp_path / "else.sock", listener)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        with pytest.raises(ConfigError, match=r"hook\.socket"):
            PassedSocket(tmp_path / "mute.sock", mute)


class Nobody:
    """A handler that hears of no one."""

    def connected(self, session: object) -> None: ...
    def disconnected(self, session: object, reason: str) -> None: ...
    async def request(self, session: object, message: object, fds: object) -> tuple[dict[str, object], list[int]]:
        return {}, []


def test_a_stopped_server_leaves_the_managers_socket(tmp_path: pathlib.Path, listener: socket.socket) -> None:
    """The file stays, a client that connects between two daemons waits, and the next daemon serves it."""

    async def serve(client: socket.socket | None) -> bytes:
        server = HookServer(tmp_path / "hook.sock", Nobody(), listener=listener.dup(), hello_timeout=0.2)  # type: ignore[arg-type]
        await server.start()
        told = b""
        if client:
            client.setblocking(False)
            told = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1000), 5)
        await server.stop()
        return told

    listener.setblocking(False)
    assert asyncio.run(serve(None)) == b""
    assert (tmp_path / "hook.sock").is_socket()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "hook.sock"))
        assert b"expected within 0.2 s" in asyncio.run(serve(client))


def test_a_reload_is_told_with_its_time(tmp_path: pathlib.Path) -> None:
    """RELOADING=1 comes with the monotonic clock in microseconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(2)
        assert Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")}).reloading() is True
        first, second = manager.recv(1000).decode().split("\n")
    assert first == "RELOADING=1"
    assert second.startswith("MONOTONIC_USEC=")
    assert int(second.partition("=")[2]) > 1_000_000
