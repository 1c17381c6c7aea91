"""A job of 1,024 nodes and 64 lanes: how long the leader thinks, what a turn writes, how large records are."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import pytest
from epoch_records import Book

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts
from refitd.epoch.leader import decide
from refitd.epoch.patience import Limits, Patience
from refitd.epoch.records import Ack, Member, Offer, Offers, PubId, RankInfo

TRAINER_NODES, LANES, NODES_OF_A_LANE, RANKS = 512, 64, 8, 8
SETTLED = Facts()


def covers(_replica: str, digests: Iterable[str]) -> bool:
    return len(set(digests)) > 0


def rank(side: str, group: str, number: int, world: int, mover: int = 1) -> RankInfo:
    key, mode = f"{side}/{group}/{number}", "trainer" if side == "trainer" else "in_place"
    return RankInfo(key, side, group, number, world, f"{hash(key):032x}"[-32:], f"{number:032x}", mode, mover)


def member(name: str, ranks: Iterable[RankInfo]) -> Member:
    return Member(name, name, f"{name}:1", name, "boot", (1,), tuple(ranks))


def apply(book: Book, facts: Facts = SETTLED) -> dict[str, int]:
    """Carry out what is decided, until nothing is left; how often records of each kind were written."""
    written: dict[str, int] = {}
    while writes := decide(book.view, facts, covers):
        for write in writes:
            assert write.data is not None
            book.revision += 1
            assert len(write.data) <= 65536, f"{write.key}: {len(write.data)} bytes"
            book.view.put(write.key, write.data, book.view.created_of(write.key) or book.revision, book.revision)
            kind = write.key.partition("/")[0]
            written[kind] = written.get(kind, 0) + 1
    return written


def engine_nodes(replica: int) -> list[str]:
    return [f"e{replica * NODES_OF_A_LANE + i:04d}" for i in range(NODES_OF_A_LANE)]


def big() -> Book:
    """All nodes are there, nothing is published yet."""
    book, world = Book(""), TRAINER_NODES * RANKS
    for node in range(TRAINER_NODES):
        ranks = [rank("trainer", "run1", node * RANKS + i, world) for i in range(RANKS)]
        book.put(f"members/t{node:04d}", member(f"t{node:04d}", ranks))
    for lane in range(LANES):
        for i, name in enumerate(engine_nodes(lane)):
            ranks = [rank("engine", f"r{lane:02d}", i * RANKS + j, NODES_OF_A_LANE * RANKS) for j in range(RANKS)]
            book.put(f"members/{name}", member(name, ranks))
    return book


def publish(book: Book) -> None:
    for node in range(TRAINER_NODES):
        infos = book.view.members[f"t{node:04d}"].value.ranks
        offers = tuple(Offer(info.key, info.incarnation, "run1", 1, 1) for info in infos)
        book.put(f"offers/t{node:04d}", Offers(offers))


def say(book: Book, replica: str, phase: str, target: PubId) -> int:
    """Every node of a lane acks; how many writes that took."""
    stored = book.view.lanes[replica]
    for node in stored.value.nodes:
        held = {}
        book.put(f"acks/{replica}/{node}", Ack(stored.revision, "d", phase, *target, held, (0, 0)))
    return len(stored.value.nodes)


def seconds(book: Book, patience: Patience) -> float:
    """CPU time of one decision; what the collector makes of the test's own garbage is not counted."""
    gc.disable()
    start = time.process_time()
    decide(book.view, patience.look(book.view, 1.0, True), covers)
    took = time.process_time() - start
    gc.enable()
    return took


@pytest.mark.timeout(240)
def test_the_leader_of_1024_nodes_and_64_lanes(capsys: pytest.CaptureFixture[str]) -> None:
    """What happens all the time is decided within 50 ms; untouched lanes keep their records; none is over 64 KiB."""
    book = big()
    made = apply(book)
    assert made == {"generation": 1, "planner": 1, "lanes": LANES}
    publish(book)
    assert apply(book) == {"publication": 1, "refits": LANES}
    target = book.view.newest
    assert target is not None
    acks = sum(say(book, replica, "built", PubId(0, 0)) for replica in book.view.lanes)
    patience, took = Patience(Limits()), {}
    took["everything is new"] = seconds(book, patience)
    node = book.view.lanes["r00"].value.nodes[-1]
    token = book.view.lanes["r00"].revision
    book.put(f"acks/r00/{node}", Ack(token, "d", "prepared", *target, {}, (0, 0)))
    took["a node has said a word"] = seconds(book, patience)
    commit = engine_nodes(3)
    say(book, "r03", "verified", target)
    book.commit("r03", target)
    took["a replica has committed"] = seconds(book, patience)
    gone = book.view.members[commit[0]].value
    book.put(f"members/{commit[0]}", member(commit[0], [*gone.ranks[1:], rank("engine", "r03", 0, 64, mover=2)]))
    took["a mover of one lane has been started anew"] = seconds(book, patience)
    turned = apply(book)
    assert turned == {"lanes": 1}, "untouched lanes keep record and token"
    book.delete("members/t0007")
    took["a trainer node, a source of every lane, is gone"] = seconds(book, patience)
    sizes = {key: len(encode(getattr(book.view, key.partition("/")[0])[key.partition("/")[2]].value))
             for key in ("lanes/r00", "members/t0001")}  # fmt: skip
    sizes["publication"] = len(encode(book.view.publication.value)) if book.view.publication else 0
    with capsys.disabled():
        print(f"\n1,024 nodes, {TRAINER_NODES * RANKS} trainer ranks, {LANES} lanes; CPU time of one decision, ms:")
        for what, cpu in took.items():
            print(f"  {1000 * cpu:7.1f}  {what}")
        print(f"  bytes: {sizes}; lane records for a turn of one lane: 1; acks of all lanes for one phase: {acks}")
    often = ("a node has said a word", "a replica has committed")
    assert max(took[what] for what in often) < 0.05, took
    assert max(took.values()) < 0.5, took
