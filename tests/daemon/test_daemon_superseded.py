"""A lead process that asks with a ticket of the one before it, while its mates wait for orders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from refitd import connect_engine, connect_trainer
from refitd.errors import ReceiveFailed
from refitd.hook.engine import Engine
from refitd.hook.messages import Ticket
from refitd.testing import LocalDaemon, split_layout

SECONDS = 60.0
SHAPE, HALF = (8, 4), (4, 4)


@contextlib.contextmanager
def engine(daemon: LocalDaemon, rank: int) -> Iterator[Engine]:
    with connect_engine("job", "r0", rank, 2, daemon.socket) as found:
        found.register(split_layout({"w": (SHAPE, "float32")}, rank, 2))
        yield found


def ticket_of(lead: Engine) -> Ticket:
    found = lead.pending(wait=SECONDS)
    assert found is not None
    return found


def take(ticket: Ticket, *engines: Engine) -> list[float]:
    """All of them receive, as one; a number of each one's new weights."""

    def receive(each: Engine) -> float:
        memory = np.zeros(HALF, np.float32)
        assert each.receive(ticket, {"w": memory}, timeout=SECONDS).revision == ticket.revision
        return float(memory.min())

    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(receive, engines))


def test_a_lead_with_the_ticket_of_its_predecessor_is_told_to_take_the_next() -> None:
    """It does not wait until its time is over: the receive fails at once with the reason, and the next one commits."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon(config={"timeouts.offer": SECONDS}))
        trainer = stack.enter_context(connect_trainer("job", "run0", 0, 1, daemon.socket))
        trainer.plan_seconds = SECONDS
        trainer.register(split_layout({"w": (SHAPE, "float32")}, 0, 1))
        worker = stack.enter_context(engine(daemon, 1))
        with engine(daemon, 0) as first:
            trainer.publish(1, {"w": np.full(SHAPE, 1, np.float32)})
            old = ticket_of(first)
            assert take(old, first, worker) == [1.0, 1.0]
        trainer.publish(2, {"w": np.full(SHAPE, 2, np.float32)})
        with engine(daemon, 0) as lead:
            began = time.monotonic()
            with pytest.raises(ReceiveFailed, match=r"superseded: .*take its ticket"):
                lead.receive(old, {"w": np.zeros(HALF, np.float32)}, timeout=SECONDS)
            assert time.monotonic() - began < SECONDS
            assert take(ticket_of(lead), lead, worker) == [2.0, 2.0]
