"""A refit that is slow or fails: within ten seconds `refitd status` and the status page name rank, link and phase."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from refitd import connect_engine, connect_trainer
from refitd.cli import main
from refitd.hook.engine import Engine
from refitd.hook.trainer import Trainer
from refitd.store import spawn_etcd
from refitd.testing import LocalDaemon, free_port, split_layout, wait_until

TENSORS = {"w": ((1024, 1024), "float32")}
SHAPE = TENSORS["w"][0]
HALF = 2_097_152
SECONDS, TIMES = 60.0, 6
NAMED = 10.0
_LENGTH = struct.Struct(">I")


class Throttle:
    """In front of the data port: what rank ``slow`` sends passes at ``rate`` bytes a second while ``on`` is set."""

    def __init__(self, behind: int, slow: str, rate: int = 300_000) -> None:
        self.on = threading.Event()
        self._behind, self._slow, self._rate = behind, slow, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._behind))
                self._socks += [client, server]
                self._threads += [
                    threading.Thread(target=self._forward, args=(client, server)),
                    threading.Thread(target=_pump, args=(server, client, lambda: None)),
                ]
                for thread in self._threads[-2:]:
                    thread.start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = client.recv(_LENGTH.size, socket.MSG_WAITALL)
            hello = client.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL) if len(head) == _LENGTH.size else b"{}"
            server.sendall(head + hello)
            held = json.loads(hello).get("src") == self._slow
            _pump(client, server, self._brake if held else lambda: None)

    def _brake(self) -> None:
        if self.on.is_set():
            time.sleep(8192 / self._rate)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._socks:
            sock.close()


def _pump(source: socket.socket, target: socket.socket, brake: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(8192):
            brake()
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def throttle() -> Iterator[Throttle]:
    """In the way of every edge; trainer 1's alone can be made slow."""
    found = Throttle(free_port(), "trainer/run0/1")
    try:
        yield found
    finally:
        found.close()


class Nodes(NamedTuple):
    """Trainers send from node a, an engine receives on node b."""

    a: LocalDaemon
    b: LocalDaemon


@pytest.fixture
def nodes(throttle: Throttle) -> Iterator[Nodes]:
    """Two daemons on one real etcd."""
    config = {"metrics.listen": "127.0.0.1:0", "timeouts.offer": SECONDS, "data.bucket_bytes": 65536}
    behind = {"data.port": throttle._behind, "data.advertise": f"127.0.0.1:{throttle.port}"}
    with contextlib.ExitStack() as stack:
        etcd = spawn_etcd(prefer="distro")
        stack.callback(etcd.stop)
        yield Nodes(
            stack.enter_context(LocalDaemon(etcd.url, "network", "a", config)),
            stack.enter_context(LocalDaemon(etcd.url, "network", "b", {**config, **behind})),
        )


