"""Every state of a small cluster, and the death of any one party in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import pytest
from epoch_cluster import Cluster, Driver, Node, Rank, Step
from epoch_invariants import (
    assert_i7_newest_reached,
    assert_i8_records_at_baseline,
    assert_operators_are_heard,
)

from refitd.epoch.facts import Facts
from refitd.epoch.records import Lane, PubId

TRAINER, LEAD, MATE = "trainer/run1/0", "engine/r0/0", "engine/r0/1"
PLACES = {"t0": TRAINER, "e0": LEAD, "e1": MATE}


def small() -> Cluster:
    """One trainer node and a replica of two ranks on two nodes, with the first publication on its way."""
    cluster = Cluster(
        {"t0": {TRAINER: (1, "ab")}, "e0": {LEAD: (2, "a")}, "e1": {MATE: (2, "b")}}, shared_revisions=False
    )
    cluster.publish("t0", TRAINER, 1)
    cluster.campaign("e0")
    return cluster


def with_a_second_publication() -> Cluster:
    """The same cluster after its first refit, with the second publication on its way."""
    cluster = small()
    cluster.settle()
    cluster.publish("t0", TRAINER, 2)
    return cluster


def every_death() -> dict[str, Callable[[Cluster], None]]:
    """One death of each party, and one suspicion of each edge."""
    deaths: dict[str, Callable[[Cluster], None]] = {}
    for node, key in PLACES.items():
        deaths[f"daemon {node}"] = lambda c, n=node: c.kill_daemon(n)
        deaths[f"node {node}"] = lambda c, n=node: c.kill_node(n)
        deaths[f"rank {key}"] = lambda c, n=node, k=key: c.kill_rank(n, k)
        deaths[f"mover {key}"] = lambda c, n=node, k=key: c.kill_mover(n, k)
    deaths["edge to e0"] = lambda c: c.fail_edge("e0", "r0")
    deaths["edge to e1"] = lambda c: c.fail_edge("e1", "r0")
    deaths["drain e1"] = lambda c: c.drain("e1")
    deaths["drain t0"] = lambda c: c.drain("t0")
    deaths["pause"] = lambda c: c.control(True)
    deaths["e1 flaps"] = lambda c: setattr(c, "facts", Facts(flapping=(("e1", 9),)))
    deaths["park e1"] = lambda c: c.park("e1")
    deaths["e1 dissents"] = lambda c: setattr(c.nodes["e1"], "dissents", True)
    deaths["e1 is silent"] = lambda c: c.decide_once(Facts(silent=frozenset([("r0", "e1")])))
    deaths["store away"] = lambda c: setattr(c, "facts", Facts(store_settled=False))
    deaths["offer withdrawn"] = lambda c: c.withdraw("t0", TRAINER)
    return deaths


DEATHS = every_death()


# After these the lane is built anew, and the orders of all that are too many: one fair order each is tried.
REBUILT = [name for name in DEATHS if name.startswith(("mover", "edge", "e1"))]
STARTS = [small, with_a_second_publication]


def reachable(*starts: Cluster) -> Iterator[Cluster]:
    """All states that steps lead to, in whatever order; the leader's own steps come at once."""
    seen, todo = {start.state for start in starts}, list(starts)
    while todo:
        cluster = todo.pop()
        steps = cluster.steps()
        urgent = [i for i, (name, _act) in enumerate(steps) if name.startswith("decide")]
        for i in urgent or range(len(steps)):
            after = cluster.clone()
            after.steps()[i][1]()
            if after.state not in seen:
                seen.add(after.state)
                todo.append(after)
        yield cluster


@cache
def before(start: Callable[[], Cluster]) -> list[Cluster]:
    """All states without a fault. Nobody may change them."""
    return list(reachable(start()))


def after_death(states: Iterable[Cluster], death: str) -> list[Cluster]:
    """All different states in which the death has just happened."""
    found = {}
    for state in states:
        cluster = state.clone()
        DEATHS[death](cluster)
        found[cluster.state] = cluster
    return list(found.values())


RECOVERS: set[int] = set()  # states from which it was seen


def at_rest(cluster: Cluster) -> None:
    """What must hold before anybody is back."""
    if cluster.leads():
        assert_operators_are_heard(cluster.view, cluster.facts)


