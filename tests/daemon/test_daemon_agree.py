"""What a daemon and the store agree on: guarded writes, the watched picture, and the lease."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from refitd.daemon.agree import Agreement
from refitd.daemon.paths import Paths
from refitd.epoch.codec import encode
from refitd.epoch.records import Leader
from refitd.errors import StoreTimeout, StoreUnavailable
from refitd.store import CreateRevision, DeleteOp, MemoryStore, ModRevision, PutOp, Store

A, B = encode(Leader("a", "1")), encode(Leader("b", "2"))
Body = Callable[[Agreement], Awaitable[None]]


def run(store: Store, body: Body, ttl: float = 10.0, every: float = 3.0, job: str = "") -> None:
    """Run ``body`` with an agreement on a job of its own, started and joined."""

    async def main() -> None:
        inline = isinstance(store, MemoryStore)
        agreement = Agreement(store, job or uuid.uuid4().hex, ttl, every, inline, lambda: None)
        await agreement.start()
        try:
            await agreement.join()
            await body(agreement)
        finally:
            await agreement.close()

    asyncio.run(main())


async def until(probe: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


def leader(agreement: Agreement) -> str | None:
    return agreement.view.leader.value.node if agreement.view.leader else None


def test_a_write_is_in_the_picture_at_once_and_needs_the_right_revision(store: Store) -> None:
    """Put, refused put, delete: the picture is what the store has."""

    async def body(agreement: Agreement) -> None:
        assert await agreement.write("leader", A, 0)
        assert leader(agreement) == "a"
        revision = agreement.view.revision_of("leader")
        item = store.get(agreement.compare_path("leader"))
        assert item is not None
        assert (item.value, item.mod_revision, item.create_revision) == (A, revision, revision)
        assert not await agreement.write("leader", B, revision - 1)
        assert leader(agreement) == "a"
        assert await agreement.write("leader", B, revision)
        assert (leader(agreement), agreement.view.created_of("leader")) == ("b", revision)
        assert not await agreement.write("leader", None, revision)
        assert await agreement.write("leader", None, agreement.view.revision_of("leader"))
        assert leader(agreement) is None

    run(store, body)


def test_a_refused_write_brings_the_picture_up_to_date(store: Store) -> None:
    """Somebody else was quicker: their record is here when write returns."""

    async def body(agreement: Agreement) -> None:
        store.put(agreement.compare_path("leader"), B)
        assert not await agreement.write("leader", A, 0)
        assert leader(agreement) == "b"

    run(store, body)


def test_guards_hold_a_write_off(store: Store) -> None:
    """A leader that was replaced, or a lane that has turned, cannot be written for."""

    async def body(agreement: Agreement) -> None:
        assert await agreement.write("leader", A, 0)
        path, revision = agreement.compare_path("leader"), agreement.view.revision_of("leader")
        for guard in (CreateRevision(path, revision + 1), ModRevision(path, revision - 1)):
            assert not await agreement.write("members/n", A, 0, guards=[guard])
        assert store.get(agreement.compare_path("members/n")) is None
        assert await agreement.write("generation", b'{"number":1,"run":"r","past":[]}', 0,
                                     guards=[CreateRevision(path, revision), ModRevision(path, revision)])  # fmt: skip
        assert agreement.view.generation is not None

    run(store, body)


def test_what_others_write_and_delete_arrives(store: Store) -> None:
    """The watch follows; records that are broken or unknown change nothing."""

    async def body(agreement: Agreement) -> None:
        path = agreement.compare_path("leader")
        store.put(path, A)
        await until(lambda: leader(agreement) == "a")
        store.put(agreement.compare_path("weather"), b"rain")
        store.put(path, b"broken")
        store.put(agreement.compare_path("generation"), b'{"number":1,"run":"r","past":[]}')
        await until(lambda: agreement.view.generation)
        assert leader(agreement) == "a"
        store.txn([], [DeleteOp(path)])
        await until(lambda: leader(agreement) is None)

    run(store, body)


def test_what_was_there_before_is_in_the_picture_from_the_start(store: Store) -> None:
    """Of this job alone."""
    job = uuid.uuid4().hex
    store.txn([], [PutOp(f"/refitd/{job}/leader", A), PutOp(f"/refitd/{job}x/leader", B)])

    async def body(agreement: Agreement) -> None:
        assert leader(agreement) == "a"

    run(store, body, job=job)


def test_the_revision_is_the_stores_own_and_not_the_last_that_was_heard_of(store: Store) -> None:
    """What other jobs write is heard by nobody here, and counts all the same: processes are ordered by it."""

    async def body(agreement: Agreement) -> None:
        first = store.put(agreement.compare_path("leader"), A)
        assert await agreement.revision() == first
        later = store.put(f"/refitd/{uuid.uuid4().hex}/leader", B)
        assert later > first
        assert await agreement.revision() == later

    run(store, body)


def test_leased_records_go_with_the_lease_and_the_loss_is_told(store: Store) -> None:
    """Revoked behind our back: the keepalive finds out, `lost` is called, and a new lease can be taken."""

    async def body(agreement: Agreement) -> None:
        told: list[str] = []
        agreement.lost = lambda: told.append("lost")
        assert agreement.alive
        assert await agreement.write("leader", A, 0, leased=True)
        lease = agreement._lease
        assert lease is not None
        await agreement.call(lease.revoke)
        await until(lambda: told)
        assert (told, agreement.alive, agreement.unbroken) == (["lost"], False, False)
        await until(lambda: leader(agreement) is None)
        await agreement.join()
        assert agreement.alive
        assert await agreement.write("leader", B, 0, leased=True)

    run(store, body, every=0.1)


def test_a_write_under_a_lost_lease_is_false_and_tells(store: Store) -> None:
    """Before the keepalive has noticed."""

    async def body(agreement: Agreement) -> None:
        told: list[str] = []
        agreement.lost = lambda: told.append("lost")
        lease = agreement._lease
        assert lease is not None
        await agreement.call(lease.revoke)
        assert not await agreement.write("leader", A, 0, leased=True)
        assert (told, agreement.alive) == (["lost"], False)

    run(store, body)


def test_without_a_lease_nothing_is_written_that_was_to_go_with_it(store: Store) -> None:
    """A claim on a device would stand for ever, as nobody removes what ends by itself."""

    async def body(agreement: Agreement) -> None:
        lease = agreement._lease
        assert lease is not None
        await agreement.call(lease.revoke)
        assert not await agreement.write("devices/GPU-a", A, 0, leased=True)
        assert not await agreement.write("devices/GPU-b", A, 0, leased=True)
        assert store.get(agreement.compare_path("devices/GPU-b")) is None

    run(store, body)


def test_closing_gives_the_lease_up(store: Store) -> None:
    """A daemon that stops leaves nothing to wait for."""
    job = uuid.uuid4().hex

    async def body(agreement: Agreement) -> None:
        assert await agreement.write("leader", A, 0, leased=True)

    run(store, body, job=job)
    assert store.get(f"/refitd/{job}/leader") is None


class Doubtful(MemoryStore):
    """A store whose next transaction times out, done or not."""

    doubt = ""

    def txn(self, compares: Any, then: Any, otherwise: Any = ()) -> Any:
        doubt, self.doubt = self.doubt, ""
        if doubt == "refused":
            raise StoreUnavailable("away")
        if doubt != "not done":
            result = super().txn(compares, then, otherwise)
        if doubt:
            raise StoreTimeout("no answer")
        return result


def test_an_unknown_outcome_is_read_back() -> None:
    """True only where the record is what was meant; the outage is remembered."""
    store = Doubtful()

    async def body(agreement: Agreement) -> None:
        assert agreement.unbroken
        store.doubt = "done"
        assert await agreement.write("leader", A, 0)
        assert (leader(agreement), agreement.unbroken) == ("a", False)
        assert agreement.contact_seconds < 5
        store.doubt = "not done"
        assert not await agreement.write("leader", B, agreement.view.revision_of("leader"))
        assert leader(agreement) == "a"
        store.doubt = "refused"
        with pytest.raises(StoreUnavailable):
            await agreement.write("leader", B, agreement.view.revision_of("leader"))

    run(store, body)
    store.close()


class Slow(MemoryStore):
    """A store whose reads wait until they may end."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def get(self, key: str) -> Any:
        self.may.wait(20)
        return super().get(key)


