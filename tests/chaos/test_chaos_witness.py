"""The witness of the records can fail: each thing that they may never say is found under its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import pytest

from refitd.daemon.paths import Paths
from refitd.demo.chaos.witness import Listener
from refitd.epoch.codec import encode
from refitd.epoch.records import Ack, Commit, Generation, Lane, Member, PubId, RankInfo, Slot
from refitd.errors import StoreTimeout
from refitd.store import DeleteOp, Item, Keys, MemoryStore, Op, PutOp, Resync
from refitd.testing import wait_until

E0, E1 = "engine/r0/0", "engine/r0/1"
FIRST, SECOND = PubId(1, 4), PubId(1, 5)  # publications: a witness asks nobody for them


@dataclass
class Records:
    """A job's records in a store, who is told of them, and the lane that the tests are about."""

    store: MemoryStore
    listener: Listener
    lane: Lane
    token: int = 0

    def put(self, key: str, record: object) -> int:
        return self.do(PutOp(Paths("job").path(key), encode(record)))

    def do(self, op: Op) -> int:
        return self.store.txn([], [op]).revision

    def turn(self) -> None:
        self.token = self.put("lanes/r0", self.lane)

    def ack(self, node: str, target: PubId, phase: str = "verified", token: int = 0, digest: str = "plan") -> None:
        self.put(f"acks/r0/{node}", Ack(token or self.token, digest, phase, *target, {}, (0, 0)))

    def commit(self, target: PubId, incarnations: dict[str, str] | None = None) -> None:
        self.put("commits/r0", Commit(*target, 1, self.token, incarnations or self.lane.incarnations))

    def found(self) -> list[str]:
        """What the witness has to say, once it has seen everything."""
        self.listener.catch_up()
        return self.listener.broken


def member(node: str, key: str, life: str = "1") -> Member:
    rank = RankInfo(key, "engine", "r0", int(key[-1]), 2, f"{key}#{life}", "half", "in_place", 1)
    return Member(node, node, f"{node}:1", f"{node}#{life}", "boot", (1,), (rank,))


@pytest.fixture
def records() -> Iterator[Records]:
    """Replica r0 on nodes a and b, its lane made, nothing said of it yet."""
    store = MemoryStore()
    listener = Listener(store, "job")
    found = Records(store, listener, Lane("r0", (), (), (), (), "a test"))
    at = {node: found.put(f"members/{node}", member(node, key)) for node, key in (("a", E0), ("b", E1))}
    slots = tuple(Slot(key, node, at[node], f"{key}#1", 1, "half") for node, key in (("a", E0), ("b", E1)))
    found.lane = replace(found.lane, members=slots)
    found.turn()
    yield found
    listener.close()
    store.close()


def test_what_keeps_to_the_rules_is_counted_and_not_blamed(records: Records) -> None:
    """Two publications, each verified by both nodes and committed; a commit that is void; a turn; a second run."""
    records.put("generation", Generation(1, "run1", ()))
    for target in (FIRST, SECOND):
        records.ack("a", target)
        records.ack("b", target)
        records.commit(target)
    records.do(DeleteOp(Paths("job").path("commits/r0")))
    records.turn()
    records.ack("a", SECOND, "prepared", digest="another plan")
    records.put("generation", Generation(2, "run2", ("run1",)))
    assert records.found() == []
    assert records.listener.news() == {"members": 2, "lanes": 2, "generation": 2, "acks": 5, "commits": 2}
    records.ack("a", SECOND)
    records.found()
    assert records.listener.news() == {"acks": 1}


def test_i2_a_commit_that_not_all_have_verified(records: Records) -> None:
    """One node has said nothing, the other has only prepared; then both have verified another publication."""
    records.ack("a", FIRST, "prepared")
    records.commit(FIRST)
    for node in ("a", "b"):
        records.ack(node, FIRST)
    records.commit(SECOND)
    token = records.token
    assert records.found() == [
        f"I2: r0 commits (1, 4) under {token}: a said ({token}, 'prepared', 1, 4)",
        f"I2: r0 commits (1, 4) under {token}: b said nothing",
        f"I2: r0 commits (1, 5) under {token}: a said ({token}, 'verified', 1, 4)",
        f"I2: r0 commits (1, 5) under {token}: b said ({token}, 'verified', 1, 4)",
    ]


