"""Trainers in pipeline stages: each rank knows its own tensors only, and no other can stand in for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from e2e_refit import receive_all

import refitd
from refitd.hook.trainer import Trainer
from refitd.testing import LocalDaemon, split_layout, wait_until

SECONDS, COUNT = 60.0, 4096
STAGES = [{name: ((64, 64), "float32")} for name in ("first", "second")]
WHOLE = STAGES[0] | STAGES[1]
OFFER_SECONDS = 9.0  # who is silent may be left out once the store has answered for the lease's time and 2 s more
CONFIG: dict[str, object] = {
    "timeouts.offer": OFFER_SECONDS, "store.lease_ttl": 2, "store.keepalive": 0.5, "store.request_timeout": 1,
    "job.join_debounce": 0.1,
}  # fmt: skip


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(config=CONFIG) as running:
        yield running


def stage(stack: ExitStack, daemon: LocalDaemon, rank: int) -> Trainer:
    trainer = stack.enter_context(refitd.connect_trainer("job", "run", rank, 2, daemon.socket))
    trainer.register(split_layout(STAGES[rank], 0, 1))
    trainer.plan_seconds = OFFER_SECONDS
    return trainer


def weights(rank: int, value: float) -> dict[str, torch.Tensor]:
    """Where they are on loan: a copy would be released at once."""
    return {name: refitd.shared_empty((COUNT,), torch.float32).fill_(value) for name in STAGES[rank]}


def lanes(daemon: LocalDaemon) -> dict[str, tuple[str, str]]:
    """Stage and reason of each lane."""
    found = daemon.status()["jobs"].get("job", {}).get("lanes", [])
    return {lane["replica"]: (lane["stage"], lane["why"]) for lane in found}


def test_no_stage_is_left_out_of_a_publication(daemon: LocalDaemon) -> None:
    """A stage that does not offer a step contradicts nobody: without it there is nothing whole."""
    with ExitStack() as stack:
        engine = stack.enter_context(refitd.connect_engine("job", "r0", 0, 1, daemon.socket))
        engine.register(split_layout(WHOLE, 0, 1))
        memory = {name: torch.zeros(COUNT) for name in WHOLE}
        first = stage(stack, daemon, 0)
        second = stage(stack, daemon, 1)
        wait_until(lambda: lanes(daemon).get("r0", ("", ""))[0] == "idle", "a lane with both", SECONDS)
        alone = first.publish(2, weights(0, 2.0))
        assert alone.released(timeout=2 * OFFER_SECONDS) == refitd.SKIPPED
        closed = alone.committed(timeout=SECONDS).closed
        assert closed.partition(":")[0] == "it was never published"  # whoever of the two has lost patience first
        assert engine.pending() is None
        offers = [trainer.publish(3, weights(rank, 3.0 + rank)) for rank, trainer in enumerate((first, second))]
        assert receive_all([engine], [memory]).step == 3
        assert [offer.released(timeout=SECONDS) for offer in offers] == [refitd.RELEASED] * 2
        assert {name: set(tensor.tolist()) for name, tensor in memory.items()} == {"first": {3.0}, "second": {4.0}}


def test_a_lane_does_not_go_on_with_the_other_stages_alone(daemon: LocalDaemon) -> None:
    """A joiner that asks when a stage has gone: it waits, and is served by the next run."""
    with ExitStack() as stack:
        first, second = (stage(stack, daemon, rank) for rank in range(2))
        wait_until(lambda: daemon.status()["jobs"]["job"]["generation"] == 1, "the run to lead", SECONDS)
        second.close()
        engine = stack.enter_context(refitd.connect_engine("job", "r0", 0, 1, daemon.socket))
        engine.register(split_layout(WHOLE, 0, 1))
        assert engine.pending(wait=2.0) is None
        assert lanes(daemon).get("r0", ("", ""))[0] in ("", "gone")
        first.close()
        with refitd.connect_trainer("job", "next", 0, 1, daemon.socket) as trainer:
            trainer.register(split_layout(WHOLE, 0, 1))
            wait_until(lambda: lanes(daemon).get("r0", ("", ""))[0] == "idle", "a lane", SECONDS)
            offer = trainer.publish(1, {name: torch.full((COUNT,), 5.0) for name in WHOLE})
            memory = {name: torch.zeros(COUNT) for name in WHOLE}
            assert receive_all([engine], [memory]).step == 1
            assert offer.released(timeout=SECONDS) == refitd.RELEASED
        assert {name: set(tensor.tolist()) for name, tensor in memory.items()} == {"first": {5.0}, "second": {5.0}}
