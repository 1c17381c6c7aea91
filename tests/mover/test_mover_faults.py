"""Whatever goes wrong on an edge is named, and never becomes a verified bucket."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from mover_rig import DIGEST, ENGINES, LANE, SECRET, TRAINERS, Party, Sketch, column_cut

from refitd.hook import wire
from refitd.mover.frames import Header, Hello, Trailer, checksum, plan_tag
from refitd.mover.transport.tcp import Address

ENGINE, TRAINER = ENGINES[0], TRAINERS[0]
EDGE = [TRAINER, ENGINE]


def _one_bucket(buckets=1):
    sketch = Sketch([(TRAINER, "w", "uint8", 64 * buckets), (ENGINE, "w", "uint8", 64 * buckets)])
    for n in range(buckets):
        sketch.add(TRAINER, ENGINE, "network", [("w", 64 * n, 64, 1, "w", 64 * n, 64, 1, 1, 64)])
    return sketch


class FakeSender:
    """A hand-driven source on the engine's only edge."""

    def __init__(self, port, digest=DIGEST, token=1):
        self.sock = socket.create_connection(("127.0.0.1", port))
        claim = {"kind": "edge", "secret": SECRET, "job": "job", "lane": LANE, "token": token}
        self.sock.sendall(wire.encode({**claim, "src": TRAINER, "dst": ENGINE}))
        self.sock.sendall(Hello(LANE, token, TRAINER, ENGINE, digest).pack())
        self.answer = self.sock.recv(4096)

    def bucket(self, payload=b"x" * 64, **changes):
        digest = changes.get("checksum", checksum(memoryview(payload), 0))
        header = Header(1, (1, 1), changes.get("bucket", 0), 64, changes.get("plan", plan_tag(DIGEST)))
        trailer = Trailer(
            changes.get("attempt", 1), changes.get("publication", (1, 1)), changes.get("token", 1), digest
        )
        return header.pack() + payload + trailer.pack()


@pytest.fixture
def engine(rig):
    """An engine rank in a round with one bucket to come, and a way to connect as its source."""
    one = rig(_one_bucket())
    one.build(only=[ENGINE])
    party = one.parties[ENGINE]
    party.lent = one.lent[ENGINE]
    party.rig = one
    yield party
    sender = getattr(party, "sender", None)
    if sender is not None:
        sender.sock.close()


def _join(engine, **options):
    engine.sender = FakeSender(engine.port.number)
    engine.wait_for("built")
    engine.rig.run(only=[ENGINE], progress_timeout=0.4, **options)
    return engine.sender


def _assert_nothing_counts(engine, untouched=False):
    """What is ``untouched`` was not even written; bytes that only await their trailer may be, in dirty memory."""
    state = engine.lane.revoke()
    assert state["verified"] == []
    assert not (untouched and engine.lent.arrays["w"].any())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checksum": 7}, "checksum of bucket 0"),
        ({"token": 2}, "trailer of bucket 0"),
        ({"attempt": 2}, "trailer of bucket 0"),
        ({"publication": (1, 2)}, "trailer of bucket 0"),
        ({"bucket": 9}, "one that is still to come"),
        ({"plan": b"otherone"}, "header of bucket 0"),
    ],
)
def test_a_bucket_that_is_not_what_was_planned_never_counts(engine, change, reason):
    """A wrong checksum, trailer or header fails the edge; after a wrong header nothing is written either."""
    _join(engine).sock.sendall(engine.sender.bucket(**change))
    failed = engine.wait_for_failure()
    assert failed["edge"] == EDGE
    assert reason in failed["reason"]
    assert failed["verified"] == []
    _assert_nothing_counts(engine, untouched=bool({"bucket", "plan"} & change.keys()))


def test_a_payload_that_waits_in_a_buffer_is_not_written_without_its_trailer(engine):
    """Where the payload cannot be received in place, a wrong checksum leaves the memory as it was."""
    _join(engine, verify="reread").sock.sendall(engine.sender.bucket(checksum=7))
    assert "checksum of bucket 0" in engine.wait_for_failure()["reason"]
    _assert_nothing_counts(engine, untouched=True)


