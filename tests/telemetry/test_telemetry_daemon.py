"""What a real daemon says over HTTP while it works, is slow, and loses a mover."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from refitd import connect_engine, connect_trainer
from refitd.cli import main
from refitd.config import load, show
from refitd.hook.engine import Engine
from refitd.hook.trainer import Trainer
from refitd.hook.wire import Connection
from refitd.testing import LocalDaemon, split_layout

SHAPE = (1024, 2048)
LAYOUT = split_layout({"w": (SHAPE, "float32")}, 0, 1)
NBYTES = 4 * SHAPE[0] * SHAPE[1]
SECONDS = 60.0
SECRET, PASSWORD = "s3cr3t-of-the-data-port-0123456789", "hunter2-of-etcd"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LocalDaemon]:
    """A daemon with a page and with secrets, whose ranks speak over the network."""
    (tmp_path / "data").write_text(SECRET)
    (tmp_path / "data").chmod(0o600)
    config = {
        "metrics.listen": "127.0.0.1:0", "timeouts.offer": SECONDS, "data.secret_file": str(tmp_path / "data"),
    }  # fmt: skip
    with LocalDaemon(links="network", config=config) as running:
        yield running


@pytest.fixture
def clients(daemon: LocalDaemon) -> Iterator[tuple[Trainer, Engine]]:
    with (
        connect_trainer("grpo", "run0", 0, 1, daemon.socket) as trainer,
        connect_engine("grpo", "r0", 0, 1, daemon.socket) as engine,
    ):
        trainer.plan_seconds = SECONDS
        trainer.client._stale_seconds = 10.0  # of the daemon's heartbeat, on a busy machine
        trainer.register(LAYOUT)
        engine.register(LAYOUT)
        yield trainer, engine


def fetch(daemon: LocalDaemon, target: str) -> tuple[int, str]:
    url = next(line["http"] for line in map(json.loads, daemon.log.splitlines()) if line["event"] == "ready")
    try:
        with urllib.request.urlopen(url + target, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def refit(trainer: Trainer, engine: Engine, step: int) -> None:
    memory = np.zeros(SHAPE, np.float32)
    offer = trainer.publish(step, {"w": np.full(SHAPE, step, np.float32)})
    ticket = engine.pending(wait=SECONDS)
    assert ticket is not None
    engine.receive(ticket, {"w": memory}, timeout=SECONDS)
    assert offer.committed(timeout=SECONDS).committed == ["r0"]
    assert memory.min() == memory.max() == step


def samples(daemon: LocalDaemon) -> Callable[..., float | None]:
    """Look up samples of one scrape by name and labels."""
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(fetch(daemon, "/metrics")[1])
        for sample in family.samples
    }
    return lambda name, **labels: found.get((name, frozenset(labels.items())))


def malformed(daemon: LocalDaemon) -> str:
    """Send what is no hello; returns the code of the answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket)
        wire = Connection(sock)
        wire.send({"id": 1, "method": "release"})
        return str(wire.receive(SECONDS)[0]["error"]["code"])


def page(daemon: LocalDaemon) -> str:
    status, text = fetch(daemon, "/")
    assert status == 200
    return html.unescape(re.sub(r"<[^>]+>", "\n", text.partition("<body>")[2]))


def wait_for(daemon: LocalDaemon, words: str, seconds: float) -> str:
    """The page once it has ``words``."""
    deadline = time.monotonic() + seconds
    while words not in (text := page(daemon)):
        assert time.monotonic() < deadline, f"no {words!r} within {seconds} s:\n{text}"
        time.sleep(0.1)
    return text


def test_a_refit_is_seen_on_every_page(daemon: LocalDaemon, clients: tuple[Trainer, Engine]) -> None:
    """Before a refit nothing is ready; after it metrics, readiness and page agree, and none tells a secret."""
    trainer, engine = clients
    assert fetch(daemon, "/readyz?job=grpo&replica=r0")[0] == 503
    assert fetch(daemon, "/readyz?job=other")[1] == '{"ready": false, "reason": "this node has no job other"}\n'
    refit(trainer, engine, 7)
    assert fetch(daemon, "/healthz") == (200, "ok\n")
    assert fetch(daemon, "/readyz") == (200, '{"ready": true, "reason": "grpo/r0: new enough"}\n')
    assert fetch(daemon, "/readyz?job=grpo&replica=r0&max_lag=0")[0] == 200
    assert fetch(daemon, "/readyz?job=grpo&replica=r9")[0] == 503
    assert malformed(daemon) == "protocol"
    value = samples(daemon)
    assert [value("refitd_hook_errors_total", code=code) for code in ("protocol", "refused")] == [1, 0]
    assert value("refitd_refits_total", outcome="ok") == 1
    assert value("refitd_attempts_total", plan="whole") == 1
    assert value("refitd_plan_duration_seconds_count", plan="whole") == value("refitd_lane_turns_total", cause="join")
    assert value("refitd_transfer_bytes_total", gpu="0", link="network", direction="tx") == NBYTES
    assert value("refitd_transfer_bytes_total", gpu="1", link="network", direction="rx") == NBYTES
    for phase in ("offer", "transfer", "verify", "commit", "apply"):
        assert value("refitd_refit_duration_seconds_count", phase=phase, outcome="ok") == 1
    achieved = value("refitd_achieved_bandwidth_bytes_per_second", link="network")
    assert achieved is not None
    assert achieved > NBYTES / SECONDS
    assert value("refitd_replica_step", refit_job="grpo", replica="r0") == 7
    assert value("refitd_replica_lag", refit_job="grpo", replica="r0") == 0
    assert value("refitd_replica_ready", refit_job="grpo", replica="r0") == 1
    assert value("refitd_replicas", refit_job="grpo", state="ready") == 1
    assert value("refitd_members", refit_job="grpo", state="active") == 1
    assert value("refitd_is_leader", refit_job="grpo") == 1
    assert value("refitd_store_lease_held", refit_job="grpo") == 1
    assert time.time() - (value("refitd_store_last_contact_timestamp_seconds", refit_job="grpo") or 0) < 30
    assert value("refitd_hook_connections", side="trainer") == 1
    assert value("refitd_movers", refit_job="grpo", state="running") == 2
    assert (value("refitd_store_requests_total", kind="txn") or 0) > 3
    text = page(daemon)
    for words in ("Nothing is wrong.", "grpo/r0", "trainer/run0/0", "engine/r0/0", "8.39 MB network", "committed"):
        assert words in text
    for target in ("/", "/metrics", "/healthz", "/readyz", "/readyz?job=grpo&replica=r0", "/nothing"):
        assert SECRET not in fetch(daemon, target)[1]
    assert SECRET not in daemon.log


