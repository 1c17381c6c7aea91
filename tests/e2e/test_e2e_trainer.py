"""The trainer never waits without bound, and engines follow its restarts."""

from __future__ import annotations

import contextlib
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e_refit import PATIENT, WHOLE, new_job, pair, refit, take, weights

from refitd import SKIPPED, connect_engine, connect_trainer, shared_empty
from refitd.hook.trainer import Trainer
from refitd.store import spawn_etcd
from refitd.testing import LocalDaemon, split_layout

STEPS = 60
LAYOUT = split_layout(WHOLE, 0, 1)


def step_seconds(trainer: Trainer, first: int) -> list[float]:
    """What each of some steps loses to publish and released; every one of them is skipped."""
    memory = shared_empty((4, 6), "float32")  # lent where it is: released has something to wait for
    seconds = []
    for step in range(first, first + STEPS):
        began = time.monotonic()
        assert trainer.publish(step, {"w": memory}).released(timeout=30) is SKIPPED
        seconds.append(time.monotonic() - began)
        time.sleep(0.02)
    return seconds


def assert_cheap(seconds: list[float]) -> None:
    """After the first step at most 0.2 s each; the largest may be late on a busy machine."""
    assert statistics.median(seconds[1:]) < 0.2
    assert max(seconds[1:]) < 2
    assert seconds[0] < 5


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("fault", ["pause", "kill"])
def test_a_trainer_whose_daemon_is_lost_goes_on(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Stopped or killed in the middle of a job: little is lost and it is said once."""
    with (
        LocalDaemon(config=PATIENT) as daemon,
        pair(daemon, LAYOUT, LAYOUT, stale_seconds=1.0) as (trainer, engine),
    ):
        report, _memory = refit(trainer, engine, 1)
        assert report.committed == ["r0"]
        getattr(daemon, fault)()
        with caplog.at_level(logging.WARNING, "refitd.hook"):
            assert_cheap(step_seconds(trainer, 2))
        assert len(warnings(caplog)) == 1
        assert warnings(caplog)[0].startswith("trainer/run0/0 goes on without refitd: ")
        assert engine.publication == (report.generation, report.revision)


def test_a_trainer_without_any_daemon_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody ever listened at the socket."""
    with (
        caplog.at_level(logging.WARNING, "refitd.hook"),
        connect_trainer("job", "run", 0, 1, str(tmp_path / "none.sock")) as trainer,
    ):
        trainer.register(LAYOUT)
        assert_cheap(step_seconds(trainer, 1))
        report = trainer.publish(99, {"w": weights(0)}).committed(timeout=30)
    assert (report.committed, report.step, report.closed) == ([], 99, "no daemon")
    assert len(warnings(caplog)) == 1


@pytest.fixture
def lasting_daemon() -> Iterator[LocalDaemon]:
    """A daemon whose records outlive it."""
    etcd = spawn_etcd(prefer="distro")
    try:
        with LocalDaemon(etcd.url, config={"timeouts.offer": 60.0}) as daemon:
            yield daemon
    finally:
        etcd.stop()


def test_a_trainer_comes_back_to_a_daemon_that_comes_back(lasting_daemon: LocalDaemon) -> None:
    """After a kill and a restart of the daemon the same trainer and engine commit again, unasked."""
    with pair(lasting_daemon, LAYOUT, LAYOUT) as (trainer, engine):
        first, _memory = refit(trainer, engine, 1)
        lasting_daemon.kill()
        assert trainer.publish(2, {"w": weights(2)}).committed(timeout=30).committed == []
        lasting_daemon.start()
        deadline = time.monotonic() + 40
        while not trainer.client.advance(time.monotonic() + 0.1):
            assert time.monotonic() < deadline
        memory = np.zeros((4, 6), np.float32)
        offer = trainer.publish(3, {"w": weights(3)})
        take(engine, memory)
        second = offer.committed(timeout=60)
    assert (first.committed, second.committed, second.step) == (["r0"], ["r0"], 3)
    assert np.array_equal(memory, weights(3))


@contextlib.contextmanager
def trainer_process(daemon: LocalDaemon, job: str, run: str, step: int) -> Iterator[subprocess.Popen[bytes]]:
    program = Path(__file__).with_name("trainer_process.py")
    process = subprocess.Popen([sys.executable, str(program), daemon.socket, job, run, str(step)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_restarted_trainer_opens_a_generation_and_its_engine_follows(daemon: LocalDaemon) -> None:
    """Killed at step 10,000 or later, restarted from step 4 under a new run: the step goes back, the generation up."""
    job, memory = new_job(), np.zeros((4, 6), np.float32)
    with connect_engine(job, "r0", 0, 1, daemon.socket) as engine:
        engine.register(LAYOUT)
        with trainer_process(daemon, job, "before", 10_000) as trainer:
            first = take(engine, memory)
            assert np.array_equal(memory, weights(first.step))
            trainer.kill()
        served = engine.publication
        with trainer_process(daemon, job, "after", 4):
            second = take(engine, memory)
            while second.generation == 1:  # what the first run had still offered when it died
                second = take(engine, memory)
        assert np.array_equal(memory, weights(second.step))
        shown = daemon.status()["jobs"][job]
    assert (first.generation, second.generation) == (1, 2)
    assert first.step >= 10_000
    assert 4 <= second.step < 10_000
    assert served is not None
    assert (second.generation, second.revision) > served
    assert engine.step == second.step
    assert shown["generation"] == 2
    assert shown["replicas"][0]["publication"][0] == 2
