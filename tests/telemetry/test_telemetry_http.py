"""The pages that Prometheus, health checks and people read."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pictures
import pytest

from refitd.errors import ConfigError
from refitd.telemetry import http as http_module
from refitd.telemetry.facts import Verdict
from refitd.telemetry.http import MetricsServer
from refitd.telemetry.metrics import Metrics


def fetch(url: str, accept: str = "", method: str = "GET") -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


class Daemon:
    """What the routes ask, with what they asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int | None]] = []
        self.stands = False

    def ready(self, job: str, replica: str, max_lag: int | None) -> Verdict:
        self._turn()
        self.asked.append((job, replica, max_lag))
        return Verdict(replica != "r1", "it is 3 publications behind the newest" if replica == "r1" else "it serves")

    def picture(self) -> pictures.Facts:
        self._turn()
        return pictures.healthy()

    def _turn(self) -> None:
        if self.stands:
            raise TimeoutError("the daemon's loop has not turned for 2 s")


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def server(daemon: Daemon) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, Metrics(process=False).registry, ready=daemon.ready, picture=daemon.picture)
    yield server
    server.close()


def test_a_replica_that_is_new_enough_is_ready(server: MetricsServer, daemon: Daemon) -> None:
    """/readyz judges one replica, a job, or the node; 200 or 503, with the reason."""
    status, kind, body = fetch(server.url + "/readyz?job=grpo&replica=r0&max_lag=2")
    assert (status, kind, json.loads(body)) == (200, "application/json", {"ready": True, "reason": "it serves"})
    status, _, body = fetch(server.url + "/readyz?job=grpo&replica=r1")
    assert (status, json.loads(body)["reason"]) == (503, "it is 3 publications behind the newest")
    assert fetch(server.url + "/readyz?max_lag=0&job=grpo")[0] == 200
    assert fetch(server.url + "/readyz")[0] == 200
    assert daemon.asked == [("grpo", "r0", 2), ("grpo", "r1", None), ("grpo", "", 0), ("", "", None)]


