"""A rank that is registered here: its client, its geometry, its memory, and the mover that may touch it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refitd.daemon.path import CHILDREN, Chosen
from refitd.epoch.records import Offer, PubId, RankInfo
from refitd.errors import InputError, Refused
from refitd.hook.executor import CHILD, LIBRARY
from refitd.hook.messages import SHADOWS, TRAINER, Ticket
from refitd.hook.page import LOAN, SHADOW_LOAN, ControlPage
from refitd.hook.session import Fds, Session
from refitd.hook.shadow import shadow_offsets
from refitd.layout import Layout
from refitd.layout.dtypes import ITEMSIZE
from refitd.mover.handle import MoverHandle
from refitd.mover.thread_handle import ClientHost

NO_PUBLICATION = PubId(0, 0)

_versions = itertools.count(1)  # one counter a process, so that no two memories share a version


@dataclass(frozen=True, slots=True)
class Region:
    """A storage in shared memory: ``nbytes`` at ``offset`` of the memory's ``fd``-th descriptor."""

    name: str
    fd: int
    offset: int
    nbytes: int


@dataclass
class Memory:
    """A rank's storages as descriptors that we own. ``version`` changes with every other memory.

    ``device``: all of it is on a GPU, as the client describes it to the movers; nobody here looks into it further than
    names and sizes.
    """

    regions: tuple[Region, ...]
    fds: list[int]
    version: int
    device: dict[str, Any] | None = None

    def same_as(self, other: Memory) -> bool:
        """Whether both describe the same places of the same files, so that movers need not map anything anew."""
        if self.device is not None or other.device is not None:
            return self.device == other.device  # its blocks have ids
        return self.regions == other.regions and _files(self.fds) == _files(other.fds)

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def _files(fds: Sequence[int]) -> list[tuple[int, int]]:
    stats = [os.fstat(fd) for fd in fds]
    return [(stat.st_dev, stat.st_ino) for stat in stats]


@dataclass
class LocalOffer:
    """A trainer's open loan, since ``since`` (monotonic seconds)."""

    offer: Offer
    word: int
    since: float
    planned: bool = False


