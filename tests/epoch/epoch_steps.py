"""What the parties of the model may do next, by the real decisions: each step is checked against the invariants."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from epoch_invariants import (
    assert_decision,
    assert_i1_no_mix,
    assert_i2_commits_are_whole,
    assert_i3_never_back,
    assert_i4_acks_are_of_the_token,
    assert_i5_quiet_after_the_turn,
    assert_i10_one_plan,
    whole,
)
from epoch_parties import NONE, Driver, Node, Rank

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.leader import decide
from refitd.epoch.records import (
    Ack,
    Commit,
    Lane,
    Leader,
    Member,
    Offers,
    PubId,
    Slot,
    SlotId,
)
from refitd.epoch.release import loan, published
from refitd.epoch.stage import stage
from refitd.epoch.view import View

Step = tuple[str, Callable[[], None]]


def covers(_replica: str, digests: Iterable[str]) -> bool:
    """Whether layouts hold all of the model between them."""
    return whole(digests)


class Steps:
    """All nodes and the store. Every method that changes something is one atomic step of one party."""

    def __init__(self, nodes: dict[str, dict[str, tuple[int, str]]], shared_revisions: bool = True) -> None:
        """``nodes``: name -> rank key -> (world, halves). Without shared revisions each key counts for itself."""
        self.view, self.shared = View(), shared_revisions
        self.facts = Facts()  # what the leader's clock says
        self.counts: dict[str, int] = {}
        self.data: dict[str, bytes] = {}  # the records as they were written
        self.leases: dict[str, tuple[str, int]] = {}  # key -> node and life whose lease it is under
        self.nodes = {
            name: Node(name, {key: Rank(key, world, halves) for key, (world, halves) in ranks.items()})
            for name, ranks in nodes.items()
        }
        self.weights: dict[PubId, int] = {}  # what each publication is made of
        self.served: dict[str, PubId] = {}  # I3: the newest that each life of a replica's lead has served
        for name in self.nodes:
            self.join(name)

    # The store.

    def write(self, key: str, data: bytes | None, expected: int, owner: tuple[str, int] | None = None) -> bool:
        if self.view.revision_of(key) != expected:
            return False
        counter = "" if self.shared else key
        self.counts[counter] = revision = self.counts.get(counter, 0) + 1
        self.leases.pop(key, None)
        if data is None:
            assert self.view.delete(key, revision)
            del self.data[key]
        else:
            self.data[key] = data
            assert self.view.put(key, data, self.view.created_of(key) or revision, revision)
            if owner:
                self.leases[key] = owner
        return True

    def expire(self, owner: tuple[str, int]) -> None:
        """A lease ends: everything under it is gone at once."""
        for key in [key for key, other in self.leases.items() if other == owner]:
            self.write(key, None, self.view.revision_of(key))

    def expired(self) -> list[tuple[str, int]]:
        """Leases that nobody keeps any more."""
        live = {(node.name, node.life) for node in self.nodes.values() if node.alive}
        return sorted(set(self.leases.values()) - live)

    # Membership.

    def join(self, name: str) -> None:
        """Write our member record; an old life's is removed first, as the same machine may."""
        node = self.nodes[name]
        key, stored = f"members/{name}", self.view.members.get(name)
        if stored and stored.value.incarnation != str(node.life):
            self.write(key, None, stored.revision)
        infos = tuple(rank.info() for rank in sorted(node.ranks.values(), key=lambda rank: rank.key) if rank.alive)
        record = Member(name, name, f"{name}:1", str(node.life), "boot", node.planners, infos)
        present = self.view.members.get(name)
        if present is None or present.value != record:
            self.write(key, encode(record), self.view.revision_of(key), (name, node.life))

    def offers(self, node: Node) -> None:
        mine = tuple(rank.offer for _key, rank in sorted(node.ranks.items()) if rank.offer)
        stored = self.view.offers.get(node.name)
        if mine != (stored.value.offers if stored else ()):
            key = f"offers/{node.name}"
            self.write(key, encode(Offers(mine)), self.view.revision_of(key), (node.name, node.life))

    # The leader.

    def leads(self) -> bool:
        """Somebody who is alive leads."""
        leader = self.view.leader
        return bool(leader and self.is_life(leader.value.node, leader.value.incarnation))

    def is_life(self, name: str, incarnation: str) -> bool:
        node = self.nodes.get(name)
        return bool(node and node.alive and str(node.life) == incarnation)

    def campaign(self, name: str) -> None:
        life = self.nodes[name].life
        self.write("leader", encode(Leader(name, str(life))), 0, (name, life))

    def decisions(self) -> list[Write]:
        return decide(self.view, self.facts, covers)

    def carry_out(self, writes: list[Write], created: int) -> None:
        """What a leader decided, maybe a while ago: fenced by its leadership, record by record."""
        for write in writes:
            held = all(self.view.revision_of(key) == revision for key, revision in write.guards)
            before = self.view.copy()
            fenced = self.view.created_of("leader") != created or not held
            if fenced or not self.write(write.key, write.data, write.expected):
                return
            assert_decision(before, self.view, self.facts, write)
            self.decided(write)

    def decided(self, write: Write) -> None:
        newest = self.view.newest
        if write.key == "publication" and newest and self.view.publication:
            lent = self.view.publication.value.taken
            found = {r.chunks[h] for n in self.nodes.values() for r in n.ranks.values() if r.offer and
                     lent.get(r.key) == r.offer.id for h in r.halves}  # fmt: skip
            assert len(found) <= 1, f"a publication of several steps: {found}"
            self.weights[newest] = found.pop() if found else -1

    # What could happen next.

    def steps(self) -> list[Step]:
        """Steps without faults, those of the leader first; empty when everything has come to rest."""
        found: list[Step] = []
        if self.view.leader is None:
            found += [
                (f"{n} campaigns", lambda n=n: self.campaign(n)) for n in sorted(self.nodes) if self.nodes[n].alive
            ]
        elif self.leads() and (writes := self.decisions()):
            created = self.view.created_of("leader")
            found.append((f"decide {writes[0].key}", lambda: self.carry_out(writes[:1], created)))
        for name in sorted(self.nodes):
            step = self.node_step(self.nodes[name]) if self.nodes[name].alive else None
            found += [step] if step else []
        return found

    def node_step(self, node: Node) -> Step | None:
        """The next thing that a daemon has to do."""
        for rank in node.ranks.values():
            if rank.offer and (outcome := loan(self.view, rank.offer, 0.0, 1e9).outcome):
                return f"{rank.key} {outcome}", lambda rank=rank: self.release(node, rank)
        for key in self.excluded(node):
            return f"{key} gets a new mover", lambda key=key: self.kill_mover(node.name, key)
        for replica in sorted(self.view.lanes):
            step = self.lane_step(node, replica, self.view.lanes[replica].value)
            if step:
                return f"{node.name}/{replica} {step[0]}", step[1]
        return None

    def excluded(self, node: Node) -> list[str]:
        """Ranks here whose present mover a lane suspects."""
        found = [e for stored in self.view.lanes.values() for e in stored.value.excluded]
        return sorted(
            e.slot.key for e in found if e.slot.node == node.name and not e.passing and not e.parked
            and self.view.live(e.slot) and self.current(e.slot)
        )  # fmt: skip

    def release(self, node: Node, rank: Rank) -> None:
        rank.offer = None
        self.offers(node)

    def lane_step(self, node: Node, replica: str, lane: Lane) -> Step | None:
        driver = node.drivers.setdefault(replica, Driver())
        token = self.view.lanes[replica].revision
        if driver.token != token:
            return "turn", lambda: self.turn(node, replica, token)
        if node.name not in lane.nodes:
            return None
        now = stage(self.view, replica)
        step = self.act(node, driver, lane, now.name, now.publication)
        return step or self.speak(node, driver, lane)

    def turn(self, node: Node, replica: str, token: int) -> None:
        lane = self.view.lanes[replica].value
        mine: list[Slot | SlotId] = [s for s in (*lane.members, *lane.sources) if s.node == node.name]
        node.drivers[replica] = Driver(token, all(self.current(slot) for slot in mine))

    def rank(self, slot: Slot | SlotId) -> Rank | None:
        return self.nodes[slot.node].ranks.get(slot.key)

    def current(self, slot: Slot | SlotId) -> bool:
        rank = self.rank(slot)
        return bool(rank and rank.alive and rank.life == slot.mover)

    def act(self, node: Node, driver: Driver, lane: Lane, name: str, target: PubId | None) -> Step | None:
        if target is None or not driver.built or driver.failed:
            return None
        mine = [rank for slot in lane.members if slot.node == node.name and (rank := self.rank(slot)) and rank.alive]
        if name == "prepare" and driver.prepared != target and self.can_prepare(node, lane, target):
            return "prepare", lambda: self.prepare(driver, mine, target)
        if name == "transfer" and driver.prepared == target and not driver.declared:
            return self.transfer(driver, lane, mine, target)
        if name == "commit" and lane.lead.node == node.name:
            return "commit", lambda: self.commit(node, lane, target)
        if name == "committed":
            return self.follow(driver, lane, mine, target)
        return None

    def can_prepare(self, node: Node, lane: Lane, target: PubId) -> bool:
        sources = [rank for slot in lane.sources if slot.node == node.name and (rank := self.rank(slot))]
        return all(self.lends(rank, target) for rank in sources)

    def lends(self, rank: Rank, target: PubId) -> bool:
        if not rank.trains:
            return rank.holds(target)
        return bool(rank.offer and published(self.view, rank.offer) == target)

    def prepare(self, driver: Driver, mine: list[Rank], target: PubId) -> None:
        for rank in mine:
            if not rank.holds(target) and not (rank.receiving and rank.lent_for == target):
                rank.dirty, rank.receiving, rank.lent_for, rank.complete = True, True, target, None
                rank.landed = set()
                rank.chunks = dict.fromkeys(rank.halves, -2)
        driver.prepared, driver.declared = target, False

    def transfer(self, driver: Driver, lane: Lane, mine: list[Rank], target: PubId) -> Step | None:
        for rank in mine:
            for half in rank.halves:
                if not rank.holds(target) and half not in rank.landed:
                    return self.copy_step(driver, lane, rank, half, target)
        return "verify", lambda: self.verify(driver, mine, target)

    def copy_step(self, driver: Driver, lane: Lane, rank: Rank, half: str, target: PubId) -> Step | None:
        slots = [s for s in lane.sources if self.current(s) and (r := self.rank(s)) and half in r.halves]
        sources = [found for slot in slots if (found := self.rank(slot)) and self.nodes[slot.node].alive]
        good = [source for source in sources if self.lends(source, target)]
        if good:
            return "copy", lambda: self.copy(driver, lane, good[0], rank, half)
        if sources:  # its loan word has changed: a failed edge
            return "fail", lambda: self.fail(driver, (sources[0].key, rank.key), "the loan word changed")
        return None

    def copy(self, driver: Driver, lane: Lane, source: Rank, rank: Rank, half: str) -> None:
        assert_i5_quiet_after_the_turn(driver.token, self.view.lanes[lane.replica].revision)
        rank.chunks[half] = source.chunks[half]
        rank.landed.add(half)

    def fail(self, driver: Driver, edge: tuple[str, ...], reason: str) -> None:
        driver.edge, driver.failed = edge, reason

    def verify(self, driver: Driver, mine: list[Rank], target: PubId) -> None:
        for rank in mine:
            rank.complete = target
        driver.declared = True

    def commit(self, node: Node, lane: Lane, target: PubId) -> None:
        """The lead's hook takes the ticket, then the store is told: `follow` is the same step for its mates."""
        lead = self.rank(lane.lead)
        if lead is None or not all(self.view.slots().get(slot.key) == slot for slot in lane.members):
            return
        if lead.served != target:
            self.serve(lead, target)
            return
        refit, token = self.view.refits[lane.replica].value, self.view.lanes[lane.replica].revision
        self.check_commit(lane, target)
        record = Commit(*target, refit.step, token, lane.incarnations, refit.number)
        self.write(f"commits/{lane.replica}", encode(record), self.view.revision_of(f"commits/{lane.replica}"))

    def check_commit(self, lane: Lane, target: PubId) -> None:
        for slot in lane.members:
            rank = self.rank(slot)
            assert rank is not None
            if rank.alive:  # a death that nobody has noticed yet is no commit of a dead rank's bytes
                assert_i2_commits_are_whole(slot, rank.info().incarnation, rank.chunks, self.weights[target])
        assert_i10_one_plan(self.view.lane_acks(lane.replica, lane.nodes))

    def serve(self, rank: Rank, target: PubId) -> None:
        assert_i1_no_mix(rank.key, rank.chunks, self.weights[target])
        life = rank.info().incarnation
        assert_i3_never_back(rank.key, self.served.get(life, NONE), target)
        self.served[life] = rank.served = target
        rank.dirty = rank.receiving = False
        rank.lent_for = None

    def follow(self, driver: Driver, lane: Lane, mine: list[Rank], target: PubId) -> Step | None:
        for rank in mine:
            if rank.receiving and rank.lent_for == target:
                return "commit event", lambda rank=rank: self.serve(rank, target)
            if rank.dirty or rank.served < target:
                return self.void(driver, lane, rank)
        return None

    def void(self, driver: Driver, lane: Lane, rank: Rank) -> Step | None:
        """A rank that missed its commit: first our ack is taken back, then the commit."""
        if driver.prepared is not None:
            return ("taken back", lambda: self.fail(driver, (), "taken back")) if not driver.failed else None
        key = f"commits/{lane.replica}"
        return "void", lambda: self.write(key, None, self.view.revision_of(key)) and None

    def speak(self, node: Node, driver: Driver, lane: Lane) -> Step | None:
        ack = self.ack(node, driver, lane)
        key = f"acks/{lane.replica}/{node.name}"
        if ack is None or self.view.ack(lane.replica, node.name) == ack or f"members/{node.name}" not in self.leases:
            return None
        return f"ack {ack.phase}", lambda: self.say(node, driver, lane.replica, key, ack)

    def say(self, node: Node, driver: Driver, replica: str, key: str, ack: Ack) -> None:
        assert_i4_acks_are_of_the_token(ack.token, driver.token, self.view.lanes[replica].revision)
        self.write(key, encode(ack), self.view.revision_of(key), (node.name, node.life))

    def ack(self, node: Node, driver: Driver, lane: Lane) -> Ack | None:
        keys = [slot.key for slot in lane.members if slot.node == node.name]
        mine = [node.ranks[key] for key in keys if node.ranks[key].alive]
        served = min((NONE if rank.dirty else rank.served for rank in mine), default=NONE)
        digest = "+".join(slot.key for slot in (*lane.members, *lane.sources)) + "?" * node.dissents
        if driver.failed:
            return Ack(driver.token, digest, "failed", 0, 0, {}, served, driver.edge, driver.failed)
        if not driver.built:
            return None
        if driver.prepared is None:
            return Ack(driver.token, digest, "built", 0, 0, {}, served)
        return Ack(driver.token, digest, "verified" if driver.declared else "prepared", *driver.prepared, {}, served)
