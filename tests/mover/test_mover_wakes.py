"""Who is woken for what: a thread that wakes for nothing takes the interpreter from those that move bytes."""

from __future__ import annotations

import contextlib
import threading

import pytest
from mover_rig import ENGINES, TRAINERS, column_cut

from refitd.mover.board import Board, LaneFacts
from refitd.mover.lane import Lane
from refitd.mover.round import Round, RunOptions, Stopped
from refitd.mover.transport.peer import PeerTransport, PeerWorker
from refitd.plan.program import NETWORK

ENGINE, OPTIONS = ENGINES[0], RunOptions(1, (1, 1), {})


def _round(links=NETWORK, cond=None):
    return Round(column_cut(8, 8, links=links).program(ENGINE), OPTIONS, {}, cond or threading.Condition())


class Heard(threading.Condition):
    """Counts how often everybody was woken."""

    def __init__(self):
        super().__init__(threading.RLock())
        self.times = 0

    def notify_all(self):
        self.times += 1
        super().notify_all()


@pytest.mark.parametrize(("links", "times"), [(NETWORK, 0), ("peer", 1)])
def test_the_worker_of_shared_memory_sleeps_through_rounds_of_the_network(monkeypatch, links, times):
    """It is roused for a round that has a bucket for it, once."""
    roused = []
    monkeypatch.setattr(PeerWorker, "rouse", lambda worker: roused.append(worker.edge))
    PeerTransport(Board(LaneFacts("job", "r0", 1, ENGINE, "", ""))).run(_round(links))
    assert roused == [(ENGINE, ENGINE)] * times


@pytest.mark.parametrize("finished", [False, True])
def test_the_end_of_a_round_that_is_done_wakes_nobody(finished):
    """Whoever waits for something of a round that has more to do learns of its end."""
    heard = Heard()
    round_ = _round(cond=heard)
    for bucket in round_.incoming.values() if finished else ():
        round_.mark_verified(bucket)
    before = heard.times
    round_.halt()
    assert (round_.finished(), heard.times - before) == (finished, 0 if finished else 1)


def test_only_the_last_bucket_is_news_where_no_tester_listens():
    """Without failpoints no round is held at its first bucket; with one, all wait until the tester has answered."""
    heard = Heard()
    round_ = _round(cond=heard)
    round_.open()
    seen = []
    for bucket in round_.incoming.values():
        round_.mark_verified(bucket)
        seen.append(heard.times)
    assert seen == [0] * 7 + [1]


def test_workers_of_a_round_wait_for_the_tester_where_one_listens(monkeypatch, tmp_path):
    """A round that begins under failpoints lets nobody touch memory before it was opened."""
    monkeypatch.setenv("REFITD_FAILPOINTS", str(tmp_path / "nobody"))  # who is not there says go
    round_ = _round()
    touched = threading.Event()

    def touch():
        with round_.touching():
            touched.set()

    worker = threading.Thread(target=touch)
    worker.start()
    assert not touched.wait(0.05)
    round_.open()
    worker.join(10)
    assert touched.is_set()


def test_a_worker_inside_learns_between_two_parts_that_its_round_has_ended():
    """`halt` returns only when the worker has left, and the worker leaves at the next part."""
    round_, inside, parts = _round(), threading.Event(), []

    def part():
        inside.set()
        round_.go_on()
        parts.append(round_.stopped)

    def work():
        with contextlib.suppress(Stopped), round_.touching():
            while len(parts) < 1_000_000:
                part()

    worker = threading.Thread(target=work)
    worker.start()
    assert inside.wait(10)
    round_.halt()
    assert round_._touching == 0
    worker.join(10)
    assert not worker.is_alive()
    assert len(parts) < 1_000_000
    assert set(parts[:-1]) <= {False}
    with pytest.raises(Stopped):
        round_.begin_touch()


def test_a_round_without_work_is_told_at_once(rig, monkeypatch):
    """Nobody moves anything in it, so that nobody would wake the one who tells."""
    monkeypatch.setattr("refitd.mover.lane.PROGRESS_SECONDS", 60.0)
    one = rig(column_cut(8, 8))
    one.build()
    one.built()
    nothing = type(one.sketch)(list(map(tuple, [(ENGINE, "w", "bfloat16", 32), (TRAINERS[0], "w", "bfloat16", 32)])))
    nothing.add(TRAINERS[0], ENGINE, NETWORK, [("w", 0, 1, 1, "w", 0, 1, 1, 1, 1)])
    program = nothing.program("engine/elsewhere/0")
    party = one.parties[ENGINE]
    assert isinstance(party.lane, Lane)
    party.lane.run(OPTIONS, program)
    assert party.wait_for("done")["verified"] == []