def test_the_rest_of_a_superseded_bucket_belongs_to_nobody(engine):
    """A run that comes in the middle of a payload stops its writing; the stream stays in step for the new bucket."""
    sender = _join(engine)
    old = sender.bucket()
    sender.sock.sendall(old[:-100])
    time.sleep(0.05)
    engine.rig.run(attempt=2, only=[ENGINE])
    before = engine.lent.arrays["w"].copy()
    sender.sock.sendall(old[-100:])
    time.sleep(0.2)
    assert np.array_equal(engine.lent.arrays["w"], before)
    payload = b"y" * 64
    head = Header(2, (1, 2), 0, 64, plan_tag(DIGEST)).pack()
    sender.sock.sendall(head + payload + Trailer(2, (1, 2), 1, checksum(memoryview(payload), 0)).pack())
    assert engine.wait_for("done")["attempt"] == 2
    assert engine.lent.arrays["w"].tobytes() == payload
    assert engine.lane.revoke()["verified"] == [0]


def test_garbage_on_an_edge_is_named(engine):
    """Bytes that are no header fail the edge."""
    _join(engine).sock.sendall(b"\xff" * 200)
    failed = engine.wait_for_failure()
    assert (failed["edge"], failed["attempt"]) == (EDGE, 1)
    assert "bucket header" in failed["reason"]
    _assert_nothing_counts(engine, untouched=True)


@pytest.mark.parametrize("cut", [10, 60, -1])
def test_a_truncated_bucket_never_counts(engine, cut):
    """A peer that dies inside a header, a payload or a trailer fails the edge at once."""
    sender = _join(engine)
    sender.sock.sendall(sender.bucket()[:cut])
    sender.sock.close()
    failed = engine.wait_for_failure()
    assert (failed["edge"], failed["reason"]) == (EDGE, "EOFError: connection closed by peer")
    _assert_nothing_counts(engine)


def test_a_bucket_without_its_trailer_does_not_exist(engine):
    """Payload alone never counts; silence then fails the edge after progress_timeout."""
    sender = _join(engine)
    sender.sock.sendall(sender.bucket()[:-8])
    started = time.monotonic()
    failed = engine.wait_for_failure(2)
    assert 0.2 < time.monotonic() - started < 1.5
    assert (failed["edge"], failed["reason"]) == (EDGE, "no byte for 0.4 s")
    _assert_nothing_counts(engine)


def test_a_repeated_bucket_is_refused(engine):
    """A bucket counts once; its second coming fails the edge but takes nothing back."""
    sender = _join(engine)
    sender.sock.sendall(sender.bucket() * 2)
    engine.wait_for("done")
    assert "still to come" in engine.wait_for_failure()["reason"]
    assert engine.lane.revoke()["verified"] == [0]


def test_an_idle_edge_that_breaks_is_reported_under_attempt_0(engine):
    """EOF outside a run is told, so that a dead peer is noticed before the next run."""
    engine.sender = FakeSender(engine.port.number)
    engine.wait_for("built")
    engine.sender.sock.close()
    failed = engine.wait_for_failure(2)
    assert (failed["edge"], failed["attempt"]) == (EDGE, 0)


def test_both_ends_name_a_dissenting_digest(rig):
    """An edge whose ends planned differently is not built, and each end shows both digests."""
    one = rig(_one_bucket())
    one.build(only=[ENGINE])
    trainer = one.parties[TRAINER]
    other = _one_bucket()
    other.digest = "e" * 32
    trainer.build(other.program(TRAINER), connect=[one.parties[ENGINE].address(ENGINE)])
    for party, ours, theirs in ((trainer, "e" * 32, DIGEST), (one.parties[ENGINE], DIGEST, "e" * 32)):
        failed = party.wait_for_failure()
        assert failed["edge"] == EDGE
        assert f"edge digest: expected '{ours}', got '{theirs}'" in failed["reason"]


@pytest.mark.parametrize("wrong", [{"secret": "guess"}, {"token": 2}])
def test_a_stranger_does_not_get_an_edge(rig, wrong):
    """A wrong secret or token is turned away at the data port, and both ends give up at the deadline."""
    one = rig(_one_bucket())
    one.build(only=[ENGINE], timeout=0.4)
    trainer, program = one.parties[TRAINER], one.sketch.program(TRAINER)
    trainer.build(program, connect=[one.parties[ENGINE].address(ENGINE)], timeout=0.4, **wrong)
    for party in (trainer, one.parties[ENGINE]):
        failed = party.wait_for_failure(2)
        assert failed["edge"] == EDGE
        assert "not built within 0.4 s" in failed["reason"]