def test_the_stores_password_is_nowhere(tmp_path: Path) -> None:
    """With a store that does not answer, pages say so and name no password; neither do log and ``config show``."""
    (tmp_path / "etcd").write_text(PASSWORD)
    (tmp_path / "etcd").chmod(0o600)
    config = {
        "metrics.listen": "127.0.0.1:0", "store.url": "etcd://127.0.0.1:9", "store.user": "refitd",
        "store.password_file": str(tmp_path / "etcd"),
    }  # fmt: skip
    with LocalDaemon(config=config) as daemon, connect_trainer("grpo", "run0", 0, 1, daemon.socket) as trainer:
        trainer.register(LAYOUT)
        text = wait_for(daemon, "the store does not answer", 10.0)
        assert samples(daemon)("refitd_store_lease_held", refit_job="grpo") == 0
        assert fetch(daemon, "/healthz") == (200, "ok\n")
        bodies = [text, daemon.log, *(fetch(daemon, target)[1] for target in ("/", "/metrics", "/readyz"))]
        bodies.append(show(load(daemon.folder / "refitd.toml")))
        assert [body for body in bodies if PASSWORD in body] == []


def test_a_slow_link_is_named_within_ten_seconds(daemon: LocalDaemon, clients: tuple[Trainer, Engine]) -> None:
    """A throttled edge: replica, phase, both ranks, the link and what came are on the page while the refit goes on."""
    refit(*clients, 1)
    assert main(["limit", "grpo", "1MB/s", "--socket", daemon.socket]) == 0
    refitting = threading.Thread(target=refit, args=(*clients, 2))
    refitting.start()
    try:
        text = wait_for(daemon, "replica r0 has been in transfer for", 10.0)
        assert re.search(r"trainer/run0/0 -> engine/r0/0 over network, [\d.]+ [kM]?B of 8\.39 MB", text)
        value = samples(daemon)
        assert value("refitd_planned_bandwidth_bytes_per_second", link="network") == 1e6
        assert value("refitd_loans", refit_job="grpo", side="trainer") == 1
        assert value("refitd_loans", refit_job="grpo", side="engine") == 1
        assert fetch(daemon, "/readyz?job=grpo&replica=r0&max_lag=5")[0] == 503
        assert daemon.status()["jobs"]["grpo"]["slow"][0].startswith("replica r0 has been in transfer for")
        assert main(["limit", "grpo", "none", "--socket", daemon.socket]) == 0
    finally:
        refitting.join()
    wait_for(daemon, "Nothing is wrong.", 10.0)


def test_a_stopped_mover_is_named_within_ten_seconds(daemon: LocalDaemon, clients: tuple[Trainer, Engine]) -> None:
    """The rank whose mover hung in the middle of a transfer is named with the reason; the refit is made good."""
    refit(*clients, 1)
    assert main(["limit", "grpo", "4MB/s", "--socket", daemon.socket]) == 0
    refitting = threading.Thread(target=refit, args=(*clients, 2))
    refitting.start()
    try:
        while daemon.status()["jobs"]["grpo"]["lanes"][0]["stage"] != "transfer":
            time.sleep(0.02)
        ranks = {rank["key"]: rank for rank in daemon.status()["jobs"]["grpo"]["ranks"]}
        os.kill(ranks["engine/r0/0"]["mover"], signal.SIGSTOP)
        wait_for(daemon, "the mover of engine/r0/0 was killed: it did not answer a ping in time", 10.0)
    finally:
        refitting.join()
    value = samples(daemon)
    assert value("refitd_mover_restarts_total") == 1
    assert value("refitd_communicator_repair_duration_seconds_count", method="reconnect") == 1
    assert value("refitd_refit_duration_seconds_count", phase="transfer", outcome="failed") == 1
    assert "1 failed before" in page(daemon)
