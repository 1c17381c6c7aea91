"""An engine that is told to receive while nobody sends (case J4): never a success without a transfer."""

from __future__ import annotations

import numpy as np
import pytest
from e2e_refit import WHOLE, new_job, pair, refit, still_good, weights

from refitd import ReceiveFailed, Ticket, connect_engine
from refitd.testing import LocalDaemon, split_layout, wait_until

LAYOUT = split_layout(WHOLE, 0, 1)


def test_without_a_trainer_a_receive_times_out(daemon: LocalDaemon) -> None:
    """Nothing was ever published: an error, dirty, and no version."""
    job, memory = new_job(), np.full((4, 6), 7, np.float32)
    with connect_engine(job, "r0", 0, 1, daemon.socket) as engine:
        engine.register(LAYOUT)
        wait_until(lambda: [r for r in daemon.status()["jobs"][job]["ranks"] if r["mover"]], "a mover", 30)
        ticket = Ticket("receive", job, "r0", 1, 1 << 40, 5, 1)
        with pytest.raises(ReceiveFailed, match="no commit came within the timeout"):
            engine.receive(ticket, {"w": memory}, timeout=1.5)
        assert (engine.dirty, engine.publication, engine.step) == (True, None, None)
    assert np.array_equal(memory, np.full((4, 6), 7))
    still_good(daemon)


def test_a_trainer_that_publishes_nothing_more_leaves_the_version_unchanged(daemon: LocalDaemon) -> None:
    """After a good refit a forged ticket for a later publication times out; dirty, same version, and then it heals."""
    job = new_job()
    with pair(daemon, LAYOUT, LAYOUT, job) as (trainer, engine):
        report, memory = refit(trainer, engine, 1)
        served = (report.generation, report.revision)
        ticket = Ticket("receive", job, "r0", 1, report.revision + (1 << 40), 2, 1)
        with pytest.raises(ReceiveFailed, match="no commit came within the timeout"):
            engine.receive(ticket, {"w": memory}, timeout=1.5)
        assert (engine.dirty, engine.publication, engine.step) == (True, served, 1)
        assert np.array_equal(memory, weights(1))
        report, memory = refit(trainer, engine, 2)
        assert (engine.dirty, engine.publication) == (False, (report.generation, report.revision))
        assert np.array_equal(memory, weights(2))
