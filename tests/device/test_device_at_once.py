"""Rounds for which nothing is to be prepared are moved by the thread that heard of them, under the same rules."""

import socket
import threading

import pytest
from pull_rig import OWNERS, READER, failures

from refitd.errors import DeviceError
from refitd.hook.wire import Connection, send
from refitd.mover.child import Reporter, obey
from refitd.mover.cuda import pull
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.kernels import Launch
from refitd.mover.transport import peer
from refitd.mover.transport.peer import PeerTransport, PeerWorker


@pytest.fixture
def one(rig, monkeypatch):
    """A rig that has done a round, and counts whom it wakes and what it prepares from there on."""
    monkeypatch.setattr(peer, "AT_ONCE_SECONDS", 60.0)  # however busy this machine is
    made = rig()
    made.mount()
    made.build()
    made.run()
    made.wait("done")
    made.roused, made.prepared, made.ran = [], [], []
    rouse, through, run = PeerWorker.rouse, pull.through, Launch.run
    monkeypatch.setattr(PeerWorker, "rouse", lambda worker: made.roused.append(worker.edge) or rouse(worker))
    monkeypatch.setattr(pull, "through", lambda *a: made.prepared.append(len(a[1])) or through(*a))

    def launched(launch, sums=True):
        made.ran.append(threading.current_thread())
        run(launch, sums)

    monkeypatch.setattr(Launch, "run", launched)
    return made


def test_a_round_like_the_last_is_over_when_its_command_is(one):
    """No other thread is woken for it, and nothing is prepared; its bytes are there, and it is told."""
    for attempt in (2, 3):
        one.ranks[0].bytes[:] = attempt
        one.run(attempt=attempt)
        assert one.round().finished()
        assert one.mine.bytes.tolist() == one.expected().tolist()
        done = one.wait("done")
        assert (done["attempt"], done["verified"], sum(done["rx"].values())) == (attempt, list(range(8)), 1536)
        assert one.round().sums.keys() == set(range(8))
    assert (one.roused, one.prepared, one.ran) == ([], [], [threading.current_thread()] * 2)


@pytest.mark.parametrize("change", ["mounted anew", "read again", "took long", "held"])
def test_what_takes_longer_is_the_workers(one, change, monkeypatch, tmp_path):
    """Memory that is another, sums of what was written, a slow card, a tester that may stop it: the next thread's."""
    options = {}
    if change == "mounted anew":
        one.ranks[0].mount(one.mover)
    if change == "read again":
        options = {"verify": "reread"}
    if change == "took long":
        monkeypatch.setattr(peer, "AT_ONCE_SECONDS", one.mover._lanes["r0"]._peer._worker._puller.took / 2)
    if change == "held":
        monkeypatch.setenv("REFITD_FAILPOINTS", str(tmp_path / "nobody"))  # who is not there says go
    one.ranks[1].bytes[:] = 9
    one.run(attempt=2, **options)
    assert one.wait("done")["verified"] == list(range(8))
    assert one.mine.bytes.tolist() == one.expected().tolist()
    assert one.roused == [(READER, READER)]
    assert threading.current_thread() not in one.ran
    assert one.prepared == ([8] if change in ("mounted anew", "read again") else [])


def test_an_old_word_fails_its_edge_and_the_other_lenders_buckets_come(one):
    """Read before anything is launched; a word that the daemon did not say is none."""
    words = {rank.key: rank.page.loan_word for rank in one.ranks}
    before = one.mine.bytes.copy()
    for rank in one.ranks[:2]:
        rank.bytes[:] = 5
    one.run(attempt=2, words={**words, OWNERS[1]: words[OWNERS[1]] + 1})
    assert failures(one, 1)[0] == {(OWNERS[1], READER): "loan withdrawn"}
    assert one.round().verified == {0, 1, 2, 3}
    half = len(before) // 2
    assert (set(one.mine.bytes[:half]), one.mine.bytes[half:].tolist()) == ({5}, before[half:].tolist())
    del words[OWNERS[0]]
    one.run(attempt=3, words=words)
    assert failures(one, 1)[0] == {(OWNERS[0], READER): f"no loan word for {OWNERS[0]}"}
    assert one.round().verified == {4, 5, 6, 7}


def test_a_loan_that_ends_under_the_launch_does_not_count(one, monkeypatch):
    """The word is read again after it, there too."""
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch, sums=True: one.ranks[0].page.bump_loan() or run(launch, sums))
    one.run(attempt=2)
    assert failures(one, 1)[0] == {(OWNERS[0], READER): "loan withdrawn"}
    assert one.round().verified == {4, 5, 6, 7}


@pytest.mark.parametrize("gone", [0, 2])
def test_memory_that_is_unmapped_is_not_touched(one, gone):
    """As when its owner has died, which no command says: a lender's edge fails, for our own memory all of them."""
    key = one.ranks[gone].key
    one.mover._memories[key].close()
    one.run(attempt=2)
    edges = OWNERS if gone == 2 else OWNERS[:1]
    assert failures(one, len(edges))[0] == {(src, READER): f"memory of {key} is mapped no more" for src in edges}
    assert one.round().verified == (set() if gone == 2 else {4, 5, 6, 7})


def test_memory_stays_mapped_while_it_is_moved(one, monkeypatch):
    """Who unmaps it meanwhile waits; afterwards nothing of it is in use."""
    lender, seen = one.mover._memories[OWNERS[0]], []
    run = Launch.run

    def launched(launch, sums=True):
        closing = threading.Thread(target=lender.close)
        closing.start()
        while not lender.closed:
            pass
        seen.append(closing)
        assert closing.is_alive()
        assert len(lender.device.driver.opened) == 3
        run(launch, sums)

    monkeypatch.setattr(Launch, "run", launched)
    one.run(attempt=2)
    seen[0].join(10)
    assert len(lender.device.driver.opened) == 2
    assert one.wait("done")["verified"] == list(range(8))