@pytest.mark.parametrize(
    ("target", "field", "expected", "got"),
    [
        ("/readyz?max_lag=-1", "max_lag", "a whole number from 0 to 1000000", "'-1'"),
        ("/readyz?max_lag=1.5", "max_lag", "a whole number from 0 to 1000000", "'1.5'"),
        ("/readyz?max_lag=%D9%A1", "max_lag", "a whole number from 0 to 1000000", "'\u0661'"),
        ("/readyz?max_lag=99999999999999999999", "max_lag", "a whole number from 0 to 1000000", repr("9" * 20)),
        ("/readyz?lag=1", "lag", "one of job, replica, max_lag", "an unknown one"),
        ("/readyz?job=a&job=b", "job", "one value", "another one"),
        ("/readyz?job=", "job", "one value", "nothing"),
        ("/readyz?replica=r0", "job", "the job of the replica", "nothing"),
        ("/readyz?job", "query", "name=value&name=value", "bad query field: 'job'"),
        ("/readyz?job=%FF", "query", "name=value&name=value", None),
        ("/metrics?x=1", "x", "no parameters", "an unknown one"),
        ("/healthz?x=1", "x", "no parameters", "an unknown one"),
        ("/?x=1", "x", "no parameters", "an unknown one"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_typed(
    server: MetricsServer, daemon: Daemon, target: str, field: str, expected: str, got: str | None
) -> None:
    """A parameter that is wrong is a 400 that names it, what was expected and what came; nothing is judged."""
    status, kind, body = fetch(server.url + target)
    error = json.loads(body)["error"]
    assert (status, kind, error["code"], error["retryable"]) == (400, "application/json", "input", False)
    assert (error["field"], error["expected"]) == (field, expected)
    assert got is None or error["got"] == got
    assert error["message"] == f"{error['field']}: expected {error['expected']}, got {error['got']}"
    assert daemon.asked == []


def test_people_get_a_page(server: MetricsServer) -> None:
    """/ is HTML about this daemon, which may load and run nothing."""
    status, kind, body = fetch(server.url + "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "<title>refitd: c</title>" in body
    connection = http.client.HTTPConnection(*server.address, timeout=5)
    connection.request("GET", "/")
    headers = connection.getresponse().headers
    connection.close()
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert (headers["Cache-Control"], headers["Server"]) == ("no-store", "refitd")


def test_a_loop_that_stands_is_no_hang(server: MetricsServer, daemon: Daemon) -> None:
    """Where the daemon's loop does not answer, its pages are 503 with the reason, and /metrics and /healthz answer."""
    daemon.stands = True
    for target in ("/", "/readyz"):
        assert fetch(server.url + target)[::2] == (503, "the daemon's loop has not turned for 2 s\n")
    assert fetch(server.url + "/metrics")[0] == 200
    assert fetch(server.url + "/healthz")[0] == 200


def test_only_questions_are_answered(server: MetricsServer) -> None:
    """HEAD is GET without a body; nothing else is known; what is not there names what is."""
    assert fetch(server.url + "/healthz", method="HEAD") == (200, "text/plain; charset=utf-8", "")
    assert fetch(server.url + "/metrics", method="POST")[0] == 501
    assert fetch(server.url + "/status")[::2] == (404, "not found; there is /metrics /healthz /readyz /\n")
    assert fetch(server.url + "//etc/passwd")[0] == 404
    assert fetch(server.url + "/../etc/passwd")[0] == 404


def test_a_client_that_hangs_up_is_its_own_affair(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    """Connections that end in the middle of a request leave nothing on stderr, and the next one is served."""
    for _ in range(3):
        with socket.create_connection(server.address) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert fetch(server.url + "/healthz")[0] == 200
    assert capfd.readouterr().err == ""


def test_metrics_are_served() -> None:
    """/metrics holds the registry in the format that was asked for."""
    metrics = Metrics(process=False)
    metrics.refit("ok")
    server = MetricsServer("127.0.0.1", 0, metrics.registry)
    status, kind, text = fetch(server.url + "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert 'refitd_refits_total{outcome="ok"} 1.0\n' in text
    assert fetch(server.url + "/metrics", "application/openmetrics-text; version=1.0.0")[2].endswith("# EOF\n")
    assert fetch(server.url + "/other")[0] == 404
    server.close()


def test_health_follows_the_daemon() -> None:
    """/healthz is 200 when nothing is wrong, else 503 with what is."""
    problems = [""]
    server = MetricsServer("127.0.0.1", 0, Metrics(process=False).registry, lambda: problems[0])
    assert fetch(server.url + "/healthz")[::2] == (200, "ok\n")
    problems[0] = "the main loop stands still"
    assert fetch(server.url + "/healthz")[::2] == (503, "the main loop stands still\n")
    server.close()


def test_a_port_in_use_names_the_key() -> None:
    """An address that cannot be had is a ConfigError of metrics.listen."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"metrics\.listen: expected an address that is free, got 127\.0\.0\.1:{port}"
        ):
            MetricsServer("127.0.0.1", port, Metrics(process=False).registry)


def test_close_frees_the_port_and_the_threads() -> None:
    """After close() the port can be bound again, and no thread is left, also with a client that says nothing."""
    others = set(threading.enumerate())
    server = MetricsServer("127.0.0.1", 0, Metrics(process=False).registry)
    address = server.address
    assert fetch(server.url + "/")[0] == 200
    with socket.create_connection(address):
        while len(set(threading.enumerate()) - others) < 2:  # the server's own, and one for the silent client
            time.sleep(0.01)
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 4
    assert set(threading.enumerate()) <= others
    again = MetricsServer(*address, Metrics(process=False).registry)
    again.close()


def test_ipv6() -> None:
    """An IPv6 address works and its URL has brackets."""
    server = MetricsServer("::1", 0, Metrics(process=False).registry)
    assert server.url.startswith("http://[::1]:")
    assert fetch(server.url + "/healthz")[0] == 200
    server.close()


def test_a_crowd_that_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection is a thread and a descriptor: when there are many, the oldest is hung up on."""
    monkeypatch.setattr(http_module, "MAX_CLIENTS", 4)
    server = MetricsServer("127.0.0.1", 0, Metrics(process=False).registry)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(server.address, timeout=4.0)) for _ in range(6)]
        assert [client.recv(1) for client in crowd[:2]] == [b"", b""]
        assert fetch(server.url + "/")[0] == 200
        assert len(server._server._clients) <= 4
    server.close()
