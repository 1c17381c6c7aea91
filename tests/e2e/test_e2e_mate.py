"""A rank that comes anew beside a lead that serves already, while nothing new is published."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

import refitd
from refitd.hook.engine import Engine
from refitd.hook.memory import shared_empty
from refitd.hook.messages import RELEASED
from refitd.testing import LocalDaemon, split_layout, wait_until

SPEC = {"w": ((64, 64), "float32")}
HALF, WHOLE = 64 * 64 // 2, 64 * 64
SECONDS = 60.0


def connect(daemon: LocalDaemon, replica: str, rank: int, world: int) -> Engine:
    engine = refitd.connect_engine("job", replica, rank, world, daemon.socket)
    engine.register(split_layout(SPEC, rank, world), mode="in_place")
    return engine


def receive(engines: list[Engine], memory: list[torch.Tensor]) -> int:
    """As an engine does: the lead's ticket goes to every rank. Returns the step."""
    ticket = engines[0].pending(wait=SECONDS)
    assert ticket is not None, "the lead has no ticket"
    with ThreadPoolExecutor(len(engines)) as pool:
        jobs = [
            pool.submit(engine.receive, ticket, {"w": weights}, SECONDS)
            for engine, weights in zip(engines, memory, strict=True)
        ]
        return {job.result().step for job in jobs}.pop()


def lanes(daemon: LocalDaemon) -> dict[str, int]:
    """How many members each replica's lane has."""
    found = daemon.status()["jobs"].get("job", {}).get("lanes", [])
    return {lane["replica"]: len(lane["members"]) for lane in found}


def test_a_mate_that_comes_anew_is_called_by_its_lead_in_silence() -> None:
    """The lead holds the publication and would not be asked for anything; the other replica has it, the trainer not."""
    with ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon())
        trainer = stack.enter_context(refitd.connect_trainer("job", "run", 0, 1, daemon.socket))
        trainer.register(split_layout(SPEC, 0, 1))
        pair = [stack.enter_context(connect(daemon, "r0", rank, 2)) for rank in range(2)]
        other = stack.enter_context(connect(daemon, "r1", 0, 1))
        wait_until(lambda: lanes(daemon) == {"r0": 2, "r1": 1}, "both lanes are made", SECONDS)
        memory, whole = [shared_empty((HALF,), torch.float32) for _ in range(2)], shared_empty((WHOLE,), torch.float32)
        offer = trainer.publish(1, {"w": torch.full((WHOLE,), 7.0)})
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