def test_a_peer_that_comes_late_is_waited_for(rig):
    """A sender retries until the other daemon listens and knows the lane."""
    one = rig(_one_bucket())
    one.build(only=[TRAINER])
    time.sleep(0.2)
    one.build(only=[ENGINE])
    one.built()


def test_an_unreachable_peer_fails_the_build_in_time(rig):
    """Nobody listens: failed names the edge after the build's timeout."""
    one = rig(_one_bucket())
    one.parties[ENGINE].port.close()
    dead = Address(ENGINE, "127.0.0.1", one.parties[ENGINE].port.number)
    one.parties[TRAINER].build(one.sketch.program(TRAINER), connect=[dead], timeout=0.3)
    failed = one.parties[TRAINER].wait_for_failure(2)
    assert failed["edge"] == EDGE
    assert "not built within 0.3 s" in failed["reason"]


@pytest.mark.parametrize("links", ["network", "peer"])
def test_a_withdrawn_loan_stops_the_round_on_both_ends(rig, links):
    """A source whose loan word has changed is not read; the edge stays in step and serves the next attempt."""
    cut = rig(column_cut(16, 8, links=links))
    cut.build()
    cut.built()
    before = cut.lent[TRAINER].page.loan_word
    cut.lent[TRAINER].page.bump_loan()
    cut.run(1, words={TRAINER: before})
    ends = [ENGINE, TRAINER] if links == "network" else [ENGINE]
    for key in ends:
        failed = cut.parties[key].wait_for_failure()
        assert (failed["edge"], failed["reason"]) == (EDGE, "loan withdrawn")
    cut.run(2)
    assert cut.parties[ENGINE].wait_for("done")["verified"] == list(range(8))
    np.testing.assert_array_equal(cut.lent[ENGINE].arrays["w"], cut.expected(ENGINE)["w"])


@pytest.mark.parametrize("links", ["network", "peer"])
def test_a_read_that_overlaps_a_change_never_counts(rig, monkeypatch, links):
    """I6: the loan word changes while a bucket is being read, and that bucket is not verified."""
    from refitd.plan import execute

    one = rig(_one_bucket() if links == "network" else column_cut(16, 8, links="peer", pieces=1))
    one.build()
    one.built()
    for name in ("pack_blocks", "copy"):
        real = getattr(execute, name)

        def torn(*args, real=real):
            one.lent[TRAINER].page.bump_loan()
            return real(*args)

        monkeypatch.setattr(execute, name, torn)
    one.run(words={})
    failed = one.parties[ENGINE].wait_for_failure()
    assert failed["reason"] == "loan withdrawn"
    assert 0 not in one.parties[ENGINE].lane.revoke()["verified"]


