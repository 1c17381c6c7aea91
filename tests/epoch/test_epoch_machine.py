"""Two trainer nodes and two replicas under any order of steps, delays and faults; the invariants by name."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from epoch_cluster import Cluster
from epoch_invariants import (
    assert_i1_no_mix,
    assert_i6_no_changed_memory,
    assert_i7_newest_reached,
    assert_i8_records_at_baseline,
    assert_operators_are_heard,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from refitd.epoch.facts import Facts, Write

NODES = {
    "t0": {"trainer/run1/0": (2, "a")},
    "t1": {"trainer/run1/1": (2, "b")},
    "e0": {"engine/r0/0": (2, "a"), "engine/r0/1": (2, "b"), "engine/r1/0": (2, "a")},
    "e1": {"engine/r1/1": (2, "b")},
}
PLACES = [(node, key) for node, ranks in NODES.items() for key in ranks]
TRAINERS = [place for place in PLACES if place[0].startswith("t")]
PICK = st.integers(0, 1 << 16)


class Machine(RuleBasedStateMachine):
    """Faults at any moment; `teardown` stops them and demands I7."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(NODES)
        self.training = 0
        self.late: tuple[list[Write], int] = ([], 0)

    @initialize()
    def first_publication(self) -> None:
        self.publish_all()

    def publish_all(self) -> None:
        """Every living trainer goes on to the same next step."""
        self.training += 1
        for node, key in TRAINERS:
            if self.cluster.nodes[node].ranks[key].alive:
                self.cluster.publish(node, key, self.training)

    @rule(picks=st.lists(PICK, min_size=1, max_size=12))
    def go_on(self, picks: list[int]) -> None:
        """Some steps, in an order that the test chooses."""
        for pick in picks:
            steps = self.cluster.steps()
            if steps:
                steps[pick % len(steps)][1]()

    @precondition(lambda self: self.cluster.leads())
    @rule()
    def decide_and_wait(self) -> None:
        """A leader has decided, and is slow to write."""
        self.late = self.cluster.decisions(), self.cluster.view.created_of("leader")

    @rule()
    def write_late(self) -> None:
        """What it decided then arrives now; guards must hold off what no longer fits."""
        self.cluster.carry_out(*self.late)

    @rule()
    def publish(self) -> None:
        self.publish_all()

    @rule(pick=PICK)
    def skip(self, pick: int) -> None:
        """A trainer stops waiting."""
        node, key = TRAINERS[pick % len(TRAINERS)]
        if self.cluster.nodes[node].alive:
            self.cluster.withdraw(node, key)

    @rule(name=st.sampled_from(sorted(NODES)), whole=st.booleans())
    def kill(self, name: str, whole: bool) -> None:
        """A daemon dies, or its whole node."""
        if self.cluster.nodes[name].alive:
            (self.cluster.kill_node if whole else self.cluster.kill_daemon)(name)

    @rule(name=st.sampled_from(sorted(NODES)))
    def start(self, name: str) -> None:
        """The daemon is started again, maybe before its old lease has ended."""
        if not self.cluster.nodes[name].alive:
            self.cluster.start_daemon(name)

    @rule()
    def lease_ends(self) -> None:
        """The store notices a death."""
        for owner in self.cluster.expired()[:1]:
            self.cluster.expire(owner)

    @rule(place=st.sampled_from(PLACES))
    def kill_rank(self, place: tuple[str, str]) -> None:
        if self.cluster.nodes[place[0]].ranks[place[1]].alive:
            self.cluster.kill_rank(*place)

    @rule(place=st.sampled_from(PLACES))
    def start_rank(self, place: tuple[str, str]) -> None:
        """A restarted client, or one that joins."""
        if not self.cluster.nodes[place[0]].ranks[place[1]].alive:
            self.cluster.start_rank(*place)

    @rule(place=st.sampled_from(PLACES))
    def kill_mover(self, place: tuple[str, str]) -> None:
        node = self.cluster.nodes[place[0]]
        if node.alive and node.ranks[place[1]].alive:
            self.cluster.kill_mover(*place)

    @rule(name=st.sampled_from(["e0", "e1"]), replica=st.sampled_from(["r0", "r1"]))
    def suspect(self, name: str, replica: str) -> None:
        """An edge makes no progress."""
        self.cluster.fail_edge(name, replica)

    @rule(name=st.sampled_from(sorted(NODES)), on=st.booleans())
    def drain(self, name: str, on: bool) -> None:
        """An operator wants a node empty, or changes their mind."""
        if self.cluster.nodes[name].alive and on:
            self.cluster.drain(name)
        else:
            self.cluster.undrain(name)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        """Nothing new begins."""
        self.cluster.control(paused)

    @rule(name=st.sampled_from(sorted(NODES)))
    def park(self, name: str) -> None:
        """The leader has seen it come and go too often."""
        self.cluster.park(name)

    @rule(name=st.sampled_from(sorted(NODES)), version=st.sampled_from([(1,), (1, 2), (2,)]))
    def upgrade(self, name: str, version: tuple[int, ...]) -> None:
        """Its daemon is replaced by one with other planners."""
        node = self.cluster.nodes[name]
        if node.alive:
            self.cluster.kill_daemon(name)
            node.planners = version
            self.cluster.start_daemon(name)

    @rule(name=st.sampled_from(sorted(NODES)))
    def dissent(self, name: str) -> None:
        """It computes other plans than everybody else."""
        self.cluster.nodes[name].dissents = True

    @rule(
        grace=st.booleans(), joins=st.booleans(), settled=st.booleans(),
        silent=st.sets(st.tuples(st.sampled_from(["r0", "r1"]), st.sampled_from(sorted(NODES))), max_size=1),
        slow=st.sets(st.sampled_from(["r0", "r1"]), max_size=1), calm=st.sets(st.sampled_from(sorted(NODES))),
        flapping=st.sets(st.sampled_from(sorted(NODES)), max_size=1),
    )  # fmt: skip
    def clock(
        self, grace: bool, joins: bool, settled: bool, silent: set[tuple[str, str]], slow: set[str], calm: set[str],
        flapping: set[str],
    ) -> None:  # fmt: skip
        """Whatever the leader's clock says, the invariants hold."""
        flaps = tuple((name, 9) for name in flapping)
        self.cluster.facts = Facts(grace, joins, settled, flaps, frozenset(calm), frozenset(silent), frozenset(slow))

    @invariant()
    def i1_nobody_serves_a_mix(self) -> None:
        for node in self.cluster.nodes.values():
            for rank in node.ranks.values():
                if rank.served.revision and not rank.dirty and not rank.trains:
                    assert_i1_no_mix(rank.key, rank.chunks, self.cluster.weights[rank.served])

    @invariant()
    def i6_nothing_changed_is_verified(self) -> None:
        for node in self.cluster.nodes.values():
            for rank in node.ranks.values():
                if rank.complete and not rank.trains:
                    assert_i6_no_changed_memory(rank.key, rank.chunks, self.cluster.weights[rank.complete])

    @invariant()
    def i3_publications_only_go_forward(self) -> None:
        for replica, stored in self.cluster.view.commits.items():
            assert stored.value.id in self.cluster.weights, f"I3: {replica} committed what was never published"

    def teardown(self) -> None:
        """What operators want is done; then I7: faults stop, everybody returns, trainers go on: every replica reaches
        the newest publication."""
        cluster = self.cluster
        cluster.facts = Facts(flapping=cluster.facts.flapping)
        cluster.settle()
        if cluster.leads():
            assert_operators_are_heard(cluster.view, cluster.facts)
        cluster.peace()
        for name, node in cluster.nodes.items():
            for key in [key for key, rank in node.ranks.items() if not rank.alive]:
                cluster.start_rank(name, key)
        cluster.settle()
        if not all(cluster.nodes[node].ranks[key].offer for node, key in TRAINERS) or cluster.lagging():
            self.publish_all()
        cluster.settle()
        assert_i7_newest_reached(cluster.lagging())
        assert_i8_records_at_baseline(cluster.view, cluster.nodes)


