"""Signs of life, the way into the daemon's loop, and the history of refits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from refitd.telemetry.crossing import Crossing
from refitd.telemetry.history import KEPT, History, Refit
from refitd.telemetry.pulse import Pulse


def test_a_loop_that_stands_is_named_with_its_age() -> None:
    """A loop is stuck when its last pass is too old; one that has ended is not; the longest comes first."""
    now = [100.0]
    pulse = Pulse(lambda: now[0])
    assert pulse.stuck(10.0) == ""
    pulse.beat("job grpo")
    now[0] = 105.0
    pulse.beat("job sft")
    now[0] = 110.0
    assert pulse.stuck(10.0) == ""
    now[0] = 117.0
    assert pulse.stuck(10.0) == "job grpo has stood still for 17 s; job sft has stood still for 12 s"
    pulse.end("job grpo")
    pulse.beat("job sft")
    assert pulse.stuck(10.0) == ""


def test_n3_refits_and_idleness_are_life() -> None:
    """N3: passes of 60 busy and 60 idle seconds keep the pulse; nothing else does once the loop is stuck."""
    now = [0.0]
    pulse = Pulse(lambda: now[0])
    for second in range(120):
        now[0] = float(second)
        pulse.beat("job grpo")
        assert pulse.stuck(5.0) == ""
    now[0] = 130.0
    assert pulse.stuck(5.0) == "job grpo has stood still for 11 s"


def test_questions_are_answered_in_the_loop() -> None:
    """The function runs in the loop's thread; its result and its errors come back."""

    async def main() -> None:
        crossing = Crossing(asyncio.get_running_loop())
        here = threading.get_ident()
        assert await asyncio.to_thread(crossing.ask, threading.get_ident) == here
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(crossing.ask, lambda: 1 // 0)

        def times_out() -> None:
            raise TimeoutError("its own")

        with pytest.raises(TimeoutError, match="its own"):
            await asyncio.to_thread(crossing.ask, times_out)

    asyncio.run(main())


def test_a_loop_that_stands_still_is_not_waited_for() -> None:
    """A blocked loop costs the asker its patience and no more, and what it asked is not carried out later."""
    ran = []

    async def main() -> None:
        crossing = Crossing(asyncio.get_running_loop(), seconds=0.1)
        asking = asyncio.create_task(asyncio.to_thread(crossing.ask, lambda: ran.append(1)))
        await asyncio.sleep(0)
        time.sleep(0.4)
        with pytest.raises(TimeoutError, match=r"the daemon's loop has not turned for 0\.1 s"):
            await asking

    asyncio.run(main())
    assert ran == []


def test_a_closed_loop_is_no_loop() -> None:
    """After the daemon's end its loop cannot be asked."""
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(TimeoutError, match="the daemon's loop is closed"):
        Crossing(loop).ask(lambda: 1)


def test_a_refit_is_one_record() -> None:
    """Phases add up in their order, failures are counted, the last reason stays, the newest refit comes first."""
    now = [1000.0]
    history = History(lambda: now[0])
    first, second = Refit("grpo", "r0", 1, 5), Refit("grpo", "r0", 1, 9)
    history.phase(first, "transfer", 0.25)
    history.phase(first, "prepare", 0.5)
    history.failed(first, "engine/r0/1: its mover died")
    history.phase(first, "transfer", 0.25)
    history.moved(first, "network", 10)
    history.ended(first, "ok")
    now[0] = 1002.0
    history.moved(second, "peer", 1)
    newest, oldest = history.last()
    assert (newest.refit, newest.outcome, newest.moved, newest.began_at) == (second, "", {"peer": 1}, 1002.0)
    assert list(oldest.phases.items()) == [("prepare", 0.5), ("transfer", 0.5)]
    assert (oldest.began_at, oldest.seconds, oldest.outcome) == (999.75, 1.0, "ok")
    assert (oldest.failures, oldest.why, oldest.moved) == (1, "engine/r0/1: its mover died", {"network": 10})


def test_a_refit_that_was_left_for_a_newer_one_is_over() -> None:
    """A node that hears nothing of its end: the next refit of the replica ends it, unless its end is told later."""
    history = History()
    left, late, other, new = (Refit("grpo", r, 1, n) for r, n in (("r0", 5), ("r0", 7), ("r1", 5), ("r0", 9)))
    for refit in (left, other, late, new):
        history.failed(refit, "no byte for 3 s")
    history.phase(left, "transfer", 0.1)
    history.ended(late, "ok")
    assert [(record.refit, record.outcome) for record in history.last()] == [
        (new, ""), (late, "ok"), (other, ""), (left, "superseded"),
    ]  # fmt: skip
    assert {record.why for record in history.last()} == {"no byte for 3 s"}


def test_the_history_forgets() -> None:
    """Only the last refits are kept, and what was given out does not change."""
    history = History()
    for revision in range(3 * KEPT):
        history.phase(Refit("grpo", "r0", 1, revision), "commit", 0.1)
    kept = history.last()
    assert [record.refit.revision for record in kept] == list(range(3 * KEPT - 1, 2 * KEPT - 1, -1))
    history.phase(kept[0].refit, "commit", 0.1)
    assert kept[0].phases == {"commit": 0.1}


def test_faults_are_kept_for_a_while() -> None:
    """The last twenty, the newest first, with their time."""
    history = History(lambda: 1000.0)
    for number in range(25):
        history.fault("grpo", f"fault {number}")
    assert [fault.what for fault in history.faults()] == [f"fault {number}" for number in range(24, 4, -1)]
    assert history.faults()[0] == (1000.0, "grpo", "fault 24")


def test_an_end_that_nobody_heard_the_beginning_of_is_no_record() -> None:
    """A daemon that starts beside committed replicas has no history of them; an end is told once."""
    history, refit = History(), Refit("grpo", "r0", 1, 5)
    history.ended(refit, "ok")
    assert history.last() == []
    history.phase(refit, "commit", 0.1)
    history.ended(refit, "ok")
    history.ended(refit, "failed", "too late")
    assert [(record.outcome, record.why) for record in history.last()] == [("ok", "")]
