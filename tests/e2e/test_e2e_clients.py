"""Clients that break the protocol or the rules, each with its typed error and an unharmed daemon."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_refit import WHOLE, new_job, pair, still_good

from refitd import Refused, connect_engine, connect_trainer
from refitd.hook.messages import PROTO
from refitd.hook.wire import MAX_FRAME, Connection
from refitd.testing import LocalDaemon, split_layout

HELLO = {
    "id": 1, "method": "hello", "proto": PROTO, "client": "test", "job": "", "side": "admin", "group": "", "rank": 0,
    "world": 1, "incarnation": "",
}  # fmt: skip


@pytest.fixture
def raw(daemon: LocalDaemon) -> Iterator[Connection]:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(daemon.socket)
    connection = Connection(sock)
    yield connection
    connection.close()


def error(connection: Connection) -> tuple[str, str]:
    """Code and field of the error that the daemon answers before it hangs up."""
    answer = connection.receive(timeout=10)[0]["error"]
    with pytest.raises(EOFError):
        connection.receive(timeout=10)
    return answer["code"], answer["field"]


def test_garbage_is_refused(daemon: LocalDaemon, raw: Connection) -> None:
    """Bytes that are no JSON: a protocol error that names the frame."""
    raw.sock.sendall(struct.pack(">I", 5) + b"\xff\x00bad")
    assert error(raw) == ("protocol", "frame")
    still_good(daemon)


def test_an_oversized_frame_is_refused_before_it_is_read(daemon: LocalDaemon, raw: Connection) -> None:
    """The length alone is enough."""
    raw.sock.sendall(struct.pack(">I", MAX_FRAME + 1))
    assert error(raw) == ("protocol", "frame length")
    still_good(daemon)


def test_another_protocol_version_is_refused(daemon: LocalDaemon, raw: Connection) -> None:
    """The hello names a version that this daemon does not speak."""
    raw.send({**HELLO, "proto": PROTO + 1})
    assert error(raw) == ("protocol", "proto")
    still_good(daemon)


def test_a_trainer_without_descriptors_is_refused(daemon: LocalDaemon, raw: Connection) -> None:
    """A hello without its control page."""
    raw.send({**HELLO, "side": "trainer", "job": "j", "group": "g"})
    assert error(raw) == ("protocol", "fds")
    still_good(daemon)


def test_a_client_that_stops_reading_is_disconnected(daemon: LocalDaemon, raw: Connection) -> None:
    """It asks and never reads the answers; the daemon serves others meanwhile and drops it when 8 MiB wait."""
    raw.send(HELLO)
    request = {"id": 2, "method": "status"}
    with pair(daemon, split_layout(WHOLE, 0, 1), split_layout(WHOLE, 0, 1)):  # something to show
        raw.sock.settimeout(20)
        for _ in range(200):
            raw.send(request)
        still_good(daemon)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            flood(raw, request)
    still_good(daemon)


def flood(connection: Connection, request: dict[str, Any]) -> None:
    while True:
        connection.sock.settimeout(20)
        connection.send(request)


def test_a_disallowed_user_is_refused() -> None:
    """hook.uids names somebody else: both sides hear Refused, naming uid."""
    with LocalDaemon(config={"hook.uids": [os.getuid() + 1]}) as daemon:
        with pytest.raises(Refused) as caught:
            connect_trainer("job", "run", 0, 1, daemon.socket)
        assert (caught.value.field, caught.value.got) == ("uid", str(os.getuid()))
        with pytest.raises(Refused) as caught:
            connect_engine("job", "r0", 0, 1, daemon.socket)
        assert caught.value.field == "uid"
        assert daemon.returncode is None


def test_two_clients_cannot_be_one_rank(daemon: LocalDaemon) -> None:
    """The second client is told who has the rank; the first one keeps it and still commits."""
    job = new_job()
    with pair(daemon, split_layout(WHOLE, 0, 1), split_layout(WHOLE, 0, 1), job):
        for connect, group in ((connect_trainer, "run0"), (connect_engine, "r0")):
            with pytest.raises(Refused) as caught:
                connect(job, group, 0, 1, daemon.socket)
            assert caught.value.field == "rank"
            assert caught.value.got == f"process {os.getpid()} speaks for it"
    still_good(daemon)


def test_a_rank_of_another_world_is_refused(daemon: LocalDaemon) -> None:
    """Ranks of one replica must agree on how many they are."""
    job = new_job()
    with connect_engine(job, "r0", 0, 2, daemon.socket) as one, connect_engine(job, "r0", 1, 3, daemon.socket) as other:
        one.register(split_layout(WHOLE, 0, 2))
        with pytest.raises(Refused) as caught:
            other.register(split_layout(WHOLE, 1, 2))
    assert (caught.value.field, caught.value.got) == ("world", "3")
    still_good(daemon)