def _slowly(monkeypatch, each):
    """Make the sender read eight bytes at a time, and call ``each`` before every block after a bucket's first."""
    from refitd.plan import execute

    real = execute.pack_blocks

    def slow(*args):
        for number, block in enumerate(real(*args)):
            if number:
                each()
            yield block

    monkeypatch.setattr(execute, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(execute, "pack_blocks", slow)


def test_a_loan_withdrawn_inside_a_bucket_leaves_the_edge_in_step(rig, monkeypatch):
    """Half of a bucket has left when the loan ends: it gets no trailer that counts, and the next attempt is served."""
    one = rig(_one_bucket())
    one.build()
    one.built()
    _slowly(monkeypatch, one.lent[TRAINER].page.bump_loan)
    one.run(1)
    for key in (ENGINE, TRAINER):
        failed = one.parties[key].wait_for_failure()
        assert (failed["edge"], failed["reason"], failed["verified"]) == (EDGE, "loan withdrawn", [])
    monkeypatch.undo()
    one.run(2)
    assert one.parties[ENGINE].wait_for("done")["verified"] == [0]
    np.testing.assert_array_equal(one.lent[ENGINE].arrays["w"], one.expected(ENGINE)["w"])


def test_a_sender_that_is_superseded_inside_a_bucket_leaves_the_edge_in_step(rig, monkeypatch):
    """The rest of the old bucket is owed to the stream; the new round's bytes are what counts."""
    one = rig(_one_bucket())
    one.build()
    one.built()
    inside = threading.Event()

    def wait():
        inside.set()
        time.sleep(0.05)

    _slowly(monkeypatch, wait)
    one.run(1)
    assert inside.wait(5)
    one.fill(5)
    monkeypatch.undo()
    one.run(2)
    assert one.parties[ENGINE].wait_for("done")["attempt"] == 2
    np.testing.assert_array_equal(one.lent[ENGINE].arrays["w"], one.expected(ENGINE)["w"])


def test_memory_that_reads_back_differently_is_not_verified(rig, monkeypatch):
    """verify=reread compares what landed with what came."""
    from refitd.plan import execute

    one = rig(_one_bucket())
    one.build()
    one.built()
    monkeypatch.setattr(execute, "unpack", lambda *args: None)
    one.run(verify="reread")
    assert "reads back differently" in one.parties[ENGINE].wait_for_failure()["reason"]


def test_an_error_that_nobody_foresaw_is_reported_with_type_and_text(rig, monkeypatch):
    """A worker's exception becomes failed, by edge."""
    from refitd.plan import execute

    def broken(*args):
        raise ZeroDivisionError("planted")

    one = rig(_one_bucket())
    one.build()
    one.built()
    monkeypatch.setattr(execute, "dense", broken)
    one.run()
    failed = one.parties[ENGINE].wait_for_failure()
    assert failed["edge"] == EDGE
    assert "ZeroDivisionError: planted" in failed["reason"]


def test_an_error_of_one_peer_edge_does_not_stop_the_others(rig, monkeypatch):
    """The thread of shared memory tells the failed edge and goes on with the next source."""
    from refitd.plan import execute

    real = execute.copy

    def broken(program, bucket, *args):
        if bucket.src == TRAINERS[0]:
            raise ZeroDivisionError("planted")
        real(program, bucket, *args)

    monkeypatch.setattr(execute, "copy", broken)
    cut = rig(column_cut(16, 8, links="peer"))
    cut.build()
    cut.built()
    cut.run()
    failed = cut.parties[ENGINE].wait_for_failure()
    assert failed["edge"] == EDGE
    assert "ZeroDivisionError: planted" in failed["reason"]
    assert cut.parties[ENGINE].lane.revoke()["verified"] == [4, 5, 6, 7]


def test_memory_that_is_not_mounted_is_named(rig):
    """Without its destination, or its source, a bucket fails by edge."""
    one = rig(_one_bucket())
    one.build()
    one.built()
    one.parties[TRAINER].memories.clear()
    one.run()
    for key in (TRAINER, ENGINE):
        assert one.parties[key].wait_for_failure()["reason"] == f"memory of {TRAINER} is not mounted"


def test_a_superseded_round_stops_before_the_next_begins(rig):
    """A newer attempt halts the older one; what the sender had already sent of it is read past and never counts."""
    cut = rig(column_cut(16, 8))
    cut.build()
    cut.built()
    cut.run(1, only=TRAINERS)
    time.sleep(0.1)
    cut.fill(5)
    cut.run(2)
    done = cut.parties[ENGINE].wait_for("done")
    assert (done["attempt"], done["verified"]) == (2, list(range(8)))
    np.testing.assert_array_equal(cut.lent[ENGINE].arrays["w"], cut.expected(ENGINE)["w"])


def test_a_stale_attempt_is_refused(rig):
    """An attempt that is not newer than the current one is refused."""
    one = rig(_one_bucket())
    one.build()
    one.built()
    one.run(2)
    one.parties[ENGINE].wait_for("done")
    one.run(1, only=[ENGINE])
    failed = one.parties[ENGINE].wait_for_failure()
    assert (failed["attempt"], failed["reason"]) == (1, "stale attempt: 2 is current")


def test_revoke_joins_every_thread_and_wakes_blocked_ones(rig):
    """I5: revoke returns quickly while edges block, and no thread of the lane is left."""
    others = set(threading.enumerate())
    cut = rig(column_cut(16, 8))
    ports = set(threading.enumerate()) - others
    cut.build()
    cut.built()
    cut.run(1, only=[ENGINE])  # the trainers never send
    started = time.monotonic()
    for party in cut.parties.values():
        party.lane.revoke()
    assert time.monotonic() - started < 5.0
    assert set(threading.enumerate()) <= others | ports
    assert len(ports) == len(cut.parties)


def test_a_party_that_was_never_built_closes(rig):
    """A lane revoked while it is being built leaves nothing behind."""
    party = Party(ENGINE)
    party.build(_one_bucket().program(ENGINE), accept=[TRAINER])
    assert party.lane.revoke() == {"attempt": 0, "verified": [], "rx": {}, "tx": {}}
    party.close()
