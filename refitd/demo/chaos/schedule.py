"""Which fault comes when: drawn from a seed, the same for the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from refitd.failpoints import PHASES

NODES = ("a", "b", "c", "d")
STOPPED = 13.0  # seconds: past the lease of 10 s

# What a fault is, whom it may hit, and how many seconds it may last before it is undone.
_TRAINERS = tuple(f"trainer {rank}" for rank in range(4))
SEATS = {"r0 rank 0": "c", "r0 rank 1": "d", "r1 rank 0": "c", "r1 rank 1": "c", "r2 rank 0": "d", "r2 rank 1": "c"}
_ENGINES = tuple(SEATS)
_SOON, _PAST = (1.0,), (STOPPED,)
_CUT = (1.5, 4.0, STOPPED)
_PAIRS = ("a|c", "b|c", "a|d", "c|d")


@dataclass(frozen=True)
class Kind:
    """A kind of fault. ``phases``: whether it may come at a failpoint, instead of at any moment."""

    name: str
    victims: tuple[str, ...]
    holds: tuple[float, ...]
    phases: bool = True


OLD_WAKE = "old trainers wake"  # needs a publication of the new run, so there is no silence with it
KINDS = (
    Kind("kill trainer", _TRAINERS, _SOON),
    Kind("kill engine", _ENGINES, _SOON),
    Kind("kill mover", NODES, (0.0,)),
    Kind("kill daemon", NODES, _SOON),
    Kind("kill node", NODES, _SOON),
    Kind("stop trainer", _TRAINERS, _PAST),
    Kind("stop engine", _ENGINES, _PAST),
    Kind("stop mover", NODES, (5.0,)),
    Kind("stop daemon", NODES, _PAST),
    Kind("stop node", NODES, _PAST),
    Kind("node cut off", NODES, _CUT),
    Kind("node not heard", NODES, _CUT),
    Kind("node hears nothing", NODES, _CUT),
    Kind("two nodes apart", _PAIRS, _CUT),
    Kind("node without etcd", NODES, _CUT),
    Kind("etcd leader killed", ("etcd",), (3.0,)),
    Kind("etcd leader stopped", ("etcd",), (5.0,)),
    Kind("etcd leader cut off", ("etcd",), (5.0,)),
    Kind("etcd quorum lost", ("etcd",), (3.0, 8.0, STOPPED)),
    Kind("etcd slow disk", ("etcd",), (8.0,), phases=False),
    Kind("older checkpoint", ("sources",), _SOON),
    Kind(OLD_WAKE, ("sources",), _SOON),
    Kind("drain", ("c", "d"), (2.0,), phases=False),
)


@dataclass(frozen=True)
class Strike:
    """One fault: at ``phase``, or ``delay`` seconds after the wave began; undone after ``hold`` seconds."""

    number: int
    kind: str
    victim: str
    phase: str
    delay: float
    hold: float

    def __str__(self) -> str:
        when = f"at {self.phase}" if self.phase else f"after {self.delay:.2f} s"
        return f"{self.kind} ({self.victim}, {when}, for {self.hold:g} s)"


@dataclass(frozen=True)
class Wave:
    """Faults that overlap, and whether publishing stops with them, so that nothing newer covers a loss."""

    number: int
    strikes: tuple[Strike, ...]
    quiet: bool


def touched(strike: Strike) -> set[str]:
    """The nodes that a strike is about, or ``etcd``."""
    victim = strike.victim
    if victim == "sources":
        return {"a", "b"}
    if victim.startswith("trainer "):
        return {"ab"[int(victim[-1]) // 2]}
    if victim in _ENGINES:
        return {SEATS[victim]}
    return set(victim.split("|"))


def waves(seed: int, count: int, only: str = "") -> Iterator[Wave]:
    """Waves of one or two faults, ``count`` faults in all, of the kinds whose name contains ``only``.

    Every kind comes once before any comes again. The first faults are the same whatever ``count`` is.
    Raises ValueError where no kind is called so.
    """
    kinds = [kind for kind in KINDS if only in kind.name]
    if not kinds:
        raise ValueError(f"no kind of fault is called {only!r}: {', '.join(kind.name for kind in KINDS)}")
    yield from _bounded(_endless(random.Random(seed), kinds), count)


def _bounded(endless: Iterator[Wave], count: int) -> Iterator[Wave]:
    for wave in endless:
        strikes = wave.strikes[:count]
        yield Wave(wave.number, strikes, wave.quiet and all(strike.kind != OLD_WAKE for strike in strikes))
        count -= len(strikes)
        if not count:
            return


def _endless(random_: random.Random, kinds: list[Kind]) -> Iterator[Wave]:
    strikes = _strikes(random_, kinds)
    number = 0
    while True:
        number += 1
        size, quiet = (2 if random_.random() < 0.25 else 1), random_.random() < 0.35
        together = tuple(islice(strikes, size))
        if size == 2 and touched(together[0]) & touched(together[1]):  # two faults of one place would hide each other
            yield Wave(number, together[:1], quiet)
            number, together = number + 1, together[1:]
        yield Wave(number, together, quiet)


def _strikes(random_: random.Random, kinds: list[Kind]) -> Iterator[Strike]:
    number = 0
    while True:
        for kind in random_.sample(kinds, len(kinds)):
            number += 1
            victim, hold = random_.choice(kind.victims), random_.choice(kind.holds)
            phase, delay = random_.choice(PHASES), random_.uniform(0.0, 1.5)
            at_phase = kind.phases and random_.random() < 0.7
            yield Strike(number, kind.name, victim, phase if at_phase else "", delay, hold)
