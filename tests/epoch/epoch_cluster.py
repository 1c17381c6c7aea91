"""A cluster in memory without a clock: the real decisions, and a small model of what daemons and clients do with them.

Ranks hold chunks of bytes, each marked with the weights it came from, so that a mix is seen. `steps` lists what could
happen next; a test chooses, and every choice is checked against the invariants of the design.
"""

from __future__ import annotations

import copy

from epoch_parties import NONE, Driver, Node, Rank, copy_node
from epoch_steps import Step, Steps

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts
from refitd.epoch.records import (
    Control,
    Drain,
    Offer,
    Parked,
)

__all__ = ["Cluster", "Driver", "Node", "Rank", "Step"]


class Cluster(Steps):
    """The model, with what goes wrong in it, and its end."""

    # Faults, and what people do.

    def publish(self, node: str, key: str, step: int) -> None:
        """A trainer changes its weights (its loan word first) and offers them."""
        rank = self.nodes[node].ranks[key]
        run = key.split("/")[1]
        rank.seq += 1
        rank.chunks = dict.fromkeys(rank.halves, self.weight(run, step))
        rank.offer = Offer(key, rank.info().incarnation, run, rank.seq, step) if self.nodes[node].alive else None
        if self.nodes[node].alive:
            self.offers(self.nodes[node])

    def weight(self, run: str, step: int) -> int:
        return int(run.removeprefix("run")) * 1000 + step

    def withdraw(self, node: str, key: str) -> None:
        """The trainer stops waiting: SKIPPED, and its memory may change."""
        self.nodes[node].ranks[key].offer = None
        self.offers(self.nodes[node])

    def kill_daemon(self, name: str) -> None:
        """The daemon and its movers are gone; its clients live, and so do its records until their lease ends."""
        node = self.nodes[name]
        node.alive, node.drivers = False, {}
        for rank in node.ranks.values():
            rank.forget()
            rank.life = 0

    def start_daemon(self, name: str) -> None:
        node = self.nodes[name]
        node.alive, node.life, node.dissents = True, node.life + 1, False
        for rank in node.ranks.values():
            if rank.alive:
                rank.new_mover()
                rank.register()
        self.join(name)

    def kill_node(self, name: str) -> None:
        for key in self.nodes[name].ranks:
            self.kill_rank(name, key)
        self.kill_daemon(name)

    def kill_rank(self, name: str, key: str) -> None:
        """A client dies, and its mover with its registration."""
        node = self.nodes[name]
        old = node.ranks[key]
        fresh = Rank(key, old.world, old.halves, old.incarnation, 0)
        fresh.alive, fresh.chunks = False, dict.fromkeys(old.halves, -2)
        fresh.seq, fresh.lives = old.seq, old.lives
        node.ranks[key] = fresh
        if node.alive:
            self.join(name)
            self.offers(node)

    def start_rank(self, name: str, key: str) -> None:
        """A new process registers; only a live daemon gives it a mover."""
        node, rank = self.nodes[name], self.nodes[name].ranks[key]
        rank.alive, rank.incarnation, rank.came_with = True, rank.incarnation + 1, NONE
        if node.alive:
            rank.new_mover()
            self.join(name)

    def kill_mover(self, name: str, key: str) -> None:
        """It is started again at once; what lay in the lent memory stays there."""
        self.nodes[name].ranks[key].new_mover()
        self.join(name)

    def fail_edge(self, name: str, replica: str) -> None:
        """A destination's node suspects an edge of its lane."""
        driver, lane = self.nodes[name].drivers.get(replica), self.view.lanes.get(replica)
        if driver and lane and lane.revision == driver.token and name in lane.value.member_nodes and driver.built:
            member = next(slot for slot in lane.value.members if slot.node == name)
            self.fail(driver, (lane.value.sources[0].key, member.key), "no progress")

    def drain(self, name: str) -> None:
        """An operator wants the node empty; the wish is this daemon's."""
        node, key = self.nodes[name], f"drains/{name}"
        wish = Drain(name, str(node.life), "test")
        self.write(key, encode(wish), self.view.revision_of(key), (name, node.life))

    def undrain(self, name: str) -> None:
        key = f"drains/{name}"
        if key in self.data:
            self.write(key, None, self.view.revision_of(key))

    def control(self, paused: bool) -> None:
        """An operator pauses the job, or lets it go on."""
        self.write("control", encode(Control(paused, None, "test")), self.view.revision_of("control"))

    def park(self, name: str) -> None:
        """The leader has counted too many joins."""
        record = Parked(name, str(self.nodes[name].life), "test", 9)
        self.write(f"parked/{name}", encode(record), self.view.revision_of(f"parked/{name}"))

    def decide_once(self, facts: Facts) -> None:
        """One decision with what the leader's clock says at this moment."""
        if self.leads():
            self.facts = facts
            self.carry_out(self.decisions(), self.view.created_of("leader"))
            self.facts = Facts()

    def peace(self) -> None:
        """Operators and clocks have nothing more to say; daemons that plan differently are started anew."""
        self.facts = Facts(calm=frozenset(self.nodes))
        if self.view.control and self.view.control.value.paused:
            self.control(False)
        for name, node in self.nodes.items():
            self.undrain(name)
            if node.alive and (node.dissents or node.planners != (1,)):
                self.kill_daemon(name)
            node.planners = (1,)
            if not node.alive:
                self.start_daemon(name)

    # The end.

    def settle(self, limit: int = 600) -> int:
        """Step until nothing is left to do; how many steps that took. Leases of the dead end when all is quiet."""
        for count in range(limit):
            steps = self.steps()
            if steps:
                steps[count % len(steps)][1]()
            elif self.expired():
                self.expire(self.expired()[0])
            else:
                return count
        raise AssertionError(f"I7: not at rest after {limit} steps; next {[name for name, _ in self.steps()]}")

    def lagging(self) -> list[str]:
        """Ranks of whole replicas that do not serve the newest publication."""
        newest, slots = self.view.newest, self.view.slots()
        whole = [ranks for ranks in self.view.replicas().values() if len(ranks) == ranks[next(iter(ranks))].world]
        keys = [info.key for ranks in whole for info in ranks.values()]
        found = [rank for slot in slots.values() if slot.key in keys and (rank := self.rank(slot))]
        return [rank.key for rank in found if rank.dirty or rank.served != newest]

    def clone(self) -> Cluster:
        """A copy that shares the records, which nobody changes."""
        other = copy.copy(self)
        other.view = self.view.copy()
        other.counts, other.data, other.leases = dict(self.counts), dict(self.data), dict(self.leases)
        other.weights, other.served = dict(self.weights), dict(self.served)
        other.nodes = {name: copy_node(node) for name, node in self.nodes.items()}
        return other

    @property
    def state(self) -> int:
        """Equal for clusters that cannot be told apart any more (where revisions are counted by key)."""
        facts = tuple((key, self.counts[key], data, self.leases.get(key)) for key, data in sorted(self.data.items()))
        return hash((facts, tuple(sorted(self.counts.items())), repr(self.nodes)))
