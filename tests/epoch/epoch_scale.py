"""A job of 1,024 nodes and 64 lanes: what the leader's decisions cost, what a turn writes, how large records are.

``python tests/epoch/epoch_scale.py`` prints it.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType

from epoch_records import Book

from refitd.epoch.codec import encode
from refitd.epoch.facts import Facts, Write
from refitd.epoch.leader import decide
from refitd.epoch.patience import Limits, Patience
from refitd.epoch.records import Ack, Member, Offer, Offers, PubId, RankInfo
from refitd.epoch.view import View

TRAINER_NODES, LANES, NODES_OF_A_LANE, RANKS = 512, 64, 8, 8
SETTLED = Facts()


def covers(_replica: str, digests: Iterable[str]) -> bool:
    return len(set(digests)) > 0


def rank(side: str, group: str, number: int, world: int, mover: int = 1) -> RankInfo:
    key, mode = f"{side}/{group}/{number}", "trainer" if side == "trainer" else "in_place"
    return RankInfo(key, side, group, number, world, f"{hash(key):032x}"[-32:], f"{number:032x}", mode, mover)


def member(name: str, ranks: Iterable[RankInfo]) -> Member:
    return Member(name, name, f"{name}:1", name, "boot", (1,), tuple(ranks))


def puts(writes: list[Write]) -> bool:
    """Whether anything but removals is left."""
    return any(write.data is not None for write in writes)


def apply(book: Book, facts: Facts = SETTLED) -> dict[str, int]:
    """Carry out what is decided, until nothing is left to put; how often records of each kind were put."""
    written: dict[str, int] = {}
    while puts(writes := decide(book.view, facts, covers)):
        for write in writes:
            book.revision += 1
            if write.data is None:
                assert book.view.delete(write.key, book.revision)
                continue
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


def milliseconds(act: Callable[[], object]) -> float:
    """CPU time; what the collector makes of the builder's own garbage is not counted."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    act()
    took = time.process_time() - start
    gc.enable()
    return 1000 * took


def calls(act: Callable[[], object]) -> float:
    """How many Python functions are entered: the same on every machine."""
    count = 0

    def seen(_frame: FrameType, event: str, _about: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


@dataclass
class Outcome:
    """``costs``: of one decision each; ``written``: records of each kind; ``sizes``: bytes of records."""

    costs: dict[str, float] = field(default_factory=dict)
    written: dict[str, dict[str, int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    acks: int = 0


def play(measure: Callable[[Callable[[], object]], float]) -> Outcome:
    """The job from its first lanes to the loss of a trainer node."""
    book, found, patience = big(), Outcome(), Patience(Limits())

    def decision(what: str, view: View | None = None, clocks: Patience = patience) -> None:
        records = view or book.view
        found.costs[what] = measure(lambda: decide(records, clocks.look(records, 1.0, True, covers), covers))

    found.written["members"] = apply(book)
    publish(book)
    found.written["offers"] = apply(book)
    target = book.view.newest
    assert target is not None
    found.acks = sum(say(book, replica, "built", PubId(0, 0)) for replica in book.view.lanes)
    decision("everything is new")
    lane = book.view.lanes["r00"]
    book.put(f"acks/r00/{lane.value.nodes[-1]}", Ack(lane.revision, "d", "prepared", *target, {}, (0, 0)))
    decision("a node has said a word")
    lost, clocks = book.view.copy(), copy.copy(patience)
    lost.delete("members/t0008", book.revision + 1)
    decision("a trainer node is gone, and lanes go on with the others", lost, clocks)
    say(book, "r03", "verified", target)
    book.commit("r03", target)
    decision("a replica has committed")
    name = engine_nodes(3)[0]
    others = book.view.members[name].value.ranks[1:]
    book.put(f"members/{name}", member(name, [*others, rank("engine", "r03", 0, 64, mover=2)]))
    decision("a mover of one lane has been started anew")
    found.written["mover"] = apply(book)
    book.delete("members/t0007")
    decision("a trainer node is gone, and lanes go on with the replica")
    found.written["trainer"] = apply(book)
    found.sizes = {key: len(encode(stored.value)) for key, stored in (
        ("lanes/r00", book.view.lanes["r00"]), ("members/t0001", book.view.members["t0001"]),
        ("publication", book.view.publication)) if stored}  # fmt: skip
    return found


def main() -> None:
    """Print the table."""
    times, counts = play(milliseconds), play(calls)
    print(f"1,024 nodes, {TRAINER_NODES * RANKS} trainer ranks, {LANES} lanes; one decision: CPU ms, calls")
    for what, took in times.costs.items():
        print(f"{took:9.1f} {counts.costs[what]:9.0f}  {what}")
    print(f"bytes: {times.sizes}; lane records for a turn of one lane: {times.written['mover']['lanes']};", end=" ")
    print(f"acks of all lanes for one phase: {times.acks}")


if __name__ == "__main__":
    main()
