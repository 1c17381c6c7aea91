"""Outages: a lease that outlives one is used again, one that does not ends our incarnation; watches that are denied."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from refitd.daemon.agree import Agreement
from refitd.epoch.codec import encode
from refitd.epoch.records import Leader
from refitd.errors import ConfigError, PermissionDenied, RefitdError, StoreUnavailable
from refitd.store import Keys, Lease, MemoryStore, Watch

A = encode(Leader("a", "1"))
TTL = 1.0  # seconds that the daemon goes by; the store's own leases outlive every outage here, as etcd's may


class Away(MemoryStore):
    """A store whose renewals and watches fail while somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: RefitdError | None = None
        self.denied: list[float] = []  # when a watch was asked for and denied
        self.watches_fail = False

    def grant(self, ttl_seconds: float) -> Lease:
        return Renewed(self, super().grant(60 * ttl_seconds), ttl_seconds)

    def watch(self, keys: Keys, from_revision: int = 0) -> Watch:
        if self.watches_fail:
            self.denied.append(time.monotonic())
            raise PermissionDenied(str(keys))
        return super().watch(keys, from_revision)


class Renewed:
    """A lease that is known to live for a shorter time than it does."""

    def __init__(self, store: Away, lease: Lease, ttl: float) -> None:
        self._store, self._lease, self.id, self.ttl = store, lease, lease.id, ttl

    def keepalive(self) -> float:
        if self._store.fault:
            raise self._store.fault
        self._lease.keepalive()
        return self.ttl

    def revoke(self) -> None:
        self._lease.revoke()


def run(body: Callable[[Away, Agreement], Awaitable[None]]) -> None:
    store = Away()

    async def main() -> None:
        agreement = Agreement(store, "job", TTL, TTL / 4, True, lambda: None)
        await agreement.start()
        try:
            await agreement.join()
            await body(store, agreement)
        finally:
            await agreement.close()

    asyncio.run(main())
    store.close()


async def until(probe: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), ConfigError("store.password_file", "a file", "none")])
def test_a_lease_that_outlives_an_outage_is_used_again(fault: RefitdError) -> None:
    """In doubt we neither write under it nor take another; then it is the same, and so is everything under it. A
    password file that is missing for a while is such an outage, and ends no thread."""

    async def body(store: Away, agreement: Agreement) -> None:
        told: list[str] = []
        agreement.lost = lambda: told.append("lost")
        assert await agreement.write("leader", A, 0, leased=True)
        written = store.list("/refitd/job/")[0]
        await asyncio.sleep(0.1)
        before = agreement.contact_seconds
        store.fault = fault
        await until(lambda: agreement.contact_seconds < before)
        assert agreement.alive, "one renewal that fails breaks our contact, and is no doubt yet"
        await until(lambda: not agreement.alive)
        with pytest.raises(StoreUnavailable, match="has not been renewed"):
            await agreement.join()
        store.fault = None
        await until(lambda: agreement.alive)
        assert (told, store.list("/refitd/job/")[0]) == ([], written)
        assert agreement.contact_seconds < TTL + 5

    run(body)


def test_a_lease_that_is_gone_is_told_before_a_new_one_is_taken() -> None:
    """Even where `join` comes before the keeper's word: nothing is written as who we were."""

    async def body(store: Away, agreement: Agreement) -> None:
        told: list[str] = []
        agreement.lost = lambda: told.append("lost")
        assert await agreement.write("leader", A, 0, leased=True)
        lease = agreement._lease
        assert lease is not None
        lease.revoke()
        while agreement.alive:  # the loop hears nothing meanwhile
            time.sleep(0.01)
        assert told == []
        await agreement.join()
        assert (told, agreement.alive, agreement._lease is lease) == (["lost"], True, False)
        await asyncio.sleep(2 * TTL)
        assert (told, agreement.alive) == (["lost"], True), "the late word is of the old one"
        assert store.get("/refitd/job/leader") is None

    run(body)


def test_a_denied_watch_is_asked_for_less_and_less_often() -> None:
    """0.2, 0.4, 0.8 s …; once it is allowed the picture is up to date again."""

    async def body(store: Away, agreement: Agreement) -> None:
        store.watches_fail = True
        assert agreement.following._watch is not None
        broken = agreement.following._watch
        store._watches.discard(broken)  # type: ignore[arg-type]
        broken._fill = failing  # type: ignore[attr-defined]
        store.put("/refitd/job/leader", A)
        await until(lambda: len(store.denied) == 4)
        pauses = [after - before for before, after in zip(store.denied, store.denied[1:], strict=False)]
        assert pauses[0] >= 0.4
        assert pauses[1] >= 0.8
        assert pauses[2] >= 1.6
        assert not agreement.unbroken
        assert agreement.view.leader is None
        store.watches_fail = False
        await until(lambda: agreement.view.leader)

    run(body)


def failing() -> None:
    raise PermissionDenied("/refitd/job/")


def test_closing_ends_a_watch_that_is_just_being_opened_again() -> None:
    """No thread is left behind, whichever comes first."""

    async def body(store: Away, agreement: Agreement) -> None:
        store.watches_fail = True
        assert agreement.following._watch is not None
        agreement.following._watch._fill = failing  # type: ignore[attr-defined]
        store.put("/refitd/job/leader", A)
        await until(lambda: store.denied)
        began = time.monotonic()
        await agreement.close()
        assert time.monotonic() - began < 5
        assert agreement.following._follower is not None
        assert not agreement.following._follower.is_alive()

    run(body)
