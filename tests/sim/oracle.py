"""What must always hold, asserted by name at every event that could break it. It sees everything, at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from refitd.daemon.paths import Paths
from refitd.demo.chaos.witness import Witness
from refitd.epoch.records import PubId, life_of
from refitd.epoch.stage import stage
from refitd.hook.messages import Ticket
from refitd.store.base import Event, Put

from .etcd import key_of
from .memory import Mount

if TYPE_CHECKING:
    from .client import Message
    from .engine import SimEngine
    from .lane import SimLane
    from .trainer import SimTrainer
    from .world import World

NONE = (0, 0)
_ACTS = (" took its memory back", " lends what it held")  # of a rank, for which its node fails a token


class Violation(AssertionError):
    """An invariant does not hold."""


class Oracle:
    """The true records, the true memory, and what was said and served."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.witness = Witness(world.job, self.fault, lambda: not world.mixed_planners)
        self.view, self._key = self.witness.view, Paths(world.job).key
        self.weights: dict[PubId, int] = {}
        self.told: dict[PubId, set[str]] = {}  # publications that a trainer was told are committed, and by whom
        self.commits, self.turns_of = 0, Counter[str]()
        self.states: Counter[str] = Counter()
        self._offers: dict[tuple[str, str, int], int] = {}
        self._served: dict[str, tuple[int, int]] = {}
        self._reports: dict[int, Message] = {}
        self._lives: dict[int, Mapping[str, str]] = {}  # incarnations of members, by the token of their lane

    def fault(self, name: str, text: str) -> None:
        """Invariant ``name`` is broken."""
        self.world.violate(f"{name}: {text}")

    def expect(self, holds: bool, name: str, text: str) -> None:
        if not holds:
            self.fault(name, text)

    # The records, as they are written.

    def changed(self, revision: int, events: Sequence[Event]) -> None:
        """Before anybody else hears of it."""
        for event in events:
            self.witness.take(event)
            key, written = self._key(key_of(event)), isinstance(event, Put)
            if written:
                self._written(key)
            self.world.say("record", key=key, revision=revision, gone=not written)

    def assert_only_the_leader_decides(self, key: str) -> None:
        """A decision counts only from the daemon that holds the leadership at that moment."""
        writer, leader = self.world.etcd.writer, self.view.leader
        if writer is not None:
            node = leader.value.node if leader else "nobody"
            self.expect(writer.host == node, "leadership", f"{writer.host} writes {key}, but {node} leads")

    def _written(self, key: str) -> None:
        kind, _, name = key.partition("/")
        if kind in ("generation", "publication", "lanes", "refits"):
            self.assert_only_the_leader_decides(key)
        if kind == "commits":
            self.assert_i2_commit(name)
        elif kind == "publication":
            self._published()
        elif kind == "lanes":
            self.turns_of[name] += 1
            self._lives[self.view.lanes[name].revision] = self.view.lanes[name].value.incarnations
        elif kind == "acks":
            self._acked(*name.split("/"))
        elif kind == "parked":
            self.world.counts["parked"] += 1

    def _acked(self, replica: str, node: str) -> None:
        """A node that fails a token for what a rank of its did: the rank did that."""
        ack = self.view.ack(replica, node)
        act = next((act for act in _ACTS if ack and ack.phase == "failed" and ack.reason.endswith(act)), "")
        if ack is None or not act:
            return
        self.world.counts[f"fails:{act}"] += 1
        engine = self.world.find_client(ack.reason.removesuffix(act))
        if engine is not None and not engine.process.dead:
            self.expect(
                engine.may_be_failed(act), "needless", f"{node} fails {ack.token} of {replica}, as {ack.reason}"
            )

    def _published(self) -> None:
        stored = self.view.publication
        assert stored is not None
        found = {self._offers[offer.key, offer.life, offer.seq] for offer in stored.value.offers}
        self.expect(len(found) == 1, "I1", f"a publication of several weights: {found}")
        self.weights[PubId(stored.value.generation, stored.revision)] = found.pop()

    def assert_i2_commit(self, replica: str) -> None:
        """Every rank that is alive holds the whole publication, in the life that verified it."""
        commit = self.view.commits[replica].value
        self.commits += 1
        weights = self.weights.get(commit.id)
        self.expect(weights is not None, "I2", f"{replica} commits {commit.id}, which nobody published")
        for key, incarnation in commit.incarnations.items():
            client = self.world.find_client(key)
            if client is None or client.incarnation != incarnation or client.process.dead or weights is None:
                continue  # a death that nobody has noticed yet
            held = [m for m in (client.memory, client.shadow) if m is not None and m.is_whole(weights)]
            self.expect(bool(held), "I2", f"{key} does not hold {commit.id}: {client.memory.contents()}")

    # What clients do.

    def offered(self, trainer: SimTrainer, seq: int, step: int, weights: int) -> None:
        self._offers[trainer.key, life_of(trainer.incarnation), seq] = weights

    def reported(self, trainer: SimTrainer, seq: int, step: int, report: Message) -> None:
        """One stored report, the same on every rank."""
        if not report["revision"]:
            return
        first = self._reports.setdefault(report["revision"], report)
        self.expect(first == report, "I10", f"{trainer.key} got another report of {report['revision']}")
        publication = PubId(report["generation"], report["revision"])
        if report["committed"]:
            self.told.setdefault(publication, set()).update(report["committed"])

    def switches(self, engine: SimEngine, ticket: Ticket) -> None:
        """A rank has new weights and says that it serves them."""
        publication = PubId(ticket.generation, ticket.revision)
        weights = self.weights.get(publication)
        whole = weights is not None and engine.memory.is_whole(weights)
        self.expect(whole, "I1", f"{engine.key} serves {publication} of {engine.memory.contents()}, not {weights}")
        self.assert_i3_never_back(engine, publication)
        self.world.counts["switches"] += 1

    def assert_i3_never_back(self, engine: SimEngine, publication: PubId) -> None:
        name = engine.incarnation if engine.of.replaced else engine.key  # others answer for the replica now
        last = self._served.get(name, NONE)
        self.expect(publication >= last, "I3", f"{engine.key} serves {publication} after {last}")
        self._served[name] = publication

    def serves(self, engine: SimEngine) -> None:
        """An answer is made: every rank of the replica serves the same whole publication."""
        publication = PubId(*engine.publication)
        weights = self.weights.get(publication)
        whole = weights is not None and engine.memory.is_whole(weights)
        self.expect(whole, "I1", f"{engine.key} answers from {engine.memory.contents()} as {publication}")
        mates = [mate for mate in engine.of.ranks.values() if not mate.process.dead]
        if len(mates) == engine.of.world_size and not any(mate.page.dirty for mate in mates):
            found = {mate.publication for mate in mates if any(mate.publication)}
            self.expect(len(found) == 1, "I1", f"replica {engine.of.name} answers from several publications: {found}")
        self.world.counts["answers"] += 1

    def part(self, engine: SimEngine, ticket: Ticket) -> None:
        """Of a replica that was told to apply a publication all ranks have it in their shadows, or none. Where one came
        anew, or another run leads, or the ticket was of a lane with an older deployment's process in its stead, as no
        daemon had met it yet, that cannot be."""
        replica = engine.of
        same = replica.ordered == replica.ranks and not any(e.process.dead for e in replica.ranks.values())
        lives = {mate.key: mate.incarnation for mate in replica.ranks.values()}
        same = same and self._lives[ticket.token] == lives
        leads = self.view.generation is not None and self.view.generation.value.number == ticket.generation
        if same and leads and not replica.replaced:
            text = f"of {replica.name} ranks {replica.applied} apply {ticket}, and {replica.refused} cannot"
            self.expect(not (replica.applied and replica.refused), "frozen", text)

    # What movers do.

    def writes(self, lane: SimLane, destination: Mount) -> None:
        """Bytes are about to be written for a lane."""
        node, owner = lane.mover.machine.name, destination.memory.owner
        acked = self.witness.acked.get((lane.name, node), 0)
        self.expect(acked <= lane.token, "I5", f"{node} writes for {lane.name} under {lane.token}, acked {acked}")
        if owner.process.dead:
            return
        shadow = destination.memory is owner.shadow
        safe = owner.page.shadow_publication == NONE if shadow else bool(owner.page.dirty)
        self.expect(safe, "I1", f"{owner.key} is written while it serves{' its shadow' if shadow else ''}")

    # The end.

    def newest(self) -> PubId | None:
        return self.view.newest

    def lagging(self) -> list[str]:
        """Ranks of live replicas that do not serve the newest publication."""
        newest = self.newest()
        return [
            f"{engine.key}{' dirty' if engine.page.dirty else ''} at {engine.publication}"
            for replica in self.world.replicas.values()
            if replica.whole() and not replica.retired
            for engine in replica.ranks.values()
            if newest is None or engine.page.dirty or engine.publication != newest
        ]

    def best(self) -> PubId:
        """The newest publication that a rank of a live replica serves."""
        whole = [replica for replica in self.world.replicas.values() if replica.whole() and not replica.retired]
        return max((engine.publication for replica in whole for engine in replica.ranks.values()), default=NONE)

    def reached(self) -> bool:
        """Whether some live replica serves what a trainer was told is committed, or something newer. One that has taken
        the ticket of its shadow does so a moment after that."""
        return self.best() >= max(self.told, default=NONE)

    def assert_nothing_lost(self) -> None:
        """What a trainer was told is committed, some live replica has, or something newer."""
        best = self.best()
        for publication in self.told:
            self.expect(best >= publication, "lost", f"{publication}, and the newest that anybody has is {best}")

    def lanes(self) -> dict[str, str]:
        """The stage of every lane in the true records."""
        return {replica: stage(self.view, replica).name for replica in sorted(self.view.lanes)}

    def why(self) -> str:
        found = [f"{replica}: {stage(self.view, replica)}" for replica in sorted(self.view.lanes)]
        leader = self.view.leader.value.node if self.view.leader else None
        return f"newest {self.newest()}, leader {leader}, " + "; ".join(found)
