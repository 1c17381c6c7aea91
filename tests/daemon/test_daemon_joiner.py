"""A joiner that is slower than the publications, with real daemons and an etcd."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from refitd import connect_engine, connect_trainer, shared_empty
from refitd.errors import RefitdError
from refitd.hook.admin import ask
from refitd.hook.engine import Engine
from refitd.hook.trainer import Trainer
from refitd.store import spawn_etcd
from refitd.testing import LocalDaemon, split_layout, wait_until

SECONDS, JOB = 60.0, "slow"
CONFIG: dict[str, object] = {"job.max_dirty": 2}  # nobody is kept back by the joiner's being without weights
SHAPE = (1250, 1000)
LAYOUT = split_layout({"w": (SHAPE, "float32")}, 0, 1)
RATE = 1_000_000  # bytes a second: five seconds for all of it
EVERY = 1.0


def take_on(engine: Engine, stop: threading.Event, seen: list[float]) -> None:
    """Receive every refit; what each brought, which is one number all over or a mix."""
    memory = np.zeros(SHAPE, np.float32)
    while not stop.is_set():
        with contextlib.suppress(RefitdError):
            if (ticket := engine.pending(wait=0.1)) is not None:
                engine.receive(ticket, {"w": memory}, timeout=SECONDS)
                seen.append(float(memory[0, 0]) if np.all(memory == memory[0, 0]) else float("nan"))


def publish_on(trainer: Trainer, stop: threading.Event, steps: list[int]) -> None:
    """A step a second; the memory is the trainer's own again after each, whoever still reads."""
    memory = shared_empty(SHAPE, "float32")
    while not stop.is_set():
        step = len(steps) + 1
        memory[:] = step
        trainer.publish(step, {"w": memory}).released(timeout=EVERY)
        steps.append(step)
        stop.wait(EVERY)


@contextlib.contextmanager
def running(stop: threading.Event, *work: tuple[Any, ...]) -> Iterator[None]:
    threads = [threading.Thread(target=target, args=arguments) for target, *arguments in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS)


def replica(daemon: LocalDaemon, name: str) -> dict[str, Any]:
    return {r["name"]: r for r in daemon.status()["jobs"][JOB]["replicas"]}.get(name, {})


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_joiner_throttled_to_five_seconds_becomes_ready_while_publications_come_every_second() -> None:
    """It reads from a replica beside the trainer that would go on each second, and is waited for; once it has caught up
    it follows."""
    stop, steps = threading.Event(), list[int]()
    first, joined = list[float](), list[float]()
    with contextlib.ExitStack() as stack:
        etcd = spawn_etcd(prefer="distro")
        stack.callback(etcd.stop)
        t, b = (stack.enter_context(LocalDaemon(etcd.url, name=name, config=CONFIG)) for name in "tb")
        trainer = stack.enter_context(connect_trainer(JOB, "run0", 0, 1, t.socket))
        holder = stack.enter_context(connect_engine(JOB, "ra", 0, 1, t.socket))
        trainer.register(LAYOUT)
        holder.register(LAYOUT)
        stack.enter_context(running(stop, (publish_on, trainer, stop, steps), (take_on, holder, stop, first)))
        wait_until(lambda: len(first) >= 2, "refits beside the trainer", SECONDS)
        ask("limit", t.socket, job=JOB, rate=RATE)
        joiner = stack.enter_context(connect_engine(JOB, "rb", 0, 1, b.socket))
        joiner.register(LAYOUT)
        began = len(steps)
        stack.enter_context(running(stop, (take_on, joiner, stop, joined)))
        wait_until(lambda: replica(b, "rb"), "the joiner to be seen", SECONDS)
        assert replica(b, "rb")["ready"] is False
        wait_until(lambda: joined, "the catch-up", SECONDS)
        assert len(steps) - began >= 3, "publications went on"
        ask("limit", t.socket, job=JOB, rate=None)
        wait_until(lambda: replica(b, "rb")["ready"], "the joiner to be ready", SECONDS)
        caught = len(steps)
        wait_until(lambda: len(steps) > caught and joined[-1] > caught, "the joiner to follow", SECONDS)
    assert not any(np.isnan([*first, *joined])), "I1"
    assert joined == sorted(joined), "I3"