def test_what_fails_on_the_device_ends_the_mover(one, monkeypatch):
    """It is the commands' own thread that meets it."""

    def broken(launch, sums=True):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Launch, "run", broken)
    with pytest.raises(DeviceError, match="move buckets: RuntimeError: CUDA error: an illegal memory access"):
        one.run(attempt=2)
    assert one.round().verified == set()
    assert all(memory._users == 0 for memory in one.mover._memories.values() if isinstance(memory, DeviceMemory))


def test_an_error_that_nobody_foresaw_breaks_the_edge(one, monkeypatch):
    """As it does in the worker."""

    def broken(launch, sums=True):
        raise KeyError("nobody")

    monkeypatch.setattr(Launch, "run", broken)
    one.run(attempt=2)
    message = one.said.get(timeout=10)
    while message["kind"] != "failed":
        message = one.said.get(timeout=10)
    assert message["edge"] == [READER, READER]
    assert message["reason"].startswith("KeyError: 'nobody' (broken:")


def test_what_a_worker_that_was_awake_has_brought_is_not_brought_again(one, monkeypatch):
    """It may take the round up first: a bucket that counts twice makes the round one that never lands."""
    at_once = PeerWorker.move_at_once

    def late(worker, round_):
        worker._run(round_)
        at_once(worker, round_)

    monkeypatch.setattr(PeerWorker, "move_at_once", late)
    one.run(attempt=2)
    assert sum(one.wait("done")["rx"].values()) == 1536
    assert one.round().landed()
    assert len(one.ran) == 1


def test_an_edge_that_fails_before_anything_is_moved_leaves_the_others_to_the_worker(one, monkeypatch):
    """The round was left to the commands' thread, for which it is no round like the last any more."""
    hurry = PeerTransport.hurry
    monkeypatch.setattr(
        PeerTransport,
        "hurry",
        lambda peer, round_: round_.fail((OWNERS[0], READER), "by a test") or hurry(peer, round_),
    )
    one.run(attempt=2)
    with one.round().cond:
        assert one.round().cond.wait_for(lambda: one.round().verified == {4, 5, 6, 7}, 30)
    assert one.roused == [(READER, READER)]
    assert failures(one, 1)[0] == {(OWNERS[0], READER): "by a test"}


def test_whether_a_round_is_like_the_last_may_be_asked_while_another_is_pulled(one, monkeypatch):
    """What is forgotten between two looks at it was there at the first."""
    puller = one.mover._lanes["r0"]._peer._worker._puller
    looks = iter([puller._whole])
    buckets = puller._whole[0]
    monkeypatch.setattr(pull.Puller, "_whole", property(lambda _puller: next(looks, None)), raising=False)
    assert puller.is_ready(one.round(), buckets)
    assert not puller.is_ready(one.round(), buckets)


@pytest.fixture
def hang(monkeypatch):
    """Launches do not end before `set` is called on what this gives; ``reached`` once one has begun."""
    ended, checksums = threading.Event(), Launch.checksums
    ended.reached = threading.Event()

    def hung(launch):
        ended.reached.set()
        assert ended.wait(60)
        return checksums(launch)

    monkeypatch.setattr(Launch, "checksums", hung)
    yield ended
    ended.set()


def test_commands_wait_for_a_launch_that_hangs_and_are_obeyed_after_it(one, hang):
    """Nothing is answered while memory is written: no ping, by which the daemon knows, and no revoke. The memory of an
    owner that dies meanwhile stays mapped as long."""
    ours, theirs = socket.socketpair()
    words = {rank.key: rank.page.loan_word for rank in one.ranks}
    lender = one.mover._memories[OWNERS[0]]
    with ours, theirs:
        connection = Connection(theirs)
        lane = {"lane": "r0", "token": 1}
        send(ours, {"kind": "run", **lane, "attempt": 2, "publication": [1, 2], "words": words})
        for message in ({"kind": "ping", "n": 1}, {"kind": "revoke", **lane}):
            send(ours, message)
        ours.shutdown(socket.SHUT_WR)
        thread = threading.Thread(target=obey, args=(connection, one.mover, Reporter(connection, lambda: None)))
        thread.start()
        assert hang.reached.wait(30)
        closing = threading.Thread(target=lender.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        assert len(lender.device.driver.opened) == 3
        assert one.said.empty()
        hang.set()
        thread.join(30)
        closing.join(30)
    assert [one.said.get(timeout=10)["kind"] for _ in range(3)] == ["done", "pong", "revoked"]
    assert len(lender.device.driver.opened) == 2


def test_a_mover_whose_worker_hangs_answers_no_ping(one, hang, monkeypatch, capfd):
    """Its commands' thread is free, and of its device nothing is to be expected."""
    monkeypatch.setattr(peer, "AT_ONCE_SECONDS", 0.0)
    one.run(attempt=2)
    assert hang.reached.wait(30)
    one.mover.handle({"kind": "ping", "n": 1}, [])
    assert one.wait("pong")["n"] == 1
    monkeypatch.setattr(peer, "LAUNCH_SECONDS", 0.0)
    one.mover.handle({"kind": "ping", "n": 2}, [])
    assert one.said.empty()
    assert capfd.readouterr().err == f"mover {READER}: a launch for r0 does not end\n"
    hang.set()
    assert one.wait("done")["attempt"] == 2
    one.mover.handle({"kind": "ping", "n": 3}, [])
    assert one.wait("pong")["n"] == 3
