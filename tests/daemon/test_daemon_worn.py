"""A mover that says that it is worn is replaced; nobody is told of a fault."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from refitd.daemon.movers import Movers


class Handle:
    """A mover that can be killed."""

    key, pid, killed = "engine/r0/0", 7, False

    def kill(self):
        self.killed = True


@pytest.fixture
def movers():
    def fault(*said):
        raise AssertionError(said)

    found = Movers(None, SimpleNamespace(job="j", node="n"), SimpleNamespace(fault=fault))
    yield found
    found._stuck.close()


def test_it_is_killed_for_that_reason(movers):
    """The start of another follows its end, as that of any mover."""
    handle = Handle()
    with capture_logs() as logs:
        movers._on_message(handle, {"kind": "worn", "reason": "500 communicators, 700 descriptors are open"}, [])
    assert handle.killed
    assert [(line["event"], line["key"], line["reason"]) for line in logs] == [
        ("mover_killed", "engine/r0/0", "it is worn: 500 communicators, 700 descriptors are open")
    ]
