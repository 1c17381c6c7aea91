"""A picture of all records of one job, kept by put and delete; what every decision reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from refitd.epoch.codec import decode
from refitd.epoch.records import (
    Ack,
    Claim,
    Commit,
    Control,
    Drain,
    Generation,
    Lane,
    Leader,
    Member,
    Offers,
    Parked,
    Planner,
    PubId,
    Publication,
    RankInfo,
    Refit,
    ReportRecord,
    Slot,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A record with its revisions in the store."""

    value: T
    created: int
    revision: int


_SINGLES: dict[str, type] = {
    "leader": Leader, "generation": Generation, "planner": Planner, "control": Control, "publication": Publication,
}  # fmt: skip
_TABLES: dict[str, type] = {
    "members": Member, "offers": Offers, "lanes": Lane, "refits": Refit,
    "acks": Ack, "commits": Commit, "reports": ReportRecord, "drains": Drain, "parked": Parked, "devices": Claim,
}  # fmt: skip


@dataclass
class View:
    """Records by kind, keyed by what follows the kind: ``acks`` by "replica/node", ``reports`` by revision."""

    leader: Stored[Leader] | None = None
    generation: Stored[Generation] | None = None
    planner: Stored[Planner] | None = None
    control: Stored[Control] | None = None
    publication: Stored[Publication] | None = None
    members: dict[str, Stored[Member]] = field(default_factory=dict)
    offers: dict[str, Stored[Offers]] = field(default_factory=dict)
    lanes: dict[str, Stored[Lane]] = field(default_factory=dict)
    refits: dict[str, Stored[Refit]] = field(default_factory=dict)
    acks: dict[str, Stored[Ack]] = field(default_factory=dict)
    commits: dict[str, Stored[Commit]] = field(default_factory=dict)
    reports: dict[str, Stored[ReportRecord]] = field(default_factory=dict)
    drains: dict[str, Stored[Drain]] = field(default_factory=dict)
    parked: dict[str, Stored[Parked]] = field(default_factory=dict)
    devices: dict[str, Stored[Claim]] = field(default_factory=dict)
    _slots: tuple[tuple[tuple[str, int], ...], dict[str, Slot]] | None = field(default=None, compare=False, repr=False)
    changes: int = field(default=0, compare=False)  # grows with every record that changes

    def put(self, key: str, data: bytes, created: int, revision: int) -> bool:
        """Take a record in; False where it is unknown or not newer. Raises ProtocolError on a broken one."""
        kind, _, name = key.partition("/")
        table = _SINGLES if not name else _TABLES
        if kind not in table or revision <= self.revision_of(key):
            return False
        stored: Stored[object] = Stored(decode(table[kind], data, key), created, revision)
        if name:
            getattr(self, kind)[name] = stored
        else:
            setattr(self, kind, stored)
        self.changes += 1
        return True

    def delete(self, key: str, revision: int) -> bool:
        """Forget a record that was deleted at ``revision``; False where a newer one is here."""
        if not 0 < self.revision_of(key) < revision:
            return False
        kind, _, name = key.partition("/")
        if name:
            del getattr(self, kind)[name]
        else:
            setattr(self, kind, None)
        self.changes += 1
        return True

    def revision_of(self, key: str) -> int:
        """mod_revision of a record, 0 where there is none."""
        stored = self._find(key)
        return stored.revision if stored else 0

    def created_of(self, key: str) -> int:
        """create_revision of a record, 0 where there is none."""
        stored = self._find(key)
        return stored.created if stored else 0

    def keys(self) -> set[str]:
        """Keys of all records, relative to the job."""
        singles = {name for name in _SINGLES if getattr(self, name)}
        return singles | {f"{kind}/{name}" for kind in _TABLES for name in getattr(self, kind)}

    def _find(self, key: str) -> Stored[object] | None:
        kind, _, name = key.partition("/")
        if name:
            table: dict[str, Stored[object]] = getattr(self, kind, {}) if kind in _TABLES else {}
            return table.get(name)
        single: Stored[object] | None = getattr(self, kind) if kind in _SINGLES else None
        return single

    # What decisions ask for.

    @property
    def newest(self) -> PubId | None:
        """The newest publication of the current generation."""
        if not self.publication or not self.generation:
            return None
        if self.publication.value.generation != self.generation.value.number:
            return None
        return PubId(self.publication.value.generation, self.publication.revision)

    def ranks(self) -> Iterator[tuple[Stored[Member], RankInfo]]:
        """All registered ranks, by node and key."""
        for node in sorted(self.members):
            for info in sorted(self.members[node].value.ranks, key=lambda rank: rank.key):
                yield self.members[node], info

    def slots(self) -> dict[str, Slot]:
        """Live slots by rank key. A key claimed by two nodes belongs to the member that joined last."""
        known = tuple((node, stored.revision) for node, stored in self.members.items())
        if self._slots is None or self._slots[0] != known:
            self._slots = known, self._live_slots()
        return self._slots[1].copy()

    def _live_slots(self) -> dict[str, Slot]:
        found: dict[str, Slot] = {}
        for member, info in self.ranks():
            slot = slot_of(member, info)
            if slot.mover and (info.key not in found or found[info.key].member < slot.member):
                found[info.key] = slot
        return found

    def replicas(self) -> dict[str, dict[int, RankInfo]]:
        """Registered engine ranks by replica and rank."""
        found: dict[str, dict[int, RankInfo]] = {}
        for _member, info in self.ranks():
            if info.side == "engine":
                found.setdefault(info.group, {})[info.rank] = info
        return found

    def open_lanes(self) -> dict[str, Lane]:
        """Lanes that have members, by replica."""
        return {name: stored.value for name, stored in sorted(self.lanes.items()) if stored.value.members}

    def ack(self, replica: str, node: str) -> Ack | None:
        stored = self.acks.get(f"{replica}/{node}")
        return stored.value if stored else None

    def lane_acks(self, replica: str, nodes: tuple[str, ...]) -> list[Ack | None]:
        """Acks of the nodes under the lane's present token; None for a node that has not said a word under it."""
        token = self.lanes[replica].revision
        acks = [self.ack(replica, node) for node in nodes]
        return [ack if ack and ack.token == token else None for ack in acks]


def slot_of(member: Stored[Member], info: RankInfo) -> Slot:
    """The slot that a registered rank is in now."""
    return Slot(info.key, member.value.node, member.created, info.incarnation, info.mover, info.digest)
