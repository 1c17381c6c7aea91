"""Records for unit tests, with short names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from refitd.epoch.codec import encode
from refitd.epoch.records import (
    Ack,
    Commit,
    Exclusion,
    Generation,
    Lane,
    Member,
    Offer,
    Offers,
    PubId,
    Publication,
    RankInfo,
    Refit,
    Slot,
)
from refitd.epoch.view import View

NONE = PubId(0, 0)


def covers(_replica: str, digests: Iterable[str]) -> bool:
    """Layouts are named after the halves of the model that they hold."""
    return set("ab") <= set("".join(digests))


def info(key: str, halves: str = "ab", world: int = 1, mover: int = 1, life: str = "1") -> RankInfo:
    side, group, rank = key.split("/")
    return RankInfo(key, side, group, int(rank), world, f"{key}#{life}", halves, side, mover)


class Book:
    """A view that is written like the store: each put takes the next revision."""

    def __init__(self, generation: str = "run1") -> None:
        self.view, self.revision = View(), 0
        if generation:
            self.put("generation", Generation(1, generation, ()))

    def put(self, key: str, record: Any) -> int:
        self.revision += 1
        assert self.view.put(key, encode(record), self.view.created_of(key) or self.revision, self.revision)
        return self.revision

    def delete(self, key: str) -> None:
        self.revision += 1
        assert self.view.delete(key, self.revision)

    def node(self, name: str, *ranks: RankInfo) -> int:
        return self.put(f"members/{name}", Member(name, name, f"{name}:1", "i", "boot", (1,), ranks))

    def slot(self, key: str) -> Slot:
        return self.view.slots()[key]

    def offer(self, node: str, *keys: str, step: int = 1, seq: int = 1) -> tuple[Offer, ...]:
        offers = tuple(Offer(key, f"{key}#1", key.split("/")[1], seq, step) for key in keys)
        self.put(f"offers/{node}", Offers(offers))
        return offers

    def publish(self, *offers: Offer, step: int = 1, generation: int = 1) -> PubId:
        number = self.view.publication.value.number + 1 if self.view.publication else 1
        record = Publication(generation, step, tuple(offer.id for offer in offers), number)
        return PubId(generation, self.put("publication", record))

    def lane(
        self, replica: str, members: Iterable[str], sources: Iterable[str], neighbours: Iterable[str] = (),
        excluded: Iterable[Exclusion] = (),
    ) -> Lane:  # fmt: skip
        ids = [tuple(self.slot(key).id for key in side) for side in (sources, neighbours)]
        lane = Lane(replica, tuple(self.slot(key) for key in members), *ids, tuple(excluded), "test")
        self.put(f"lanes/{replica}", lane)
        return lane

    def refit(self, replica: str, target: PubId, step: int = 1) -> int:
        return self.put(f"refits/{replica}", Refit(*target, step, "test", self.number(target)))

    def number(self, target: PubId) -> int:
        """The number of a publication, 0 for one that is not the newest."""
        record = self.view.publication
        return record.value.number if record and record.revision == target.revision else 0

    def ack(
        self, replica: str, node: str, phase: str, target: PubId = NONE, served: PubId = NONE, token: int = 0,
        digest: str = "d", edge: tuple[str, ...] = (), permanent: bool = False,
    ) -> None:  # fmt: skip
        token = token or self.view.lanes[replica].revision
        reason = "broke" if phase == "failed" else ""
        self.put(f"acks/{replica}/{node}", Ack(token, digest, phase, *target, {}, served, edge, reason, permanent))

    def commit(self, replica: str, target: PubId, step: int = 1) -> None:
        stored = self.view.lanes[replica]
        record = Commit(*target, step, stored.revision, stored.value.incarnations, self.number(target))
        self.put(f"commits/{replica}", record)


T0, T1, E0, E1 = "trainer/run1/0", "trainer/run1/1", "engine/r0/0", "engine/r0/1"


def standard() -> tuple[Book, PubId]:
    """Trainer ranks 0 and 1 (a half each) on t0 and t1, replica r0 on e0 and e1, publication 1 under way."""
    book = Book()
    book.node("t0", info(T0, "a", 2))
    book.node("t1", info(T1, "b", 2))
    book.node("e0", info(E0, "a", 2))
    book.node("e1", info(E1, "b", 2))
    offers = (*book.offer("t0", T0), *book.offer("t1", T1))
    target = book.publish(*offers)
    book.lane("r0", (E0, E1), (T0, T1))
    book.refit("r0", target)
    return book, target


def all_ack(book: Book, phase: str, target: PubId, nodes: Iterable[str] = ("t0", "t1", "e0", "e1")) -> None:
    for node in nodes:
        book.ack("r0", node, phase, target)
