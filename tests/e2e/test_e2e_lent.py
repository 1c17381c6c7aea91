"""What neighbours may read of an in_place engine: what it serves, also from a daemon that came anew; nothing once its
memory was released."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from e2e_refit import PATIENT, receive_all

import refitd
from refitd.hook.engine import Engine
from refitd.hook.memory import shared_empty
from refitd.testing import LocalDaemon, split_layout, wait_until

COUNT, SECONDS = 4096, 60.0
LAYOUT = split_layout({"w": ((64, 64), "float32")}, 0, 1)
JOB = {**PATIENT, "job.ttl": 60}


def joins(stack: ExitStack, daemon: LocalDaemon, replica: str, rank: int = 0, world: int = 1) -> Engine:
    engine = stack.enter_context(refitd.connect_engine("job", replica, rank, world, daemon.socket))
    engine.register(LAYOUT)
    return engine


def receive(engines: list[Engine], weights: list[torch.Tensor]) -> None:
    receive_all(engines, [{"w": memory} for memory in weights])


def publish_sevens(daemon: LocalDaemon, *replicas: tuple[list[Engine], list[torch.Tensor]]) -> None:
    """A trainer's only publication; it takes its memory back and goes."""
    with refitd.connect_trainer("job", "run", 0, 1, daemon.socket) as trainer:
        trainer.register(LAYOUT)
        made = len(replicas)
        wait_until(lambda: len(daemon.status()["jobs"]["job"]["lanes"]) == made, "the lanes are made", SECONDS)
        offer = trainer.publish(1, {"w": torch.full((COUNT,), 7.0)})
        with ThreadPoolExecutor(made) as pool:
            for done in [pool.submit(receive, *replica) for replica in replicas]:
                done.result()
        assert offer.released(timeout=SECONDS) == refitd.RELEASED


def lends(daemon: LocalDaemon, replica: str) -> bool | None:
    found = daemon.status()["jobs"].get("job", {}).get("ranks", [])
    return {rank["key"]: rank["lends"] for rank in found}.get(f"engine/{replica}/0")


@pytest.mark.parametrize("shared", [True, False], ids=["arena", "staged"])
def test_a_joiner_reads_from_an_engine_whose_daemon_came_anew(etcd: str, shared: bool) -> None:
    """The trainers have gone: nobody else has the publication, and the next may be hours away."""
    with ExitStack() as stack:
        a, b = (stack.enter_context(LocalDaemon(etcd, name=name, config=JOB)) for name in "ab")
        holder, weights = joins(stack, a, "r0"), shared_empty((COUNT,), torch.float32) if shared else torch.zeros(COUNT)
        publish_sevens(a, ([holder], [weights]))
        a.kill()
        a.start()
        wait_until(lambda: holder.pending() is None and lends(a, "r0"), "the engine to lend again", SECONDS)
        joiner, joined = joins(stack, b, "r1"), torch.zeros(COUNT)
        receive([joiner], [joined])
        assert set(joined.tolist()) == {7.0}
        assert joiner.publication == holder.publication


def test_nobody_reads_memory_that_was_released(etcd: str) -> None:
    """Its owner has written something else there since; only the next publication brings the joiner weights."""
    with ExitStack() as stack:
        a, b = (stack.enter_context(LocalDaemon(etcd, name=name, config=JOB)) for name in "ab")
        holder, weights = joins(stack, a, "r0"), shared_empty((COUNT,), torch.float32)
        publish_sevens(a, ([holder], [weights]))
        assert lends(a, "r0") is True
        holder.release()
        weights.fill_(13.0)
        assert lends(a, "r0") is False
        joiner, joined = joins(stack, b, "r1"), torch.zeros(COUNT)
        assert joiner.pending(wait=3.0) is None, "a ticket for weights that nobody lends"
        assert joined.abs().sum() == 0


def test_a_rank_that_released_its_memory_is_asked_for_it_before_a_mate_is_sent_anything(etcd: str) -> None:
    """Weights that both have on one node enter once and are spread there: the rank that has them spreads them."""
    with ExitStack() as stack:
        a, b = (stack.enter_context(LocalDaemon(etcd, name=name, config=JOB)) for name in "ab")
        lead, mate = (joins(stack, a, "r0", rank, 2) for rank in range(2))
        other, memory = joins(stack, b, "r1"), [shared_empty((COUNT,), torch.float32) for _ in range(4)]
        publish_sevens(a, ([lead, mate], memory[:2]), ([other], memory[2:3]))
        lead.release()
        mate.close()
        anew = joins(stack, a, "r0", 1, 2)
        receive([lead, anew], [memory[0], memory[3]])
        assert set(memory[0].tolist()) == set(memory[3].tolist()) == {7.0}
        assert (anew.publication, lead.publication) == (other.publication, other.publication)
        assert lends(a, "r0") is True


def test_ranks_that_change_places_hold_nothing(etcd: str) -> None:
    """Each node has verified the bytes of a rank that now lives on the other one, in a new process with empty memory:
    what a node held counts for its own ranks alone, in the life in which they held it."""
    with ExitStack() as stack:
        a, b = (stack.enter_context(LocalDaemon(etcd, name=name, config=JOB)) for name in "ab")
        pair = [joins(stack, daemon, "r0", rank, 2) for rank, daemon in enumerate((a, b))]
        other, memory = joins(stack, b, "r1"), [shared_empty((COUNT,), torch.float32) for _ in range(3)]
        publish_sevens(a, (pair, memory[:2]), ([other], memory[2:]))
        for engine in pair:
            engine.close()
        swapped = [joins(stack, daemon, "r0", rank, 2) for rank, daemon in enumerate((b, a))]
        fresh = [shared_empty((COUNT,), torch.float32) for _ in range(2)]
        receive(swapped, fresh)
        assert [set(tensor.tolist()) for tensor in fresh] == [{7.0}] * 2
        assert [engine.publication for engine in swapped] == [other.publication] * 2