def test_a_store_is_away_where_it_fails_or_lets_us_wait() -> None:
    """Before the call has failed, too: a leader that is elected for seconds lets it wait."""
    store = Slow()

    async def main() -> None:
        agreement = Agreement(store, "job", 10, 3, False, lambda: None)
        await agreement.start()
        assert not agreement.away
        asked = asyncio.create_task(agreement.call(lambda: store.get("/k")))
        await until(lambda: agreement.away)
        store.may.set()
        assert await asked is None
        assert not agreement.away
        store.away = True
        assert agreement.away
        await agreement.close()

    asyncio.run(main())
    store.close()


def test_a_call_may_end_while_somebody_looks() -> None:
    """The loop's clock must not stop for that."""
    store = MemoryStore()

    class Ending(Agreement):
        """The first look finds a call, and a second would find none."""

        looks = 0

        @property
        def _asked(self) -> float | None:
            self.looks += 1
            return 0.0 if self.looks == 1 else None

        @_asked.setter
        def _asked(self, _when: float | None) -> None:
            """Nobody asks here."""

    async def main() -> None:
        agreement = Ending(store, "job", 10, 3, False, lambda: None)
        assert agreement.away
        await agreement.close()

    asyncio.run(main())
    store.close()


def test_a_resync_forgets_what_is_gone_and_wakes_nobody_for_nothing() -> None:
    """After a gap in the watch the picture is made anew."""
    store, woken = MemoryStore(), []

    async def main() -> None:
        agreement = Agreement(store, "job", 10, 3, True, lambda: woken.append(1))
        await agreement.start()
        store.put("/refitd/job/leader", A)
        await until(lambda: leader(agreement) == "a")
        following, shared = agreement.following, Paths("job").shared
        items, revision = store.list(shared)
        woken.clear()
        assert not following._resync(shared, items, revision)
        assert following._resync(shared, [], revision + 1)
        assert (leader(agreement), woken) == (None, [])
        await agreement.close()

    asyncio.run(main())
    store.close()
