"""Cases of groups K and L with a real daemon: one rank's or one engine's error reaches everybody, and nobody hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from refitd import RELEASED, ReceiveFailed, connect_engine, connect_trainer
from refitd.errors import LayoutError, RefitdError
from refitd.hook.engine import Engine
from refitd.testing import LocalDaemon, split_layout, wait_until

SECONDS = 60.0
MODEL = {f"t{i}": ((8, 4), "float32") for i in range(10)}
WRONG = {**MODEL, "t5": ((8, 5), "float32")}
WHOLE = split_layout(MODEL, 0, 1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    """Every rank is a host of its own: bytes go over tcp."""
    with LocalDaemon(links="network", config={"timeouts.offer": SECONDS}) as found:
        yield found


def values(step: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, step + i, np.float32) for i, (name, (shape, _dtype)) in enumerate(MODEL.items())}


def why(daemon: LocalDaemon, job: str, replica: str) -> str:
    found = {r["name"]: r for r in daemon.status()["jobs"][job]["replicas"]}.get(replica, {"ready": True, "why": ""})
    return "" if found["ready"] else str(found["why"])


def test_k6_what_an_engine_refuses_releases_the_sender_and_the_others_commit(daemon: LocalDaemon) -> None:
    """K6: r1 wants another shape of t5. The trainer is released, its report has r1's message with the tensor's name,
    r0 has the new version, r1 is handed nothing and is clean."""
    with (
        connect_trainer("k6", "run0", 0, 1, daemon.socket) as trainer,
        connect_engine("k6", "r0", 0, 1, daemon.socket) as good,
        connect_engine("k6", "r1", 0, 1, daemon.socket) as bad,
    ):
        trainer.plan_seconds = SECONDS
        trainer.register(WHOLE)
        good.register(WHOLE)
        bad.register(split_layout(WRONG, 0, 1))
        offer = trainer.publish(7, values(7))
        memory = values(0)
        ticket = good.pending(wait=SECONDS)
        assert ticket is not None
        good.receive(ticket, memory, timeout=SECONDS)
        assert all(np.array_equal(memory[name], array) for name, array in values(7).items())
        assert offer.released(timeout=SECONDS) is RELEASED
        report = offer.committed(timeout=SECONDS)
        assert report.committed == ["r0"]
        assert "tensor t5: expected shape (8, 4) as " in report.missing["r1"]
        assert "got shape (8, 5)" in report.missing["r1"]
        assert (bad.pending(), bad.dirty, bad.publication) == (None, False, None)


def test_l3_a_rank_whose_layout_contradicts_the_others_is_refused_by_name(daemon: LocalDaemon) -> None:
    """L3: rank 2 of four has another t5. It is told so, with the tensor and a rank that says otherwise; the replica is
    not servable, and the three others are handed nothing."""
    engines = [connect_engine("l3", "r0", rank, 4, daemon.socket) for rank in range(4)]
    with connect_trainer("l3", "run0", 0, 1, daemon.socket) as trainer:
        try:
            trainer.register(WHOLE)
            for engine, rank in zip(engines, range(4), strict=True):
                if rank != 2:
                    engine.register(split_layout(MODEL, rank, 4))
            with pytest.raises(LayoutError) as caught:
                engines[2].register(split_layout(WRONG, 2, 4))
            named = [violation.field for violation in caught.value.violations]
            assert named == ["t5: engine/r0/2 and engine/r0/0"]
            offer = trainer.publish(1, values(1))
            wait_until(lambda: why(daemon, "l3", "r0") == "rank 2 is not registered", "the reason", SECONDS)
            assert offer.committed(timeout=0.2).missing == {"r0": "rank 2 is not registered"}
            assert [(engine.pending(), engine.dirty) for engine in engines] == [(None, False)] * 4
        finally:
            for engine in engines:
                engine.close()


def receive(engine: Engine, memory: dict[str, np.ndarray], ended: dict[int, str], rank: int, ticket: object) -> None:
    try:
        engine.receive(ticket, memory, timeout=4.0)  # type: ignore[arg-type]
    except RefitdError as error:
        ended[rank] = f"{type(error).__name__}: {error}"


def test_l3_one_rank_that_fails_in_the_middle_leaves_no_rank_waiting_and_no_rank_servable(daemon: LocalDaemon) -> None:
    """L3: rank 2 hands over a t5 of another shape, 0, 1 and 3 lend what they should. Rank 2 hears which tensor; the
    others leave their receive within its timeout, dirty; the trainer is told that r0 has not committed."""
    engines = [connect_engine("l3b", "r0", rank, 4, daemon.socket) for rank in range(4)]
    with connect_trainer("l3b", "run0", 0, 1, daemon.socket) as trainer:
        try:
            trainer.plan_seconds = SECONDS
            trainer.register(WHOLE)
            for rank, engine in enumerate(engines):
                engine.register(split_layout(MODEL, rank, 4))
            offer = trainer.publish(1, values(1))
            ticket = engines[0].pending(wait=SECONDS)
            assert ticket is not None
            ended: dict[int, str] = {}
            memory = {name: np.zeros((2, 4), np.float32) for name in MODEL}
            threads = []
            for rank, engine in enumerate(engines):
                mine = {name: array.copy() for name, array in memory.items()}
                if rank == 2:
                    mine["t5"] = np.zeros((2, 5), np.float32)
                threads.append(threading.Thread(target=receive, args=(engine, mine, ended, rank, ticket)))
                threads[-1].start()
            for thread in threads:
                thread.join(SECONDS)
            assert sorted(ended) == [0, 1, 2, 3]
            assert ended[2].startswith("InputError")
            assert "t5" in ended[2]
            assert all(ended[rank].startswith(ReceiveFailed.__name__) for rank in (0, 1, 3)), ended
            assert [engine.dirty for engine in engines] == [True, True, False, True]
            assert {engine.publication for engine in engines} == {None}
            report = offer.committed(timeout=0.5)
            assert report.committed == []
            assert list(report.missing) == ["r0"]
            assert why(daemon, "l3b", "r0").startswith("its present ranks have committed nothing yet")
        finally:
            for engine in engines:
                engine.close()
