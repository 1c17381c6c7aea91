"""The bandwidth cap: its arithmetic under a fake clock, and movers that draw on one page."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.errors import ProtocolError
from refitd.hook.memfd import create_memory
from refitd.mover.limit import BURST_NS, CHUNK_LEAST, KNOWN, PAGE_BYTES, RATE, TAKEN, Bucket, Limit

# Children of a fork here do arithmetic and end.
pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")

SECOND = 1_000_000_000
WIDTH = 20  # characters of a time in a pipe


def bucket(rate: int, now: int = 0) -> Bucket:
    """One that has been at ``rate`` since ``now``, with nothing saved up."""
    words = [rate, 0, 0, 0, 0]
    made = Bucket(words)
    made.reserve(0, now)
    return made


class Clock:
    """A clock that moves only when a mover waits; `send` is what one does for each chunk."""

    def __init__(self, made: Bucket, now: int = 0) -> None:
        self.bucket, self.now = made, now

    def send(self, nbytes: int) -> None:
        place = self.bucket.reserve(nbytes, self.now)
        while wait := self.bucket.wait(place, self.now):
            self.now += wait


@given(rate=st.integers(1000, 10**15), chunk=st.integers(1, 1 << 22), count=st.integers(1, 300))
def test_what_leaves_is_exactly_the_rate(rate: int, chunk: int, count: int) -> None:
    """A busy sender has sent its n-th byte at n / rate, to the nanosecond, and rounding does not add up."""
    clock = Clock(bucket(rate))
    for _ in range(count):
        clock.send(chunk)
    assert clock.now == -(-chunk * count * SECOND // rate)


def test_an_idle_job_saves_up_the_burst_and_no_more() -> None:
    """After a minute of silence a tenth of a second's bytes leave at once, and the next byte pays again."""
    clock = Clock(bucket(1_000_000), now=60 * SECOND)
    clock.send(1_000_000 * BURST_NS // SECOND)
    assert clock.now == 60 * SECOND
    clock.send(500_000)
    assert clock.now == 60 * SECOND + SECOND // 2


def test_a_new_rate_holds_at_once_for_those_that_wait() -> None:
    """Half of the wait at 1 MB/s, the other half at 10 MB/s; places stay in order."""
    made = bucket(1_000_000)
    first, second = made.reserve(1_000_000, 0), made.reserve(1_000_000, 0)
    assert (made.wait(first, 0), made.wait(second, 0)) == (SECOND, 2 * SECOND)
    made._words[RATE] = 10_000_000
    half = SECOND // 2
    assert (made.wait(first, half), made.wait(second, half)) == (SECOND // 20, 3 * SECOND // 20)
    assert made.wait(first, half + SECOND // 20) == 0


def test_without_a_limit_nobody_waits_and_a_later_limit_owes_nothing() -> None:
    """Taking the limit away frees whoever waits; what was sent without one is not charged afterwards."""
    made = bucket(1000)
    place = made.reserve(1_000_000, 0)
    made._words[RATE] = 0
    assert made.wait(place, 1) == 0
    assert made.rate == 0
    made._words[RATE] = 1_000_000
    clock = Clock(made, now=5 * SECOND)
    clock.send(1_000_000)
    assert clock.now == 6 * SECOND


@given(st.lists(st.tuples(st.sampled_from([0, 10**6, 3 * 10**6, 10**9]), st.integers(1, SECOND)), max_size=20))
def test_a_changing_limit_never_lets_more_through_than_it_said(changes: list[tuple[int, int]]) -> None:
    """Over any history of limits: at most the integral of the rate, and a burst of the largest."""
    made, now, allowed, sent, largest = bucket(10**6), 0, 0, 0, 10**6
    for rate, span in changes:
        end = now + span
        while made.rate:
            place = made.reserve(50_000, now)
            if (wait := made.wait(place, now)) > end - now:
                break
            now += wait
            sent += 50_000
        allowed += made._words[KNOWN] * span // SECOND
        now, made._words[RATE] = end, rate
        largest = max(largest, rate)
        made.wait(made._words[TAKEN], now)  # the next look of anybody takes the change in
    assert sent <= allowed + largest * BURST_NS // SECOND + len(changes)


# Movers on one page.


@pytest.fixture
def page() -> Iterator[Limit]:
    made = Limit.create()
    yield made
    made.close()


def movers(page: Limit, threads: list[int], seconds: float) -> list[int]:
    """What each of some processes could send in ``seconds``, with as many edges as ``threads`` says."""
    readers, children, (go, starter) = [], [], os.pipe()
    for count in threads:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            end = float(os.read(go, WIDTH))  # comes when all are there
            os.write(writer, str(_drawn(Limit.map(os.dup(page.fd)), count, end)).encode())
            os._exit(0)
        os.close(writer)
        readers.append(reader)
        children.append(child)
    os.write(starter, f"{time.monotonic() + seconds:{WIDTH}.6f}".encode() * len(threads))
    os.close(go)
    os.close(starter)
    drawn = [int(os.read(reader, 99)) for reader in readers]
    for reader, child in zip(readers, children, strict=True):
        os.close(reader)
        os.waitpid(child, 0)
    return drawn


def _drawn(limit: Limit, count: int, end: float) -> int:
    drawn = [0] * count

    def draw(edge: int) -> None:
        while time.monotonic() < end:
            drawn[edge] += limit.take(1 << 20, lambda: None)

    threads = [threading.Thread(target=draw, args=(edge,)) for edge in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(drawn)


def test_movers_share_evenly_however_many_edges_they_have(page: Limit) -> None:
    """Three processes with 1, 1 and 5 edges get about a third each, and the rate together."""
    page.set(8_000_000)
    for _turn in range(4):  # a loaded machine may keep a process from its turns
        drawn = movers(page, [1, 1, 5], 3.0)
        even = pytest.approx([sum(drawn) / 3] * 3, rel=0.25)
        if drawn == even and sum(drawn) >= 24_000_000 * 0.8:
            break
    assert 24_000_000 * 0.8 <= sum(drawn) <= (24_000_000 + 8_000_000 * BURST_NS / SECOND) * 1.01
    assert drawn == even


def test_edges_of_a_mover_take_turns(page: Limit) -> None:
    """No edge goes without for long: five of them get a fifth each."""
    page.set(2_000_000)
    order: list[int] = []
    together = threading.Barrier(5)

    def draw(edge: int) -> None:
        together.wait()
        for _ in range(20):
            page.take(1 << 20, lambda: None)
            order.append(edge)

    threads = [threading.Thread(target=draw, args=(edge,)) for edge in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == sorted(list(range(5)) * 20)
    middle = order[10:60]
    assert max(middle.count(edge) for edge in range(5)) <= 14


def test_a_mover_that_dies_in_turn_gives_the_lock_back(page: Limit) -> None:
    """The kernel frees the record lock of a dead process; a stopped one only makes others tick until it is killed."""
    page.set(10**9)
    ready, writer = os.pipe()
    child = os.fork()
    if child == 0:
        held = Limit.map(os.dup(page.fd))
        held._try_lock()
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    ticks: list[None] = []

    def tick() -> None:
        ticks.append(None)
        if len(ticks) == 20:
            os.kill(child, 9)

    assert page.take(1000, tick) == CHUNK_LEAST
    assert len(ticks) >= 20
    os.waitpid(child, 0)
    for fd in (ready, writer):
        os.close(fd)


def test_whoever_waits_can_be_stopped(page: Limit) -> None:
    """What tick raises ends the wait, and the next in turn is served."""

    class Over(Exception):
        pass

    def stop() -> None:
        raise Over

    page.set(1000)
    with pytest.raises(Over):
        page.take(1000, stop)
    page.set(10**9)
    assert page.take(1000, lambda: None) == 1000


@pytest.mark.parametrize("rate", [None, 10**6])
def test_pacing_keeps_bytes_and_order(page: Limit, rate: int | None) -> None:
    """Head, payload and tail leave in order and whole; without a limit in one piece."""
    page.set(rate)
    payload = os.urandom(10_001)
    groups = [
        [bytes(part) for part in parts] for parts in page.pace(*map(memoryview, (b"head", payload, b"tail")), _no)
    ]
    assert b"".join(part for group in groups for part in group) == b"head" + payload + b"tail"
    assert len(groups) == (1 if rate is None else 11)
    assert groups[-1][-1] == b"tail"


def test_an_empty_payload_waits_for_nobody(page: Limit) -> None:
    """A bucket without bytes has nothing to pay for."""
    page.set(1000)
    assert list(page.pace(memoryview(b"h"), memoryview(b""), memoryview(b"t"), _fail)) == [(b"h", b"", b"t")]


def test_neighbours_get_more_time_under_a_limit(page: Limit) -> None:
    """Twenty times as much; without a limit what was said."""
    assert page.patience(3.0) == 3.0
    page.set(10**6)
    assert page.patience(3.0) == 60.0


def test_only_a_page_is_mapped(page: Limit) -> None:
    """A memfd that is too small is refused and closed; a page of the right size shows the daemon's rate."""
    small = create_memory("small", PAGE_BYTES // 2)
    with pytest.raises(ProtocolError, match="limit page"):
        Limit.map(small)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(small)
    page.set(5000)
    other = Limit.map(os.dup(page.fd))
    assert other.rate == 5000
    other.close()


def _no() -> None:
    return


def _fail() -> None:
    pytest.fail("it waited")
