"""``refitd limit`` from end to end: a refit between two ranks that speak over the network, through real movers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from refitd import connect_engine, connect_trainer
from refitd.cli import main
from refitd.hook.engine import Engine
from refitd.hook.trainer import Trainer
from refitd.testing import LocalDaemon, split_layout

SHAPE = (2048, 1024)
NBYTES = 8 * 1024 * 1024
LAYOUT = split_layout({"w": (SHAPE, "float32")}, 0, 1)


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(links="network", config={"timeouts.offer": 60.0, "timeouts.progress": 3.0}) as running:
        yield running


def refit(daemon: LocalDaemon, trainer: Trainer, engine: Engine, step: int) -> tuple[float, int]:
    """Seconds of a refit, and what it counted at the sockets."""
    before = daemon.status()["last_refit"].get("network_bytes", 0)
    memory = np.zeros(SHAPE, np.float32)
    began = time.monotonic()
    offer = trainer.publish(step, {"w": np.full(SHAPE, step, np.float32)})
    ticket = engine.pending(wait=60.0)
    assert ticket is not None
    engine.receive(ticket, {"w": memory}, timeout=60.0)
    seconds = time.monotonic() - began
    assert offer.committed(timeout=60.0).committed == ["r0"]
    assert np.array_equal(memory, np.full(SHAPE, step, np.float32))
    return seconds, daemon.status()["last_refit"]["network_bytes"] - before


def test_a_limit_slows_refits_down_and_none_frees_them(daemon: LocalDaemon) -> None:
    """At 1 MB/s eight MiB take eight seconds and cost no attempt, with a progress deadline of three; then as before."""
    with (
        connect_trainer("capped", "run0", 0, 1, daemon.socket) as trainer,
        connect_engine("capped", "r0", 0, 1, daemon.socket) as engine,
    ):
        trainer.plan_seconds = 60.0
        trainer.client._stale_seconds = 10.0  # of the daemon's heartbeat, on a busy machine
        trainer.register(LAYOUT)
        engine.register(LAYOUT)
        refit(daemon, trainer, engine, 1)
        token = daemon.status()["jobs"]["capped"]["lanes"][0]["token"]
        assert main(["limit", "capped", "1MB/s", "--socket", daemon.socket]) == 0
        seconds, counted = refit(daemon, trainer, engine, 2)
        assert counted == NBYTES
        assert (NBYTES / 1e6 - 0.1) * 0.95 <= seconds <= NBYTES / 1e6 * 1.5 + 10.0
        assert main(["limit", "capped", "none", "--socket", daemon.socket]) == 0
        free, counted = refit(daemon, trainer, engine, 3)
        assert counted == NBYTES
        assert free < seconds - 2.0
        assert daemon.status()["jobs"]["capped"]["lanes"][0]["token"] == token
