"""A process hangs, and its scheduler starts the same rank on another node: the later one speaks for it from then on."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from e2e_refit import receive_all

import refitd
from refitd.hook.engine import Engine
from refitd.testing import LocalDaemon, split_layout, wait_until

COUNT, SECONDS = 4096, 60.0
LAYOUT = split_layout({"w": ((64, 64), "float32")}, 0, 1)
REFUSAL = "rank: expected engine/r0/0 to be free, got a later process speaks for it on a"


def joins(stack: ExitStack, daemon: LocalDaemon) -> Engine:
    engine = stack.enter_context(refitd.connect_engine("job", "r0", 0, 1, daemon.socket))
    engine.register(LAYOUT)
    return engine


def ranks(daemon: LocalDaemon) -> list[str]:
    return [rank["key"] for rank in daemon.status()["jobs"].get("job", {}).get("ranks", [])]


def test_the_later_process_of_a_rank_takes_its_place_whichever_node_joined_first(etcd: str) -> None:
    """The lane goes on with it at once; the one that hung is told why nobody calls it, by its next daemon too."""
    with ExitStack() as stack:
        a, b = (stack.enter_context(LocalDaemon(etcd, name=name)) for name in "ab")
        trainer = stack.enter_context(refitd.connect_trainer("job", "run", 0, 1, a.socket))
        trainer.register(LAYOUT)
        wait_until(lambda: ranks(a) == ["trainer/run/0"], "node a to join", SECONDS)
        hung = joins(stack, b)
        wait_until(lambda: a.status()["jobs"]["job"]["lanes"], "the lane to be made", SECONDS)
        fresh, weights = joins(stack, a), torch.zeros(COUNT)
        wait_until(lambda: ranks(b) == [], "node b to give the rank up", SECONDS)
        offer = trainer.publish(1, {"w": torch.full((COUNT,), 7.0)})
        receive_all([fresh], [{"w": weights}])
        assert offer.released(SECONDS) == refitd.RELEASED
        assert offer.committed(SECONDS).committed == ["r0"]
        assert set(weights.tolist()) == {7.0}
        for daemon in (b, b):
            wait_until(lambda: hung.pending() is None and hung.client.failure == REFUSAL, "the refusal", SECONDS)
            daemon.kill()
            daemon.start()
        assert ranks(b) == []
        assert ranks(a) == ["engine/r0/0", "trainer/run/0"]
