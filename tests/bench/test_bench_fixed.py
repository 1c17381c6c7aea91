"""What the benchmark of a mover's fixed cost makes of stamps; the refits themselves are those of `bench refit`."""

import multiprocessing

import pytest

from refitd.bench import fixed, fixed_calls, fixed_cold
from refitd.bench.party import BenchFailed
from refitd.stamps import Stamp

ENGINES = ("engine/r0/0", "engine/r0/1")


def _round(at, took):
    """Stamps of a refit that begins ``at``; the second mover begins and ends 10 µs after the first."""
    names = {"run.heard": -2e-5, "opened": 0.0, "launched": 5e-5, "counted": took}
    return [Stamp(at + 1 + late + when, name, key) for late, key in ((0, ENGINES[0]), (1e-5, ENGINES[1]))
            for name, when in names.items()]  # fmt: skip


def test_moments_are_counted_from_the_first_movers_beginning():
    """By rank, medians of refits; the transfer ends with the last mover's count."""
    spans = [(float(at), at + 3.0) for at in (10, 20, 30)]
    found = sorted(one for at, took in ((10, 1e-4), (20, 2e-4), (30, 9e-4)) for one in _round(at, took))
    found.append(Stamp(11.5, "opened", "trainer/run/0"))
    rounds = [fixed._moments(span, found) for span in spans]
    said = fixed.summary(rounds, 1 << 20, 5.9)
    assert said["moved_us"] == 210.0
    assert said["moments_us"] == {
        ENGINES[0]: {"run.heard": -20.0, "opened": 0.0, "launched": 50.0, "counted": 200.0},
        ENGINES[1]: {"run.heard": -10.0, "opened": 10.0, "launched": 60.0, "counted": 210.0},
    }
    assert (said["rate"], said["ratio"], said["all_us"]) == (4.99, 0.846, [110, 210, 910])
    with pytest.raises(BenchFailed, match="do not show every mover"):
        fixed.summary([{ENGINES[0]: {"opened": 0.0}}], 1, 0.0)


def test_calls_are_timed_part_by_part():
    """Each call once a repeat, in order; all of them together take as long as the parts."""
    did = []
    took = fixed_calls.timed([("a", lambda: did.append("a")), ("b", lambda: did.append("b"))], 3, False)
    assert did == ["a", "b"] * 3
    assert took.keys() == {"a", "b", "all"}
    assert took["all"] >= max(took["a"], took["b"]) >= 0


def test_waking_a_thread_is_timed_and_the_thread_ends():
    """Also after a sleep."""
    document = {"hot_us": {}, "cold_us": {}}
    fixed_calls._waking(document, 6)
    assert document["hot_us"]["waking a thread"] > 0
    assert document["cold_us"]["waking a thread"] > 0


def _twice(pipe):
    while pipe.recv():
        pipe.send("done")


def test_an_idle_card_is_timed_with_and_without_what_comes_before(monkeypatch):
    """Another's work, the touch, the launch, the wait, in this order; the warm-ups are not counted."""
    did = []
    monkeypatch.setattr(fixed_cold, "WARM_UPS", 1)
    one = [lambda name=name: did.append(name) for name in ("run", "wait", "ask", "touch")]
    took = fixed_cold.timed(*one, repeats=2)
    assert did == ["ask", "touch", "run", "wait"] * 3
    assert fixed_cold.timed(*one[:2], None, None, 1).keys() == took.keys() == {"touch", "run", "sums", "all"}
    assert did[12:] == ["run", "wait"] * 2
    assert took["all"] >= max(took["run"], took["sums"]) >= 0


def test_another_process_works_when_it_is_asked_to():
    """And is gone afterwards."""
    with fixed_cold.neighbour(_twice) as ask:
        ask()
        (child,) = multiprocessing.active_children()
    assert not child.is_alive()
