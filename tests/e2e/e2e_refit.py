"""One trainer and one engine in this process, and a whole refit between them through a real daemon."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from refitd import Report, Ticket, connect_engine, connect_trainer
from refitd.hook.engine import Engine
from refitd.hook.trainer import Trainer
from refitd.layout import Layout
from refitd.testing import LocalDaemon, split_layout

Array = np.ndarray[Any, Any]
Spec = Mapping[str, tuple[Sequence[int], str]]
WHOLE: Spec = {"w": ((4, 6), "float32")}
SECONDS = 60.0
# A busy machine starts movers slowly; what is tested here is never how soon an offer is given up.
PATIENT: Mapping[str, object] = {"timeouts.offer": 60.0}
_jobs = itertools.count()


def new_job() -> str:
    """A job of its own for a test that shares a daemon."""
    return f"job{next(_jobs)}"


@contextlib.contextmanager
def pair(
    daemon: LocalDaemon,
    source: Layout,
    destination: Layout,
    job: str = "",
    path: str = "auto",
    *,
    stale_seconds: float = 10.0,
) -> Iterator[tuple[Trainer, Engine]]:
    """A trainer and an engine (replica r0), both registered. On a busy machine a daemon's heartbeat may be late."""
    job = job or new_job()
    with (
        connect_trainer(job, "run0", 0, 1, daemon.socket, path) as trainer,
        connect_engine(job, "r0", 0, 1, daemon.socket, path) as engine,
    ):
        trainer.plan_seconds = SECONDS
        trainer.client._stale_seconds = engine.client._stale_seconds = stale_seconds
        trainer.register(source)
        engine.register(destination)
        yield trainer, engine


def weights(value: float, shape: Sequence[int] = (4, 6)) -> Array:
    return np.arange(value, value + np.prod(shape), dtype=np.float32).reshape(shape)


def take(engine: Engine, memory: Array) -> Ticket:
    """Wait for the ticket of the next refit and receive it into ``memory``."""
    ticket = engine.pending(wait=SECONDS)
    assert ticket is not None
    return engine.receive(ticket, {"w": memory}, timeout=SECONDS)


def receive_all(engines: Sequence[Engine], memory: Sequence[Mapping[str, Any]]) -> Ticket:
    """As an engine does: the lead's ticket goes to every rank. The ticket that all have committed."""
    ticket = engines[0].pending(wait=SECONDS)
    assert ticket is not None, "the lead has no ticket"
    with ThreadPoolExecutor(len(engines)) as pool:
        (done,) = set(pool.map(lambda engine, mine: engine.receive(ticket, mine, SECONDS), engines, memory))
    return done


def refit(trainer: Trainer, engine: Engine, step: int) -> tuple[Report, Array]:
    """One step: what the trainer is told of it, and what the engine has then."""
    memory = np.zeros((4, 6), np.float32)
    offer = trainer.publish(step, {"w": weights(step)})
    take(engine, memory)
    return offer.committed(timeout=SECONDS), memory


def still_good(daemon: LocalDaemon) -> None:
    """The daemon serves strangers as before."""
    pid = daemon.pid
    with pair(daemon, split_layout(WHOLE, 0, 1), split_layout(WHOLE, 0, 1)) as (trainer, engine):
        report, memory = refit(trainer, engine, 3)
    assert report.committed == ["r0"]
    assert np.array_equal(memory, weights(3))
    assert (daemon.pid, daemon.returncode) == (pid, None)
