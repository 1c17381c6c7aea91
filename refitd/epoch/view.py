"""A picture of all records of one job, kept by put and delete; what every decision reads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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
    Runs,
    Slot,
    SlotId,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A record with its revisions in the store."""

    value: T
    created: int
    revision: int


_SINGLES: dict[str, type] = {
    "leader": Leader, "generation": Generation, "runs": Runs, "planner": Planner, "control": Control,
    "publication": Publication,
}  # fmt: skip
_TABLES: dict[str, type] = {
    "members": Member, "offers": Offers, "lanes": Lane, "refits": Refit,
    "acks": Ack, "commits": Commit, "reports": ReportRecord, "drains": Drain, "parked": Parked, "devices": Claim,
}  # fmt: skip

Memo = dict[Any, tuple[tuple[object, ...], Any]]
Row = tuple[Stored[Member], RankInfo, Slot, SlotId]  # one registered rank


@dataclass
class View:
    """Records by kind, keyed by what follows the kind: ``acks`` by "replica/node", ``reports`` by revision."""

    leader: Stored[Leader] | None = None
    generation: Stored[Generation] | None = None
    runs: Stored[Runs] | None = None
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
    changes: int = field(default=0, compare=False)  # grows with every record that changes
    versions: dict[str, int] = field(default_factory=dict, compare=False, repr=False)  # the last change of each kind
    _acks: dict[str, dict[str, Stored[Ack]]] = field(default_factory=dict, compare=False, repr=False)  # by replica
    _by_node: dict[str, list[Row]] = field(default_factory=dict, compare=False, repr=False)  # of members looked at
    _memo: Memo = field(default_factory=dict, compare=False, repr=False)
    _before: Memo = field(default_factory=dict, compare=False, repr=False)  # what was asked for at the last publication

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
        self._changed(kind, name)
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
        self._changed(kind, name)
        return True

    def _changed(self, kind: str, name: str) -> None:
        self.changes += 1
        self.versions[kind] = self.changes
        if kind == "publication":
            self._before, self._memo = self._memo, {}
        elif kind == "acks":
            self._index_ack(name)
        elif kind == "lanes":
            self.versions[f"lanes/{name}"] = self.changes
        elif kind == "members":
            self._by_node.pop(name, None)

    def _index_ack(self, name: str) -> None:
        replica, _, node = name.partition("/")
        self.versions[f"acks/{replica}"] = self.changes
        acks = self._acks.setdefault(replica, {})
        if name in self.acks:
            acks[node] = self.acks[name]
        elif acks.pop(node, None) and not acks:
            del self._acks[replica]

    def memo(self, name: object, kinds: tuple[str, ...], compute: Callable[[], T]) -> T:
        """What ``compute`` gives, kept until a record of one of the kinds changes.

        ``acks/<replica>`` and ``lanes/<replica>`` are kinds too. Forgotten, too, once two publications have come since
        it was asked for last: names have publications in them, and each may stand for lists of all ranks.
        """
        known = tuple(map(self.versions.get, kinds))
        found = self._memo.get(name) or self._before.get(name)
        if found is None or found[0] != known:
            found = known, compute()
        self._memo[name] = found
        value: T = found[1]
        return value

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

    def ranks(self) -> list[tuple[Stored[Member], RankInfo]]:
        """All registered ranks, by node and key: each once, where its last process is."""
        return self.memo("ranks", ("members",), lambda: [row[:2] for row in self._rows().values()])

    def later_on(self, key: str, node: str, claim: int) -> str:
        """The other node where a later process of a rank is than the one that came to ``node`` at ``claim``; empty
        where that one is the last, or has no claim yet."""
        owner = self.owner(key)
        if not claim or owner is None or owner[0].value.node == node:
            return ""
        ours = claim, self.created_of(f"members/{node}")
        return owner[0].value.node if _precedence(*owner) > ours else ""

    def owner(self, key: str) -> tuple[Stored[Member], RankInfo] | None:
        """The member that has a rank's last process, and that process; None where the rank is not registered."""
        row = self._rows().get(key)
        return row[:2] if row else None

    def _rows(self) -> Mapping[str, Row]:
        return self.memo("rows", ("members",), self._last_of_each)

    def _last_of_each(self) -> dict[str, Row]:
        found: dict[str, Row] = {}
        for row in itertools.chain.from_iterable(map(self._rows_of, sorted(self.members))):
            before = found.get(row[1].key)
            if before is None or _precedence(*before[:2]) < _precedence(*row[:2]):
                found[row[1].key] = row
        return found

    def _rows_of(self, node: str) -> list[Row]:
        if node not in self._by_node:
            self._by_node[node] = _rows_in(self.members[node])
        return self._by_node[node]

    def slots(self) -> Mapping[str, Slot]:
        """Live slots by rank key."""
        return self.memo("slots", ("members",), self._live_slots)[0]

    def ids(self) -> Mapping[str, SlotId]:
        """The names of the live slots by rank key, made once for each member record."""
        return self.memo("slots", ("members",), self._live_slots)[1]

    def live(self, slot: SlotId | Slot) -> Slot | None:
        """The slot with all its facts while it lives, None afterwards."""
        found = self.slots().get(slot.key)
        return (
            found if found and (found.node, found.member, found.mover) == (slot.node, slot.member, slot.mover) else None
        )

    def _live_slots(self) -> tuple[dict[str, Slot], dict[str, SlotId]]:
        rows = [(key, slot, name) for key, (_member, _info, slot, name) in self._rows().items() if slot.mover]
        return {key: slot for key, slot, _name in rows}, {key: name for key, _slot, name in rows}

    def replicas(self) -> Mapping[str, dict[int, RankInfo]]:
        """Registered engine ranks by replica and rank, those of one deployment: of the size that its rank 0 says.

        Ranks of another size are left of a deployment before, or come before their rank 0 does.
        """
        return self.memo("replicas", ("members",), self._replicas)

    def _replicas(self) -> dict[str, dict[int, RankInfo]]:
        found: dict[str, dict[int, RankInfo]] = {}
        for _member, info in self.ranks():
            if info.side == "engine":
                found.setdefault(info.group, {})[info.rank] = info
        for replica, ranks in found.items():
            if 0 in ranks:
                found[replica] = {rank: info for rank, info in ranks.items() if info.world == ranks[0].world}
        return found

    def open_lanes(self) -> Mapping[str, Lane]:
        """Lanes that have members, by replica."""
        return self.memo("open_lanes", ("lanes",), self._open_lanes)

    def _open_lanes(self) -> dict[str, Lane]:
        return {name: stored.value for name, stored in sorted(self.lanes.items()) if stored.value.members}

    def came_with(self, key: str) -> PubId:
        """The publication that a rank's client served when it registered."""
        served = self.memo("came_with", ("members",), lambda: {info.key: info.served for _m, info in self.ranks()})
        return PubId(*served.get(key, (0, 0)))

    def ack(self, replica: str, node: str) -> Ack | None:
        stored = self._acks.get(replica, {}).get(node)
        return stored.value if stored else None

    def lane_acks(self, replica: str, nodes: tuple[str, ...]) -> list[Ack | None]:
        """Acks of the nodes under the lane's present token; None for a node that has not said a word under it."""
        token, acks = self.lanes[replica].revision, self._acks.get(replica, {})
        found = [acks.get(node) for node in nodes]
        return [stored.value if stored and stored.value.token == token else None for stored in found]

    def acked(self) -> list[str]:
        """Replicas that somebody has said something of."""
        return list(self._acks)

    def ackers(self, replica: str) -> set[str]:
        """Nodes that have said something of a replica's lane, under whatever token."""
        return set(self._acks.get(replica, ()))

    def has_failed(self, replica: str) -> bool:
        """Whether any node has said that the lane failed, under whatever token."""
        kinds = (f"acks/{replica}",)
        acks = self._acks.get(replica, {})
        return self.memo(("failed", replica), kinds, lambda: any(s.value.phase == "failed" for s in acks.values()))

    def copy(self) -> View:
        """A picture that shares the records, and nothing else."""
        other = copy.copy(self)
        for kind in (*_TABLES, "versions", "_by_node"):
            setattr(other, kind, dict(getattr(self, kind)))
        other._memo, other._before = dict(self._memo), dict(self._before)
        other._acks = {replica: dict(acks) for replica, acks in self._acks.items()}
        return other


def _precedence(member: Stored[Member], info: RankInfo) -> tuple[int, int]:
    """Of two processes of a rank the later one counts; of two that came at once, the younger member's."""
    return info.claim, member.created


def _rows_in(member: Stored[Member]) -> list[Row]:
    slots = [(info, slot_of(member, info)) for info in sorted(member.value.ranks, key=lambda rank: rank.key)]
    return [(member, info, slot, slot.id) for info, slot in slots]


def slot_of(member: Stored[Member], info: RankInfo) -> Slot:
    """The slot that a registered rank is in now."""
    return Slot(info.key, member.value.node, member.created, info.incarnation, info.mover, info.digest)
