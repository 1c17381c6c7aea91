"""Real daemons for the end-to-end tests; one is shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_refit import PATIENT

from refitd.store import spawn_etcd
from refitd.testing import LocalDaemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    """A daemon that all tests of the module leave unharmed."""
    with LocalDaemon(config=PATIENT) as running:
        yield running


@pytest.fixture
def own_daemon() -> Iterator[LocalDaemon]:
    """A daemon that the test may hurt."""
    with LocalDaemon(config=PATIENT) as running:
        yield running


@pytest.fixture
def etcd() -> Iterator[str]:
    """The address of a store that outlives the test's daemons."""
    store = spawn_etcd(prefer="distro")
    yield store.url
    store.stop()
