"""Rounds for which nothing is to be prepared are moved by the thread that heard of them, under the same rules."""

import threading

import pytest
from pull_rig import OWNERS, READER, failures

from refitd.errors import DeviceError
from refitd.mover.cuda import pull
from refitd.mover.cuda.memory import DeviceMemory
from refitd.mover.kernels import Launch
from refitd.mover.transport import peer
from refitd.mover.transport.peer import PeerWorker


@pytest.fixture
def one(rig, monkeypatch):
    """A rig that has done a round, and counts whom it wakes and what it prepares from there on."""
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


@pytest.mark.parametrize("change", ["mounted anew", "read again", "too large", "held"])
def test_what_takes_longer_is_the_workers(one, change, monkeypatch, tmp_path):
    """Memory that is another, sums of what was written, many bytes, a tester that may stop it: the next thread's."""
    options = {}
    if change == "mounted anew":
        one.ranks[0].mount(one.mover)
    if change == "read again":
        options = {"verify": "reread"}
    if change == "too large":
        monkeypatch.setattr(peer, "AT_ONCE_BYTES", 1535)
        one.mover._lanes["r0"]._peer._worker._work = None
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
