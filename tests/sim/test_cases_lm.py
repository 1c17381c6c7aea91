"""Groups L and M of the field cases, on simulated clusters: who may answer, and who may decide."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from refitd.epoch.reports import ready
from refitd.hook.messages import IN_PLACE
from refitd.store.base import Event

from .engine import Replica, SimEngine
from .etcd import key_of
from .loop import loop
from .scenario import Scenario, layouts, run
from .world import World


class Joined(NamedTuple):
    """What was seen of a replacement."""

    before: list[str]  # who answered before it had committed anything
    unready: list[bool]  # what `ready` said of it until then
    first: tuple[int, int]  # the publication of its first answer
    newest: tuple[int, int]  # the newest one when it came
    steps: int  # publications while it was joining


async def replacement(scenario: Scenario) -> Joined:
    """E1 and E2 serve; E2 dies for good, E3 comes from nothing, and publications and requests go on."""
    world = scenario.world
    world.train_seconds, world.bucket_time = 0.4, (0.1, 0.2)
    scenario.build(4, 1, [(1, IN_PLACE), (1, IN_PLACE)])
    scenario.start()
    supervisor = asyncio.ensure_future(scenario.supervise())
    await scenario.assert_i7_converges("at the start")
    view, serves = world.oracle.view, world.oracle.serves
    answers: list[tuple[str, tuple[int, int], bool]] = []

    def heard(engine: SimEngine) -> None:
        serves(engine)
        answers.append((engine.of.name, engine.publication, "r2" in view.commits))

    world.oracle.serves = heard  # type: ignore[method-assign]
    world.replicas["r1"].retired = True
    world.replicas["r1"].end()
    world.replicas["r2"] = Replica(world, "r2", [world.machine("n3")], layouts(1, 0), IN_PLACE)
    newest, number = view.newest, view.publication.value.number if view.publication else 0
    assert newest is not None
    unready: list[bool] = []

    def answered() -> bool:
        if "r2" not in view.commits:
            unready.append(ready(view, "r2", 1)[0])
        return any(name == "r2" for name, _publication, _committed in answers)

    assert await scenario.until(answered, 60.0), world.oracle.why()
    assert view.publication is not None
    first = next(publication for name, publication, _committed in answers if name == "r2")
    before = [name for name, _publication, committed in answers if not committed]
    supervisor.cancel()
    return Joined(before, unready, first, tuple(newest), view.publication.value.number - number)


def test_l1_a_joiner_answers_nothing_before_it_holds_the_newest() -> None:
    """L1: not ready and silent until it has committed; its first answer is of what was newest when it came, or later,
    with all its bytes (I1 looks at each answer); the replica that stays answers all the time."""
    joined = run(World(2), replacement)
    assert set(joined.before) == {"r0"}
    assert joined.unready
    assert not any(joined.unready)
    assert joined.first >= joined.newest
    assert joined.steps >= 1, "a publication begins while it joins"


class Sleeper(NamedTuple):
    """What became of a leader that slept past its lease in the middle of a decision."""

    successor: str
    woke_leading: bool
    decided: int  # records that it wrote after it woke while somebody else led
    publications: int  # written by anybody from its sleep to the end
    offers: int  # weights that were ever offered


async def sleeping_leader(scenario: Scenario) -> Sleeper:
    """A leads and stops just before it writes a publication; B takes the key; A goes on with its publish."""
    world = scenario.world
    world.train_seconds = 0.5
    scenario.build(4, 1, [(1, IN_PLACE), (1, IN_PLACE)])
    scenario.start()
    supervisor = asyncio.ensure_future(scenario.supervise())
    await scenario.assert_i7_converges("at the start")
    view = world.oracle.view
    assert view.leader is not None
    name = view.leader.value.node
    daemon = world.machines[name].daemon
    assert daemon is not None
    store, asked = daemon.store, loop().create_future()
    txn = store.txn

    def stop_first(compares: object, then: object, *rest: object) -> object:
        keys = [op.key for op in then]  # type: ignore[attr-defined]
        if f"/refitd/{world.job}/publication" in keys and not asked.done():
            daemon.process.pause()
            asked.set_result(None)
        return txn(compares, then, *rest)  # type: ignore[arg-type]

    store.txn = stop_first  # type: ignore[method-assign, assignment]
    await asked
    slept = len(world.oracle.weights)
    await asyncio.sleep(15.0)
    successor = view.leader.value.node if view.leader else ""
    decided: list[str] = []

    def watch(_revision: int, events: Sequence[Event]) -> None:
        if world.etcd.writer is daemon.process and view.leader is not None and view.leader.value.node != name:
            decided.extend(kind for event in events if (kind := key_of(event).split("/")[3]) in DECISIONS)

    world.etcd.on_change.append(watch)
    daemon.process.resume()
    await asyncio.sleep(5.0)
    leading = daemon.jobs[world.job].leading.ours
    await scenario.assert_i7_converges("after it woke")
    supervisor.cancel()
    offers = len({*world.oracle._offers.values()})
    return Sleeper(successor, leading, len(decided), len(world.oracle.weights) - slept, offers)


DECISIONS = ("generation", "publication", "lanes", "refits")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_m1_a_leader_that_slept_past_its_lease_writes_nothing(seed: int) -> None:
    """M1: B leads before A wakes; A's write is refused by its guard, A does not lead, and no publication is written
    twice: there are no more records than weights that trainers offered."""
    sleeper = run(World(seed), sleeping_leader)
    assert sleeper.successor
    assert (sleeper.woke_leading, sleeper.decided) == (False, 0)
    assert 1 <= sleeper.publications <= sleeper.offers
