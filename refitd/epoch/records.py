"""What the store holds below ``/refitd/<job>/``. docs/design.md says who writes which key, and when.

Names: a *slot* is a rank in one of its lives: it is the same slot only while the daemon's membership, the client
process and the mover are the same. A lane that names an old slot must turn. Movers are counted for each key as long as
a daemon lives, and a new client gets a new mover: (key, node, member, mover) names one life, and long records keep to
that; fields marked ``packed`` are written as groups of such names (`refitd.epoch.packed`).
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from refitd.epoch.identity import ByIdentity
from refitd.errors import InputError

PHASES = ("built", "prepared", "verified")
LIFE = 8  # characters that tell the lives of one client apart
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


class PubId(NamedTuple):
    """A publication: ordered by generation, then by the store revision at which it was made."""

    generation: int
    revision: int


def check_name(field: str, name: str) -> str:
    """A job, run, replica or node name as part of a key. Raises InputError."""
    if not _NAME.fullmatch(name):
        raise InputError(field, "1 to 128 letters, digits or ._:@- starting with a letter or digit", repr(name)[:160])
    return name


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank that is registered on a node.

    ``mover`` counts the lives of its mover; 0 means that none is alive. ``lends``: its daemon has its memory at hand,
    which it has not from a client that only came back, until that receives or publishes again. ``served``: the
    publication that the client said it serves when it registered, (0, 0) for none. ``device``: its weights are to be
    on a GPU. ``claim``: a revision of the store when the process came; where two nodes have the rank, as when a process
    hangs and another was started elsewhere, the later one counts.
    """

    key: str
    side: str
    group: str
    rank: int
    world: int
    incarnation: str
    digest: str
    mode: str
    mover: int
    lends: bool = True
    served: tuple[int, int] = (0, 0)
    device: bool = False
    claim: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One daemon in a job.

    ``address`` is host:port of its data port, ``boot`` its kernel's boot id, ``planners`` the plan versions it can
    compute, ``lock`` the lock file that it holds (device and inode): two lives with the same lock follow each other.
    ``torch``, ``nccl``, ``driver`` are versions, empty for what it cannot use; ``transport`` is what it was told to
    take between hosts: auto, tcp or nccl.
    """

    node: str
    domain: str
    address: str
    incarnation: str
    boot: str
    planners: tuple[int, ...]
    ranks: tuple[RankInfo, ...]
    lock: str = ""
    torch: str = ""
    nccl: str = ""
    driver: str = ""
    transport: str = "auto"


@functools.lru_cache(65536)
def life_of(incarnation: str) -> str:
    """A short name for an incarnation: `LIFE` hexadecimal digits of its BLAKE2s digest."""
    return hashlib.blake2s(incarnation.encode(), digest_size=LIFE // 2).hexdigest()


class OfferId(NamedTuple):
    """An offer as a publication names it; ``life`` is `life_of` the client's incarnation."""

    key: str
    life: str
    seq: int
    step: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A trainer rank's open loan: its ``seq``-th publish, at training step ``step``."""

    key: str
    incarnation: str
    run: str
    seq: int
    step: int

    @property
    def id(self) -> OfferId:
        return OfferId(self.key, life_of(self.incarnation), self.seq, self.step)


@dataclass(frozen=True, slots=True)
class Offers:
    """The open offers of one node."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Leader:
    """The member that serialises decisions."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Generation:
    """One complete run of the trainer group. Runs in ``past`` never open again."""

    number: int
    run: str
    past: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of the trainer group that have not led yet, in the order in which a leader met their first ranks."""

    order: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Planner:
    """The version of the planner that every node of the job uses, and why this one."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Control:
    """What operators want of the job.

    ``paused``: nothing new is published or begun. ``limit``: bytes of payload a second that each daemon may send over
    the network for this job, None for no limit.
    """

    paused: bool = False
    limit: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """A daemon in one of its lives wants to leave: lanes do without it as soon as they can."""

    node: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Parked:
    """A node that no lane uses: it comes and goes (``flaps`` times when it was parked), or cannot plan as the job does.

    It stays parked over its further lives, until it has been alive and quiet for the park time.
    """

    node: str
    incarnation: str
    reason: str
    flaps: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A device (by its id) that a daemon in one of its lives works with: no other daemon may."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class Publication:
    """What the trainers of a generation offered together. Its revision is the record's mod_revision.

    ``number`` counts the job's publications, so that replicas can tell how many they are behind.
    """

    generation: int
    step: int
    offers: tuple[OfferId, ...] = field(metadata={"packed": "offers"})
    number: int = 0

    @functools.cached_property
    def taken(self) -> dict[str, OfferId]:
        """The offers by rank key."""
        return {offer.key: offer for offer in self.offers}


class SlotId(NamedTuple):
    """The name of a rank in one of its lives; ``member`` is the create_revision of its node's member record."""

    key: str
    node: str
    member: int
    mover: int


