"""What a daemon says when it cannot start: the key, what was expected, and exit status 78."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from e2e_refit import still_good

from refitd.errors import EX_CONFIG, DaemonUnavailable
from refitd.testing import LocalDaemon


@pytest.fixture
def taken() -> Iterator[int]:
    """A TCP port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refusal(config: dict[str, object]) -> str:
    """The last line that a daemon says before it ends with the status of a bad configuration."""
    daemon = LocalDaemon(config=config)
    try:
        daemon.launch()
        assert daemon.wait(30) == EX_CONFIG
        return daemon.log.splitlines()[-1]
    finally:
        daemon.stop()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hook.sockte", "x", "refitd: hook.sockte: expected one of the keys socket, uids, gids, got an unknown key"),
        ("hok.socket", "x", "refitd: hok: expected one of the sections"),
        ("data.port", "no number", "refitd: data.port: expected a whole number, got 'no number' (text)"),
        ("store.url", "etcd3://nowhere", "refitd: store.url: expected memory://, etcd://host:port"),
        ("data.secret_file", "/nowhere/secret", "refitd: data.secret_file: expected a readable file"),
        ("node.state_dir", "/proc/refitd", "refitd: node.state_dir: expected a folder that we may write to"),
    ],
)
def test_a_wrong_key_is_named_and_ends_the_daemon_with_78(key: str, value: object, says: str) -> None:
    """Unknown, mistyped and senseless keys: the message names section.key."""
    assert refusal({key: value}).startswith(says)


def test_a_data_port_in_use_is_named(taken: int) -> None:
    """Another program listens on the data port."""
    says = f"refitd: data.port: expected a free port on this host, got 127.0.0.1:{taken} ("
    assert refusal({"data.port": taken}).startswith(says)


def test_a_metrics_port_in_use_is_named(taken: int) -> None:
    """Another program listens where metrics should be."""
    says = f"refitd: metrics.listen: expected an address that is free, got 127.0.0.1:{taken} ("
    assert refusal({"metrics.listen": f"127.0.0.1:{taken}"}).startswith(says)


def test_a_socket_of_a_live_daemon_is_left_alone(own_daemon: LocalDaemon) -> None:
    """A second daemon ends with 78 and the first one goes on."""
    says = f"refitd: hook.socket: expected a path without a live daemon, got {own_daemon.socket}: a daemon answers"
    assert refusal({"hook.socket": own_daemon.socket, "node.name": "other"}) == says
    still_good(own_daemon)


def test_a_stale_socket_file_is_replaced(own_daemon: LocalDaemon) -> None:
    """What a killed daemon left behind does not keep the next one from starting."""
    own_daemon.kill()
    own_daemon.start()
    still_good(own_daemon)


def test_a_daemon_that_cannot_start_is_an_error_for_tests_too() -> None:
    """LocalDaemon raises with the end of the log and leaves nothing behind."""
    daemon = LocalDaemon(config={"data.port": -1})
    with pytest.raises(DaemonUnavailable, match=r"\(78\).*data\.port"), daemon:
        pytest.fail("it started")
    assert not daemon.folder.exists()
