"""One seed as a function of its number, and many of them in all processors, added up."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .nemesis import CELLS, FAULTS, STATES
from .oracle import Violation
from .scenario import chaos, run
from .world import World

ENOUGH = 5  # hits of a cell over 2,000 seeds
RARE = [cell for cell in CELLS if cell[0] == "failed"]  # a lane is that for a moment only
SEEDS_PER_PROCESS = 20  # the collector is off while a seed runs, so a process grows with every one


@dataclass
class Result:
    """What one seed came to. ``failure`` is empty where every invariant held."""

    seed: int
    failure: str = ""
    digest: str = ""
    story: str = ""
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    recovery: float = 0.0
    virtual: float = 0.0
    wall: float = 0.0
    events: int = 0


def cells_of(seed: int) -> list[tuple[str, str]]:
    """The (state, fault) pairs that a seed is to bring about: a few, and one of those that seldom come to be."""
    rng = random.Random(f"cells {seed}")
    return [*rng.sample(CELLS, rng.randint(2, 7)), RARE[seed % len(RARE)]]


def short(hits: Counter[tuple[str, str]]) -> list[str]:
    """The cells of the table that were hit less than `ENOUGH` times, with how often."""
    return [f"{name} at {state}: {hits[state, name]}" for state, name in CELLS if hits[state, name] < ENOUGH]


def play(seed: int) -> Result:
    """One seed from the beginning to the end."""
    world, started = World(seed), time.perf_counter()
    result = Result(seed)
    try:
        nemesis = run(world, lambda scenario: chaos(scenario, cells_of(seed)))
        result.hits = nemesis.hits
    except Violation as error:
        result.failure, result.story = str(error), world.story(400)
    except Exception as error:  # noqa: BLE001 - a fault of the simulation itself is told like any other
        result.failure, result.story = f"seed {seed}: {error!r}", world.story(400)
    result.digest, result.counts = world.digest, world.counts
    result.counts["commits"], result.counts["turns"] = world.oracle.commits, world.oracle.turns_of.total()
    result.recovery = world.seconds.get("recovery", 0.0)
    result.virtual, result.events = world.loop.now - 1000.0, world.loop.events
    result.wall = time.perf_counter() - started
    return result


def play_all(seeds: Iterable[int], workers: int) -> Iterator[Result]:
    """All of them, in the order in which they are given."""
    if workers == 1:
        yield from map(play, seeds)
        return
    with multiprocessing.Pool(workers, _only_the_parent_is_stopped, maxtasksperchild=SEEDS_PER_PROCESS) as pool:
        yield from pool.imap(play, seeds)


def _only_the_parent_is_stopped() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def table(hits: Counter[tuple[str, str]]) -> str:
    """How often each fault met a lane in each state."""
    width = max(map(len, FAULTS))
    lines = [f"{'fault':{width}} " + " ".join(f"{state:>9}" for state in STATES)]
    lines += [f"{name:{width}} " + " ".join(f"{hits[state, name]:>9}" for state in STATES) for name in FAULTS]
    return "\n".join(lines)


def workers() -> int:
    return max(len(os.sched_getaffinity(0)), 1)