def _set_of(slots: tuple[SlotId, ...]) -> frozenset[SlotId]:
    return frozenset(slots)


id_set = ByIdentity(_set_of)  # lanes share their tuples of sources, and long ones take long to hash


class Slot(NamedTuple):
    """A rank in one of its lives, with the client's incarnation and its layout's digest."""

    key: str
    node: str
    member: int
    incarnation: str
    mover: int
    digest: str

    @property
    def id(self) -> SlotId:
        return SlotId(self.key, self.node, self.member, self.mover)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A slot that a lane does without, and why.

    A ``passing`` one ends with the refit. A ``parked`` one, made under the lane token that it names, outlives the
    slot's mover and client, for a new mover would not help: it ends when any daemon of the job has started since.
    """

    slot: SlotId
    passing: bool
    reason: str
    parked: int = 0


@dataclass(frozen=True, slots=True)
class Suspicion:
    """An edge of a lane that failed under one of its tokens, as the node ``by`` said."""

    source: SlotId
    destination: SlotId
    by: str


@dataclass(frozen=True)
class Lane:
    """Everything that serves one replica. Its token is the record's mod_revision.

    A lane without members serves nobody: the replica is not whole, and the record keeps why, and whom it does without.
    A lane without sources reads nothing: its own ranks hold what it is to reach.
    """

    replica: str
    members: tuple[Slot, ...]
    sources: tuple[SlotId, ...] = field(metadata={"packed": "slots"})
    neighbours: tuple[SlotId, ...] = field(metadata={"packed": "slots"})
    excluded: tuple[Exclusion, ...]
    reason: str
    suspicions: tuple[Suspicion, ...] = ()

    @functools.cached_property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that take part, sorted: those of members and sources (neighbours share a member's node)."""
        return tuple(sorted({slot.node for slot in self.members} | self.source_nodes))

    @functools.cached_property
    def member_nodes(self) -> tuple[str, ...]:
        return tuple(sorted({slot.node for slot in self.members}))

    @property
    def source_ids(self) -> frozenset[SlotId]:
        return id_set(self.sources)

    @functools.cached_property
    def source_nodes(self) -> frozenset[str]:
        return frozenset(slot.node for slot in self.sources)

    @functools.cached_property
    def ids(self) -> dict[str, SlotId]:
        """All slots by rank key."""
        return {slot.key: slot for slot in (*self.neighbours, *self.sources, *(m.id for m in self.members))}

    @property
    def lead(self) -> Slot:
        """The slot whose hook takes the ticket: rank 0."""
        return self.members[0]

    @functools.cached_property
    def incarnations(self) -> dict[str, str]:
        return {slot.key: slot.incarnation for slot in self.members}


@dataclass(frozen=True, slots=True)
class Refit:
    """The publication that a lane is to reach.

    ``abandoned`` counts the publications that the lane has begun and lost since its last commit: a joiner that cannot
    keep up shows it here.
    """

    generation: int
    revision: int
    step: int
    reason: str
    number: int = 0
    abandoned: int = 0

    @property
    def id(self) -> PubId:
        return PubId(self.generation, self.revision)


@dataclass(frozen=True, slots=True)
class Ack:
    """One node's word on one lane: how far it is, under which token and plan.

    ``held`` maps member keys to the digest of what they verified of the publication before this token. ``served`` is
    the oldest publication that any of the node's member ranks serves, (0, 0) for none; ``lead`` is what the replica's
    lead serves, or a newer one whose receive it has left or whose ticket to apply it has taken, where that is a rank of
    the node; ``ahead`` is the newest
    that any of the node's member ranks serves, which it does only outside of a receive. ``void``, where the lead is a
    rank of the node: receives of tickets given under that token, or before, are over. A ``failed`` ack names the edge
    where one failed; ``permanent`` says that trying the same again is useless.
    """

    token: int
    digest: str
    phase: str
    generation: int
    revision: int
    held: dict[str, str]
    served: tuple[int, int]
    edge: tuple[str, ...] = ()
    reason: str = ""
    permanent: bool = False
    lead: tuple[int, int] = (0, 0)
    ahead: tuple[int, int] = (0, 0)
    void: int = 0

    @property
    def id(self) -> PubId:
        return PubId(self.generation, self.revision)


@dataclass(frozen=True, slots=True)
class Commit:
    """The replica's newest commit, and the incarnations that verified it."""

    generation: int
    revision: int
    step: int
    token: int
    incarnations: dict[str, str]
    number: int = 0

    @property
    def id(self) -> PubId:
        return PubId(self.generation, self.revision)


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """How a publication ended; written once and the same for every rank."""

    generation: int
    revision: int
    step: int
    committed: tuple[str, ...]
    missing: dict[str, str]
    closed: str
