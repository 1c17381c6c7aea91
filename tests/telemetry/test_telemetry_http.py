"""The pages that Prometheus and health checks read."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from refitd.errors import ConfigError
from refitd.telemetry.http import MetricsServer
from refitd.telemetry.metrics import Metrics


def fetch(url: str, accept: str = "") -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


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
    threads = threading.active_count()
    server = MetricsServer("127.0.0.1", 0, Metrics(process=False).registry)
    address = server.address
    assert fetch(server.url + "/")[0] == 200
    with socket.create_connection(address):
        while threading.active_count() < threads + 2:  # the server's own, and one for the silent client
            time.sleep(0.01)
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 1
    assert threading.active_count() == threads
    again = MetricsServer(*address, Metrics(process=False).registry)
    again.close()


def test_ipv6() -> None:
    """An IPv6 address works and its URL has brackets."""
    server = MetricsServer("::1", 0, Metrics(process=False).registry)
    assert server.url.startswith("http://[::1]:")
    assert fetch(server.url + "/healthz")[0] == 200
    server.close()
