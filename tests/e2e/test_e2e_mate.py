"""A rank that comes anew by itself, while nothing new is published: whoever calls it, it must be called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from e2e_refit import PATIENT, receive_all

import refitd
from refitd.errors import ReceiveFailed
from refitd.hook.engine import Engine
from refitd.hook.memory import shared_empty
from refitd.hook.messages import RELEASED, Ticket
from refitd.hook.offer import Offer
from refitd.hook.trainer import Trainer
from refitd.testing import LocalDaemon, split_layout, wait_until

SPEC = {"w": ((64, 64), "float32")}
HALF, WHOLE = 64 * 64 // 2, 64 * 64
SECONDS = 60.0


def connect(daemon: LocalDaemon, replica: str, rank: int, world: int, mode: str = "in_place") -> Engine:
    engine = refitd.connect_engine("job", replica, rank, world, daemon.socket)
    engine.register(split_layout(SPEC, rank, world), mode=mode)
    return engine


def trains(stack: ExitStack, daemon: LocalDaemon) -> Trainer:
    """A trainer of one rank."""
    trainer = stack.enter_context(refitd.connect_trainer("job", "run", 0, 1, daemon.socket))
    trainer.register(split_layout(SPEC, 0, 1))
    return trainer


def sevens(trainer: Trainer) -> Offer:
    """Offers step 1."""
    return trainer.publish(1, {"w": torch.full((WHOLE,), 7.0)})


def receive(engines: list[Engine], memory: list[torch.Tensor]) -> int:
    """The step that all of a replica's ranks have received."""
    return receive_all(engines, [{"w": weights} for weights in memory]).step


def apply(engines: list[Engine], memory: list[torch.Tensor]) -> Ticket:
    """The same with shadows: all switch to a publication of sevens."""
    ticket = engines[0].pending(wait=SECONDS)
    assert ticket is not None, "the lead has no ticket"
    for engine, weights in zip(engines, memory, strict=True):
        engine.apply(ticket, {"w": weights})
    assert [sorted(set(weights.tolist())) for weights in memory] == [[7.0]] * len(engines)
    assert [engine.publication for engine in engines] == [(ticket.generation, ticket.revision)] * len(engines)
    return ticket


def lanes(daemon: LocalDaemon) -> dict[str, int]:
    """How many members each replica's lane has."""
    found = daemon.status()["jobs"].get("job", {}).get("lanes", [])
    return {lane["replica"]: len(lane["members"]) for lane in found}


def test_a_mate_that_comes_anew_is_called_by_its_lead_in_silence() -> None:
    """The lead holds the publication and would not be asked for anything; the other replica has it, the trainer not."""
    with ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon(config=PATIENT))
        trainer = trains(stack, daemon)
        pair = [stack.enter_context(connect(daemon, "r0", rank, 2)) for rank in range(2)]
        other = stack.enter_context(connect(daemon, "r1", 0, 1))
        wait_until(lambda: lanes(daemon) == {"r0": 2, "r1": 1}, "both lanes are made", SECONDS)
        memory, whole = [shared_empty((HALF,), torch.float32) for _ in range(2)], shared_empty((WHOLE,), torch.float32)
        offer = sevens(trainer)
        assert receive(pair, memory) == 1
        assert receive([other], [whole]) == 1
        assert offer.released(SECONDS) is RELEASED
        trainer.close()
        pair[1].close()
        memory[1].zero_()
        pair[1] = stack.enter_context(connect(daemon, "r0", 1, 2))
        assert receive(pair, memory) == 1
        assert [sorted(set(weights.tolist())) for weights in memory] == [[7.0], [7.0]]
        assert [engine.dirty for engine in pair] == [False, False]


@pytest.mark.parametrize("late", [0, 1], ids=["the lead", "a mate"])
def test_who_is_in_a_receive_leaves_it_for_a_rank_that_comes_anew(late: int) -> None:
    """The lead called its mate to that receive, and one of them is gone before it lends: the other would wait for a
    rank that nobody calls. It leaves, and the lead is given the ticket once more."""
    with ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon(config=PATIENT))
        trainer = trains(stack, daemon)
        pair = [stack.enter_context(connect(daemon, "r0", rank, 2)) for rank in range(2)]
        wait_until(lambda: lanes(daemon) == {"r0": 2}, "the lane is made", SECONDS)
        memory = [shared_empty((HALF,), torch.float32) for _ in range(2)]
        sevens(trainer)
        ticket = pair[0].pending(wait=SECONDS)
        assert ticket is not None
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(pair[1 - late].receive, ticket, {"w": memory[1 - late]}, SECONDS)
            wait_until(lambda: pair[1 - late].dirty, "one of the two is in the receive", SECONDS)
            pair[late].close()
            pair[late] = stack.enter_context(connect(daemon, "r0", late, 2))
            with pytest.raises(ReceiveFailed, match=f"engine/r0/{late} came anew and was not called to this receive"):
                waits.result()
        assert receive(pair, memory) == 1
        assert [sorted(set(weights.tolist())) for weights in memory] == [[7.0], [7.0]]
        assert [engine.dirty for engine in pair] == [False, False]


def test_a_shadow_that_comes_anew_is_called_by_its_lead_in_silence() -> None:
    """The lead has switched to what that one's shadow holds; it gets a ticket to switch once more, with its mate."""
    with ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon(config=PATIENT))
        trainer = trains(stack, daemon)
        pair = [stack.enter_context(connect(daemon, "r0", rank, 2, "host_shadow")) for rank in range(2)]
        other = stack.enter_context(connect(daemon, "r1", 0, 1))
        wait_until(lambda: lanes(daemon) == {"r0": 2, "r1": 1}, "both lanes are made", SECONDS)
        memory = [torch.zeros(HALF) for _ in range(2)]
        sevens(trainer)
        first = apply(pair, memory)
        assert receive([other], [shared_empty((WHOLE,), torch.float32)]) == 1
        pair[1].close()
        memory[1].zero_()
        pair[1] = stack.enter_context(connect(daemon, "r0", 1, 2, "host_shadow"))
        second = apply(pair, memory)
        assert (second.generation, second.revision) == (first.generation, first.revision)
        assert second.token > first.token
        assert pair[0].pending() is None


def test_all_ranks_come_back_to_a_daemon_that_was_restarted() -> None:
    """By asking between two steps, as each does; the replica would have no lane otherwise."""
    with ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon(config=PATIENT))
        trainer = trains(stack, daemon)
        pair = [stack.enter_context(connect(daemon, "r0", rank, 2)) for rank in range(2)]
        wait_until(lambda: lanes(daemon) == {"r0": 2}, "the lane is made", SECONDS)
        daemon.kill()
        daemon.start()

        def back() -> bool:
            assert [engine.pending() for engine in pair] == [None, None]
            ranks = daemon.status()["jobs"].get("job", {}).get("ranks", [])
            return [rank["key"] for rank in ranks] == ["engine/r0/0", "engine/r0/1"]

        wait_until(back, "both ranks are back", SECONDS)
        memory = [shared_empty((HALF,), torch.float32) for _ in range(2)]
        trainer.plan_seconds = SECONDS
        wait_until(lambda: sevens(trainer).released(0.0) is RELEASED, "the trainer is back", SECONDS)
        assert receive(pair, memory) == 1
        assert [sorted(set(weights.tolist())) for weights in memory] == [[7.0], [7.0]]
