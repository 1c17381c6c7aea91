"""The library path: the mover is a thread of the client. Real daemons; what dies are real processes and sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_refit import PATIENT, SECONDS, WHOLE, new_job, pair, refit, weights

from refitd import connect_engine, connect_trainer
from refitd.errors import InputError
from refitd.hook.admin import ask
from refitd.hook.engine import Engine
from refitd.mover.memory import raise_descriptor_limit
from refitd.testing import LocalDaemon, split_layout, wait_until

HERE = Path(__file__).parent
ROWS, COLS = 1200, 1000  # 4.8 MB, which take seconds where a node sends 2 MB a second
LARGE = {"w": ((ROWS, COLS), "float32")}


def ranks(daemon: LocalDaemon, job: str) -> dict[str, dict[str, Any]]:
    return {rank["key"]: rank for rank in daemon.status()["jobs"][job]["ranks"]}


def guests() -> list[str]:
    """Mover threads of this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("refitd mover")]


@pytest.fixture
def slow_wire() -> Iterator[LocalDaemon]:
    """Every rank is a host of its own; a daemon that the test may hurt."""
    with LocalDaemon(links="network", config={**PATIENT, "timeouts.mover_ping": 0.3}) as running:
        yield running


@contextlib.contextmanager
def process(daemon: LocalDaemon, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A client on the library path: see library_process.py."""
    command = [sys.executable, str(HERE / "library_process.py"), daemon.socket, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def moving(daemon: LocalDaemon, job: str) -> bool:
    """Whether bytes have come in, and not all of them."""
    return any(0 < link["moved"] < link["planned"] for link in daemon.status()["jobs"][job]["links"])


def receive_in_thread(engine: Engine, memory: Any) -> threading.Thread:
    """Take the next ticket; the daemon may change its mind several times before it is done."""
    ticket = engine.pending(wait=SECONDS)
    assert ticket is not None
    thread = threading.Thread(target=engine.receive, args=(ticket, {"w": memory}, SECONDS))
    thread.start()
    return thread


@pytest.fixture
def many_files() -> Iterator[None]:
    """A process whose next descriptors are above those that select() takes."""
    raise_descriptor_limit()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("links", ["auto", "network"])
def test_threads_of_trainer_and_engine_refit(links: str) -> None:
    """Bit-exact by shared memory and by TCP, said in status and log, and nothing is left of it after close."""
    layout, job = split_layout(WHOLE, 0, 1), new_job()
    with LocalDaemon(links=links, config=PATIENT) as daemon:
        with pair(daemon, layout, layout, job, path="library") as (trainer, engine):
            for step in (1, 2):
                report, memory = refit(trainer, engine, step)
                assert report.committed == ["r0"]
                assert np.array_equal(memory, weights(step))
            shown = ranks(daemon, job)
            assert sorted(guests()) == ["refitd mover engine/r0/0", "refitd mover trainer/run0/0"]
            trainer.release()
            engine.release()
        assert [(rank["path"], rank["path_why"], rank["life"]) for rank in shown.values()] == [
            ("library", "the client asked for it", 1)
        ] * 2
        assert all(rank["mover"] == rank["pid"] for rank in shown.values())
        assert guests() == []
        assert '"path_why": "the client asked for it"' in daemon.log


def test_a_thread_and_a_child_refit_together(daemon: LocalDaemon) -> None:
    """The trainer asks for nothing, so a child reads its memory; the engine's thread takes it from there."""
    layout, job = split_layout(WHOLE, 0, 1), new_job()
    with (
        connect_trainer(job, "run0", 0, 1, daemon.socket) as trainer,
        connect_engine(job, "r0", 0, 1, daemon.socket, path="library") as engine,
    ):
        trainer.plan_seconds = SECONDS
        trainer.register(layout)
        engine.register(layout)
        report, memory = refit(trainer, engine, 4)
        shown = ranks(daemon, job)
    assert report.committed == ["r0"]
    assert np.array_equal(memory, weights(4))
    assert {key: rank["path"] for key, rank in shown.items()} == {"trainer/run0/0": "child", "engine/r0/0": "library"}


def test_a_trainer_killed_in_mid_transfer_ends_its_thread_and_the_engines_is_revoked(slow_wire: LocalDaemon) -> None:
    """The lane turns under the engine's thread; the next trainer's publication commits as a whole, by the same life."""
    job = new_job()
    memory = np.zeros((ROWS, COLS), np.float32)
    with connect_engine(job, "r0", 0, 1, slow_wire.socket, path="library") as engine:
        engine.register(split_layout(LARGE, 0, 1))
        with process(slow_wire, "trainer", job, "run1", 1) as trainer:
            ask("limit", slow_wire.socket, job=job, rate=2_000_000)
            thread = receive_in_thread(engine, memory)
            wait_until(lambda: moving(slow_wire, job), "bytes on their way", SECONDS)
            trainer.send_signal(signal.SIGKILL)
            wait_until(lambda: "trainer/run1/0" not in ranks(slow_wire, job), "the trainer's end", SECONDS)
        ask("limit", slow_wire.socket, job=job, rate=None)
        with process(slow_wire, "trainer", job, "run2", 2):
            thread.join(SECONDS)
            assert not thread.is_alive()
            assert (engine.dirty, engine.step) == (False, 2)
            assert np.array_equal(memory, weights(2, (ROWS, COLS)))
            assert ranks(slow_wire, job)["engine/r0/0"]["life"] == 1


def test_a_thread_whose_socket_ends_in_mid_transfer_is_followed_by_another(slow_wire: LocalDaemon) -> None:
    """The engine's own thread loses its daemon's commands: its second life finishes the same publication."""
    job = new_job()
    memory = np.zeros((ROWS, COLS), np.float32)
    with (
        connect_engine(job, "r0", 0, 1, slow_wire.socket, path="library") as engine,
        process(slow_wire, "trainer", job, "run1", 3),
    ):
        engine.register(split_layout(LARGE, 0, 1))
        wait_until(lambda: "trainer/run1/0" in ranks(slow_wire, job), "the trainer", SECONDS)
        ask("limit", slow_wire.socket, job=job, rate=2_000_000)
        thread = receive_in_thread(engine, memory)
        wait_until(lambda: moving(slow_wire, job), "bytes on their way", SECONDS)
        engine.client.executor._host._commands.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: ranks(slow_wire, job)["engine/r0/0"]["life"] == 2, "the second life", SECONDS)
        ask("limit", slow_wire.socket, job=job, rate=None)
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert (engine.dirty, engine.step) == (False, 3)
        assert np.array_equal(memory, weights(3, (ROWS, COLS)))