@dataclass
class LocalRank:
    """State of one registered rank. The lane and release logic read and write it; only the event loop touches it."""

    session: Session
    layout: Layout
    digest: str
    mode: str
    page: ControlPage
    memory: Memory | None = None
    mover: MoverHandle | None = None
    life: int = 0
    mounted: dict[str, int] = field(default_factory=dict)  # memory key -> version, in this rank's mover
    offer: LocalOffer | None = None
    asked: dict[int, Offer] = field(default_factory=dict)  # offers whose report the trainer may still ask for, by seq
    receiving: Ticket | None = None  # an engine's open receive(): its memory is lent to us
    sent_away: Ticket | None = None  # the receive that it was told to leave, which it will
    loan: int = 0  # the loan word that came with it
    lent_word: int = 0  # its loan word by now
    lent_for: PubId | None = None  # the publication that the lent (or shadow) memory is being filled with
    complete: PubId | None = None  # the publication that the memory we fill holds as a whole, committed or not
    relending: bool = False
    told: tuple[str, PubId, int] | None = None  # the last ticket or commit event, and its token
    told_at: float = 0.0  # when (monotonic seconds)
    since: PubId | None = None  # of the first ticket that this life of the client can have been given; None: none yet
    left: PubId = NO_PUBLICATION  # as the lead: it was told that its receive of this one, or an older one, is over
    void: int = 0  # as the lead: receives of tickets given under this token, or before, are over
    step: int = 0
    came_with: PubId = NO_PUBLICATION  # what the client served when it registered
    switched: PubId = NO_PUBLICATION  # what it told us that it has switched to, until it lends or lets go
    device: str | None = None  # UUID: where its weights will probably be
    host: ClientHost | None = None  # the client's thread, where it has one
    path: Chosen = CHILDREN  # where its mover runs, and why

    @property
    def key(self) -> str:
        return self.session.key

    @property
    def trains(self) -> bool:
        return self.mode == TRAINER

    @property
    def shadowed(self) -> bool:
        return self.mode in SHADOWS

    @property
    def word_index(self) -> int:
        """The control page's word that guards this rank's memory."""
        return SHADOW_LOAN if self.shadowed else LOAN

    def loan_word(self, publication: PubId) -> int | None:
        """The loan word under which an engine rank can be read as the publication; None where it cannot.

        A client that is about to change its memory sets dirty first and the word second, so the word is read before
        anything is asked about it: a word that was good then is the one that a reader will miss.
        """
        word = self._word()
        return word if self.readable(publication) else None

    def _word(self) -> int:
        if self.offer:
            return self.offer.word
        return self.lent_word if self.receiving else self.page.read(self.word_index)

    @property
    def own_word(self) -> int:
        """The loan word for this rank's own mover, which fills the memory."""
        return self._word()

    @property
    def served(self) -> PubId:
        """The publication that the client serves, by its own word; (0, 0) for none or while it is dirty."""
        return NO_PUBLICATION if self.page.dirty else PubId(self.page.generation, self.page.revision)

    @property
    def taken(self) -> PubId:
        """The publication of the ticket that the client took last."""
        taken = self.page.taken
        return PubId(taken.generation, taken.revision) if taken else NO_PUBLICATION

    def holds(self, publication: PubId) -> bool:
        """Whether the rank has the whole publication in the memory that it lends, or lent last.

        An in_place rank that serves it has it until it is dirty, which it is before we hear what for.
        """
        if self.shadowed:
            return self.complete == publication or self.page.shadow_publication == publication
        return self.complete == publication if self.receiving else self.served == publication

    def fills(self, publication: PubId) -> bool:
        """Whether its memory is what movers were to bring the publication into, or has it already."""
        return self.lent_for == publication or self.holds(publication)

    def readable(self, publication: PubId) -> bool:
        """Whether others can be sent the publication from here: it is held, and its memory was not released since."""
        return self.memory is not None and self.holds(publication)

    def lost(self, publication: PubId) -> bool:
        """Whether a commit of this replica did not reach the rank and cannot reach it any more.

        A rank that has switched may be dirty again before we hear why: it is about to lend for the next publication.
        """
        if max(self.served, self.switched) >= publication or self.holds(publication):
            return False
        asked = PubId(self.receiving.generation, self.receiving.revision) if self.receiving else NO_PUBLICATION
        return self.shadowed or asked <= publication

    def fall_back(self, reason: str) -> bool:
        """A child cannot map this rank's memory: from here on the client's own thread moves it, if it has one."""
        able = self.host is not None and self.path.path == CHILD
        if able:
            self.path = Chosen(LIBRARY, f"a child cannot map its memory: {reason}")
        return able

    @property
    def filling(self) -> bool:
        """Whether a shadow on a device, which its owner may take back, is being filled, or is still to be applied."""
        on_device = self.memory is not None and self.memory.device is not None
        return self.shadowed and on_device and self.lent_for is not None and self.served < self.lent_for

    def spoil_shadow(self) -> None:
        """The shadow may change from here on: whoever reads it learns that from its loan word."""
        self.page.shadow_loan_word += 1
        self.page.set_shadow_publication(0, 0)

    def fill(self, publication: PubId | None) -> None:
        """From here on the memory may change towards ``publication``; nothing that it held counts."""
        self.lent_for, self.complete, self.relending = publication, None, False

    def say(self, event: str, **fields: Any) -> None:
        """Tell the client something of the receive that it is in."""
        self.session.event(event, loan=self.loan, **fields)

    def info(self) -> RankInfo:
        """The rank as its member record shows it."""
        session = self.session
        return RankInfo(
            self.key, session.side, session.group, session.rank, session.world,
            session.incarnation, self.digest, self.mode, self.life if self.mover else 0, self.memory is not None,
            self.came_with, self.device is not None, self.page.claim,
        )  # fmt: skip

    def set_memory(self, memory: Memory) -> None:
        """Replace what is lent; movers map the new memory before they next run."""
        if self.memory and self.memory.same_as(memory):
            memory.close()
            return
        if self.memory:
            self.memory.close()
        self.memory = memory

    def forget_memory(self) -> None:
        """Its owner is about to free it or to use it for something else: nobody may read it any more, and what
        describes memory on a device may keep it alive. A shadow on the host stays: it is nobody's but ours."""
        if self.memory and (self.memory.device is not None or not self.shadowed):
            self.close()

    def close(self) -> None:
        if self.memory:
            self.memory.close()
            self.memory = None

    def leave(self) -> None:
        """The client is gone."""
        self.close()
        if self.host is not None:
            self.host.close()


def shadow_memory(layout: Layout, fd: int) -> Memory:
    """The shadow arena of a host_shadow engine; owns ``fd``."""
    places, total = shadow_offsets(layout.storages)
    if os.fstat(fd).st_size < total:
        os.close(fd)
        raise InputError("shadow", f"at least {total} bytes", "a smaller memfd")
    regions = tuple(Region(name, 0, offset, nbytes) for name, (offset, nbytes) in places.items())
    return Memory(regions, [fd], next(_versions))


def lent_memory(layout: Layout, keep: Iterable[str], message: Mapping[str, Any], fds: Fds) -> Memory:
    """The memory that came with a publish, a receive or a shadow.

    Raises Refused where storages are missing or of another size.
    """
    described, device = message["memory"], message.get("device")
    wanted = {name: numel * ITEMSIZE[dtype] for name, (numel, dtype) in layout.storages.items()}
    regions = tuple(Region(m["name"], m["fd"], m["offset"], m["nbytes"]) for m in described)
    sizes = {region.name: region.nbytes for region in regions}
    if device is not None:
        if regions:
            raise Refused("memory", "nothing beside memory on a device", f"{len(regions)} storages")
        sizes = {storage["name"]: storage["nbytes"] for storage in device["storages"]}
    for name, nbytes in wanted.items():
        if name not in sizes and name not in keep and nbytes:
            raise Refused(f"memory.{name}", f"{nbytes} bytes", "nothing")
        if name in sizes and sizes[name] != nbytes:
            raise Refused(f"memory.{name}", f"{nbytes} bytes as registered", str(sizes[name]))
    regions = tuple(region for region in regions if region.name in wanted)
    return Memory(regions, fds.take_all(), next(_versions), device)
