"""Fixtures of the hook's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, Mover, Raw


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path / "hook.sock").start()
    yield fake
    fake.end()


@pytest.fixture
def raw(daemon: FakeDaemon) -> Iterator[Callable[[], Raw]]:
    clients: list[Raw] = []

    def make() -> Raw:
        clients.append(Raw(daemon.path))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def mover() -> Iterator[Mover]:
    found = Mover()
    yield found
    found.kill()
    os.close(found.pidfd)