def recovers(cluster: Cluster) -> None:
    """Once faults stop: everybody is back, the trainer publishes again, and every rank serves that."""
    cluster.peace()
    for name, key in PLACES.items():
        if not cluster.nodes[name].ranks[key].alive:
            cluster.start_rank(name, key)
    while cluster.expired():
        cluster.expire(cluster.expired()[0])
    path = list(steps_to_rest(cluster))
    if cluster.state not in RECOVERS:
        if cluster.nodes["t0"].ranks[TRAINER].offer is None:
            cluster.publish("t0", TRAINER, 9)
        path += steps_to_rest(cluster)
    if cluster.state not in RECOVERS:
        assert_i7_newest_reached(cluster.lagging())
        assert_i8_records_at_baseline(cluster.view, cluster.nodes)
    RECOVERS.update(path)


def steps_to_rest(cluster: Cluster, limit: int = 300) -> Iterator[int]:
    """The states that one fair order of steps goes through, until nothing is left to do or the rest is known."""
    for count in range(limit):
        yield cluster.state
        steps = cluster.steps()
        if not steps or cluster.state in RECOVERS:
            return
        steps[count % len(steps)][1]()
    raise AssertionError("I7: it does not come to rest")


@pytest.mark.parametrize("start", STARTS)
def test_every_order_of_steps_ends_with_the_newest_publication(start: Callable[[], Cluster]) -> None:
    """Without faults there is one kind of end: all serve the newest, and the trainer has its memory back."""
    ends = [cluster for cluster in before(start) if not cluster.steps()]
    assert ends
    for end in ends:
        assert end.lagging() == []
        assert end.nodes["t0"].ranks[TRAINER].offer is None


@pytest.mark.parametrize("death", [name for name in DEATHS if name not in REBUILT])
@pytest.mark.parametrize("start", STARTS)
def test_after_any_death_in_any_state_every_order_of_steps_recovers(start: Callable[[], Cluster], death: str) -> None:
    """All invariants hold on every way to rest, and from there the cluster recovers."""
    ends = [cluster for cluster in reachable(*after_death(before(start), death)) if not cluster.steps()]
    assert ends
    for end in ends:
        at_rest(end)
        recovers(end)


@pytest.mark.parametrize("death", REBUILT)
@pytest.mark.parametrize("start", STARTS)
def test_after_any_rebuild_in_any_state_the_cluster_recovers(start: Callable[[], Cluster], death: str) -> None:
    """The same where a mover dies or an edge fails: the lane turns and goes on."""
    states = after_death(before(start), death)
    assert states
    for state in states:
        recovers(state)


def never_void(*_args: object) -> None:
    """A commit that a rank missed is never made good."""
    return


def bold(self: Cluster, driver: Driver, _lane: Lane, mine: list[Rank], target: PubId) -> Step:
    """Says that it has verified what it never copied."""
    return "verify", lambda: self.verify(driver, mine, target)


def stubborn(_self: Cluster, node: Node, replica: str, token: int) -> None:
    """Takes what it did under the old token over to the new one."""
    node.drivers[replica].token, node.drivers[replica].built = token, True


def search(death: str) -> None:
    for start in STARTS:
        for cluster in reachable(*after_death(reachable(start()), death)):
            if not cluster.steps():
                at_rest(cluster)
                recovers(cluster)


@pytest.mark.parametrize(
    ("method", "broken", "death", "says"),
    [
        ("void", never_void, "daemon e1", "I7"),
        ("transfer", bold, "daemon t0", "I1"),
        ("turn", stubborn, "rank engine/r0/1", "I7"),
    ],
)
def test_the_search_finds_planted_faults(
    monkeypatch: pytest.MonkeyPatch, method: str, broken: Callable[..., object], death: str, says: str
) -> None:
    """The same search over a model with a fault must fail, by the name of what is broken."""
    monkeypatch.setattr(Cluster, method, broken)
    monkeypatch.setattr("test_epoch_exhaustive.RECOVERS", set())
    with pytest.raises(AssertionError, match=says):
        search(death)


@pytest.mark.parametrize(
    ("where", "broken", "death", "says"),
    [
        ("leader.paused", lambda _view: "", "pause", "while the job is paused"),
        ("lanes.draining", lambda _view: frozenset(), "drain e1", "drain: r0 keeps"),
        ("leader.parking", lambda _view, _facts: (), "e1 flaps", "parked: .'e1'. flaps"),
        ("lanes.away", lambda *_about: "", "park e1", "a parked node is in a lane"),
    ],
)
def test_the_search_finds_leaders_that_do_not_listen(
    monkeypatch: pytest.MonkeyPatch, where: str, broken: Callable[..., object], death: str, says: str
) -> None:
    """A leader that ignores pause, a drain, a node that flaps, or that it has parked one."""
    monkeypatch.setattr(f"refitd.epoch.{where}", broken)
    monkeypatch.setattr("test_epoch_exhaustive.RECOVERS", set())
    with pytest.raises(AssertionError, match=says):
        search(death)