Machine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestCluster = Machine.TestCase


PLANTED = {
    "leader.paused": (lambda _view: "", "while the job is paused"),
    "leader.parking": (lambda _view, _facts: (), "parked: |I7"),
    "lanes.away": (lambda *_about: "", "a parked node is in a lane"),
    "refits._room": (lambda _view, _facts: 99, "max_dirty: "),
}


@pytest.mark.parametrize("where", sorted(PLANTED))
def test_it_finds_leaders_that_do_not_listen(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A leader that ignores pause or what it has parked, that parks nobody, or orders too many at once."""
    broken, says = PLANTED[where]
    monkeypatch.setattr(f"refitd.epoch.{where}", broken)
    hunt = settings(Machine.TestCase.settings, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError, match=says):
        run_state_machine_as_test(Machine, settings=hunt)


def joined_by_a_third() -> Cluster:
    """Two replicas serve the publication, the node of one drains, and a third joins while the trainer is gone."""
    cluster = Cluster({
        "t0": {"trainer/run1/0": (1, "ab")}, "e0": {"engine/r0/0": (1, "ab")}, "e1": {"engine/r1/0": (1, "ab")},
        "e2": {"engine/r2/0": (1, "ab")},
    })  # fmt: skip
    cluster.kill_rank("e2", "engine/r2/0")
    cluster.publish("t0", "trainer/run1/0", 1)
    cluster.settle()
    cluster.drain("e0")
    cluster.kill_node("t0")
    cluster.start_rank("e2", "engine/r2/0")
    return cluster


def test_a_joiner_reads_from_who_does_not_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets everything from r1 alone; a leader that does not care where it reads is found."""
    cluster = joined_by_a_third()
    cluster.settle()
    assert cluster.view.lanes["r2"].value.source_nodes == {"e1"}
    assert cluster.lagging() == []
    monkeypatch.setattr("refitd.epoch.holders.draining", lambda _view: frozenset())
    with pytest.raises(AssertionError, match=r"drain: r2 reads from \['e0'\], and need not"):
        joined_by_a_third().settle()