def test_i2_a_commit_of_other_lives(records: Records) -> None:
    """Of a token that has passed; of a client that is not the lane's; of a node that left and came back."""
    for node in ("a", "b"):
        records.ack(node, FIRST)
    old, others = records.token, {E0: f"{E0}#1", E1: f"{E1}#2"}
    records.commit(FIRST, others)
    records.do(DeleteOp(Paths("job").path("members/b")))
    records.put("members/b", member("b", E1, "2"))
    records.commit(FIRST)
    records.turn()
    new, records.token = records.token, old
    records.commit(FIRST)
    assert records.found() == [
        f"I2: r0 commits (1, 4) under {old}: it names {others}, the lane is of {records.lane.incarnations}",
        f"I2: r0 commits (1, 4) under {old}: {E1} was on b in another life",
        f"I2: r0 commits (1, 4) under {old}: the lane's token is {new}",
    ]


def test_i3_commits_and_generations_that_go_back(records: Records) -> None:
    """Also a commit that was void meanwhile does not let an older one pass; a run leads once."""
    records.put("generation", Generation(2, "run2", ("run1",)))
    for node in ("a", "b"):
        records.ack(node, SECOND)
    records.commit(SECOND)
    records.do(DeleteOp(Paths("job").path("commits/r0")))
    for node in ("a", "b"):
        records.ack(node, FIRST)
    records.commit(FIRST)
    records.put("generation", Generation(1, "run1", ("run1", "run2")))
    assert records.found() == [
        "I3: r0 commits (1, 4) after (1, 5)",
        "I3: generation 1 after 2",
        "I3: run run1 opens a second generation",
    ]


def test_i4_i10_acks_of_another_token_or_plan(records: Records) -> None:
    """Nodes of one token have one plan; the next token may have another."""
    records.ack("a", FIRST)
    records.ack("b", FIRST, digest="another plan")
    old = records.token
    records.turn()
    records.ack("a", FIRST, token=old, digest="plan")
    records.ack("b", FIRST, digest="another plan")
    assert records.found() == [
        "I10: b in r0: another plan, others plan",
        f"I4: ack of a in r0 under {old}, which is {records.token} now",
    ]


def test_after_a_gap_the_records_are_believed(records: Records) -> None:
    """What was missed is judged by nobody; what comes after it is."""
    witness = records.listener.witness
    items, revision = records.store.list("/refitd/job/")
    lane = next(item for item in items if item.key.endswith("lanes/r0"))
    newer = Item(lane.key, lane.value, lane.create_revision, revision + 10)
    witness.take(Resync((*(item for item in items if item is not lane), newer), revision + 10))
    assert (witness.seen["gaps"], records.listener.broken) == (1, [])
    records.token = revision + 10
    records.ack("a", FIRST)
    assert records.found() == []


def test_a_witness_that_goes_blind_says_so(records: Records) -> None:
    """A record that it cannot read ends its watch."""
    records.do(PutOp("/refitd/job/generation", b"rubbish"))
    wait_until(lambda: bool(records.listener.broken), "it says so", 10)
    assert records.found()[0].startswith("the witness saw no more: ProtocolError")


def test_a_witness_that_hears_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence of the watch is not silence of the store."""
    monkeypatch.setattr("refitd.demo.chaos.witness.LATE_SECONDS", 0.1)
    store = MemoryStore()
    monkeypatch.setattr(store, "watch", lambda _span, start: MemoryStore.watch(store, "/nothing/", start))
    with closing(store), closing(Listener(store, "job")) as listener:
        listener.catch_up()
        assert listener.broken == []
        now = store.txn([], [PutOp(Paths("job").path("generation"), encode(Generation(1, "run", ())))]).revision
        listener.catch_up()
        assert listener.broken == [f"the witness saw nothing after {now - 1} for 0.1 s, of {now}"]


def test_a_store_that_does_not_answer_at_once_is_asked_again(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave may end as an outage does."""
    listed, asked = records.store.list, list[object]()

    def later(span: Keys) -> tuple[list[Item], int]:
        asked.append(span)
        if len(asked) < 3:
            raise StoreTimeout("no answer")
        return listed(span)

    monkeypatch.setattr(records.store, "list", later)
    records.ack("a", FIRST)
    assert records.found() == []
    assert len(asked) == 3
    assert records.listener.news()["acks"] == 1


def test_a_store_that_never_answers_is_said(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that a witness may be late."""
    monkeypatch.setattr("refitd.demo.chaos.witness.LATE_SECONDS", 0.1)

    def never(_span: Keys) -> tuple[list[Item], int]:
        raise StoreTimeout("no answer")

    records.listener.catch_up()
    seen = records.store.list("/refitd/job/")[1]
    monkeypatch.setattr(records.store, "list", never)
    assert records.found() == [f"the witness saw nothing after {seen} for 0.1 s, of None"]
