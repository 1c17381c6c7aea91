"""A trainer of a run that is past: it slept, another run began in its place, and it wakes and publishes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from refitd import RELEASED, connect_engine, connect_trainer
from refitd.daemon.loans import Loans
from refitd.epoch.codec import encode
from refitd.epoch.records import Generation, Offer
from refitd.epoch.view import View
from refitd.store import ModRevision
from refitd.testing import LocalDaemon, split_layout

SECONDS, JOB = 60.0, "old"
LAYOUT = split_layout({"w": ((64,), "float32")}, 0, 1)
SLEEPER = """
import json, sys
from refitd import connect_trainer, shared_empty
from refitd.testing import split_layout
trainer = connect_trainer("old", "run0", 0, 1, sys.argv[1])
trainer.plan_seconds = 60.0
trainer.register(split_layout({"w": ((64,), "float32")}, 0, 1))
memory = shared_empty((64,), "float32")  # read where it is: a copy would be RELEASED at once
for line in sys.stdin:
    memory[:] = int(line)
    offer = trainer.publish(int(line), {"w": memory})
    outcome = offer.released(timeout=60.0)
    report = offer.committed(timeout=60.0)
    print(json.dumps([str(outcome), offer.reason, report.closed]), flush=True)
"""


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(config={"timeouts.offer": SECONDS}) as found:
        yield found


@pytest.fixture
def sleeper(daemon: LocalDaemon) -> Iterator[subprocess.Popen[str]]:
    """A trainer process of run0 that publishes the steps it reads."""
    command = [sys.executable, "-c", SLEEPER, daemon.socket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def publish(sleeper: subprocess.Popen[str], step: int) -> None:
    assert sleeper.stdin is not None
    sleeper.stdin.write(f"{step}\n")
    sleeper.stdin.flush()


def told(sleeper: subprocess.Popen[str]) -> list[str]:
    assert sleeper.stdout is not None
    found: list[str] = json.loads(sleeper.stdout.readline())
    return found


def test_a_trainer_that_slept_through_the_end_of_its_run_is_refused(
    daemon: LocalDaemon, sleeper: subprocess.Popen[str]
) -> None:
    """SIGSTOP, a new run that commits, SIGCONT: its publish is SKIPPED at once with the reason, which the daemon logs;
    the engine stays at the new run's weights."""
    why = "a newer run has opened a generation"
    with connect_engine(JOB, "r0", 0, 1, daemon.socket) as engine:
        engine.register(LAYOUT)
        memory = np.zeros(64, np.float32)

        def take(step: int) -> None:
            ticket = engine.pending(wait=SECONDS)
            assert ticket is not None
            engine.receive(ticket, {"w": memory}, timeout=SECONDS)
            assert np.all(memory == step)

        publish(sleeper, 9)
        take(9)
        assert told(sleeper)[0] == "RELEASED"
        os.kill(sleeper.pid, signal.SIGSTOP)
        with connect_trainer(JOB, "run1", 0, 1, daemon.socket) as trainer:
            trainer.plan_seconds = SECONDS
            trainer.register(LAYOUT)
            offer = trainer.publish(3, {"w": np.full(64, 3, np.float32)})
            take(3)
            assert offer.released(timeout=SECONDS) is RELEASED
            served = engine.publication
            publish(sleeper, 10)
            os.kill(sleeper.pid, signal.SIGCONT)
            assert told(sleeper) == ["SKIPPED", why, f"it was never published: {why}"]
            assert (engine.pending(wait=0.3), engine.publication) == (None, served)
            assert served is not None
            assert served[0] == 2
    lines = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    skipped = [line for line in lines if line["event"] == "offer_skipped"]
    assert [(line["rank"], line["step"], line["reason"]) for line in skipped] == [("trainer/run0/0", 10, why)]


def loans(written: list[tuple[str, bytes, list[Any]]], *past: str) -> Loans:
    """Those of a node with one offer of run0, whose store refuses what is written."""
    view = View()
    view.put("generation", encode(Generation(1 + len(past), "run0" if not past else "run1", past)), 4, 7)

    async def write(key: str, data: bytes, expected: int, leased: bool, guards: list[Any]) -> bool:
        written.append((key, data, guards))
        return False

    offer = SimpleNamespace(offer=Offer("trainer/run0/0", "i", "run0", 1, 5))
    rank = SimpleNamespace(offer=offer, session=SimpleNamespace(group="run0"))
    agreement = SimpleNamespace(view=view, write=write, compare_path=lambda key: f"/{key}")
    job = SimpleNamespace(
        job=JOB, node="n", agreement=agreement, ranks={"trainer/run0/0": rank}, membership=SimpleNamespace(joined=True)
    )
    return Loans(job)  # type: ignore[arg-type]


def test_an_offer_is_written_only_under_the_generation_that_its_daemon_knows() -> None:
    """A daemon that slept too has a stale picture: the transaction refuses, and the reason is logged."""
    written: list[tuple[str, bytes, list[Any]]] = []
    with capture_logs() as logs:
        asyncio.run(loans(written).publish())
    assert [(key, guards) for key, _data, guards in written] == [("offers/n", [ModRevision("/generation", 7)])]
    assert b"run0" in written[0][1]
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("offers_refused", "the generation, or our record, has changed meanwhile")
    ]


def test_an_offer_of_a_past_run_is_not_written_at_all() -> None:
    """A daemon that knows of the new run keeps it to itself."""
    written: list[tuple[str, bytes, list[Any]]] = []
    asyncio.run(loans(written, "run0").publish())
    assert written == []