@pytest.fixture
def job(nodes: Nodes) -> Iterator[Callable[[int], Future[None]]]:
    """Two trainers, each with half of the rows, and an engine; begins a refit to a step and returns its end."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        trainers = [stack.enter_context(connect_trainer("grpo", "run0", r, 2, nodes.a.socket)) for r in range(2)]
        engine = stack.enter_context(connect_engine("grpo", "r0", 0, 1, nodes.b.socket))
        for rank, trainer in enumerate(trainers):
            trainer.plan_seconds = SECONDS
            trainer.register(split_layout(TENSORS, rank, 2))
        engine.register(split_layout(TENSORS, 0, 1))
        wait_until(lambda: all(rank["mover"] for node in nodes for rank in shown(node)["ranks"]), "movers", SECONDS)
        refit(trainers, engine, 1)
        yield lambda step: pool.submit(refit, trainers, engine, step)


def refit(trainers: list[Trainer], engine: Engine, step: int) -> None:
    memory, half = np.zeros(SHAPE, np.float32), np.full((SHAPE[0] // 2, SHAPE[1]), step, np.float32)
    for _time in range(TIMES):  # a trainer gives an offer up where the daemon has no time for it
        offers = [trainer.publish(step, {"w": half}) for trainer in trainers]
        if ticket := engine.pending(wait=SECONDS / TIMES):
            break
        assert [offer.released(timeout=0.0) for offer in offers] == ["SKIPPED", "SKIPPED"]
    assert ticket is not None
    engine.receive(ticket, {"w": memory}, timeout=SECONDS)
    assert [offer.committed(timeout=SECONDS).committed for offer in offers] == [["r0"], ["r0"]]
    assert memory.min() == memory.max() == step


def page(daemon: LocalDaemon) -> str:
    url = next(line["http"] for line in map(json.loads, daemon.log.splitlines()) if line["event"] == "ready")
    with urllib.request.urlopen(url, timeout=10) as answer:
        return html.unescape(re.sub(r"<[^>]+>", "\n", answer.read().decode().partition("<body>")[2]))


def everywhere(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str], wanted: str) -> None:
    """Wait until the page and what ``refitd status`` prints match ``wanted``; ten seconds at most."""

    def printed() -> str:
        assert main(["status", "--socket", daemon.socket]) == 0
        return capsys.readouterr().out

    for read in (lambda: page(daemon), printed):
        seen = [""]
        with contextlib.suppress(TimeoutError):
            wait_until(lambda read=read, seen=seen: re.search(wanted, seen.append(read()) or seen[-1]), wanted, NAMED)
        assert re.search(wanted, seen[-1]), seen[-1]


def shown(daemon: LocalDaemon) -> dict[str, Any]:
    found = daemon.status()["jobs"]["grpo"]
    assert isinstance(found, dict)
    return found


def test_a_throttled_edge_is_named(
    nodes: Nodes, throttle: Throttle, job: Callable[[int], Future[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two edges the one that trickles is named, with the replica, the phase, and what has come; it is no fault."""
    throttle.on.set()
    ending = job(2)
    try:
        edge = r"trainer/run0/1 -> engine/r0/0 over network, [\d.]+ [kM]?B of 2\.1 MB"
        everywhere(nodes.b, capsys, rf"replica r0 has been in transfer for [\d.]+ s: {edge}")
        links = {row["src"]: row for row in shown(nodes.b)["links"]}
        assert (links["trainer/run0/0"]["moved"], links["trainer/run0/0"]["late"]) == (HALF, False)
        assert (links["trainer/run0/1"]["planned"], links["trainer/run0/1"]["late"]) == (HALF, True)
    finally:
        throttle.on.clear()
        ending.result(SECONDS)
    assert [shown(node)["faults"] for node in nodes] == [[], []]


def test_a_stopped_mover_is_named(
    nodes: Nodes, throttle: Throttle, job: Callable[[int], Future[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mover that is stopped in a transfer: both nodes name rank, link, phase, and why; it is made good."""
    throttle.on.set()
    ending = job(2)
    try:
        wait_until(lambda: shown(nodes.b)["lanes"][0]["stage"] == "transfer", "the transfer", SECONDS)
        ranks = {rank["key"]: rank for rank in shown(nodes.a)["ranks"]}
        os.kill(ranks["trainer/run0/1"]["mover"], signal.SIGSTOP)
        edge = "trainer/run0/1 -> engine/r0/0"
        everywhere(nodes.b, capsys, r"the refit of r0 to 1/\d+ has failed once: in transfer: .*trainer/run0/1")
        everywhere(nodes.b, capsys, rf"in transfer.*: {edge}")  # the lost connection, or what is slow after a turn
        everywhere(
            nodes.a, capsys,
            r"the mover of trainer/run0/1 was killed: it did not answer a ping in time; "
            rf"replica r0 was in transfer: {edge} over network",
        )  # fmt: skip
    finally:
        throttle.on.clear()
        ending.result(SECONDS)
    newest = wait_until(
        lambda: [r for r in shown(nodes.b)["refits"][:1] if r["outcome"]], "its end is heard of", SECONDS
    )[0]
    assert (newest["outcome"], newest["failures"]) == ("ok", 1)