def test_a_client_that_is_stopped_is_cut_off_and_comes_back(slow_wire: LocalDaemon) -> None:
    """Nobody can kill its thread: the daemon does without the client until it runs again, and then it refits."""
    job, layout = new_job(), split_layout(LARGE, 0, 1)
    with connect_trainer(job, "run1", 0, 1, slow_wire.socket) as trainer, process(slow_wire, "engine", job) as engine:
        trainer.plan_seconds = SECONDS
        trainer.register(layout)
        wait_until(lambda: ranks(slow_wire, job).get("engine/r0/0", {}).get("mover"), "the engine's thread", SECONDS)
        engine.send_signal(signal.SIGSTOP)
        wait_until(lambda: "engine/r0/0" not in ranks(slow_wire, job), "the engine is given up", SECONDS)
        engine.send_signal(signal.SIGCONT)
        offer = trainer.publish(5, {"w": weights(5, (ROWS, COLS))})
        report = offer.committed(timeout=SECONDS)
        assert report.committed == ["r0"]
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"5 True\n"
    assert "its mover thread was cut off and does not end" in slow_wire.log


def test_the_daemons_configuration_decides_for_clients_that_leave_it_to_it() -> None:
    """With data.path = library a client of memory on the host has a thread, too; a path that is none has no client."""
    job = new_job()
    with (
        LocalDaemon(config={"data.path": "library"}) as daemon,
        connect_trainer(job, "run0", 0, 1, daemon.socket) as trainer,
    ):
        trainer.register(split_layout(WHOLE, 0, 1))
        shown = ranks(daemon, job)["trainer/run0/0"]
        assert (shown["path"], shown["path_why"]) == ("library", "data.path says so")
        assert (trainer.client.executor.path, trainer.client.executor.reason) == ("library", "data.path says so")
    with pytest.raises(InputError, match="path"):
        connect_trainer(job, "run0", 0, 1, path="shortcut")
