"""Child or library: who decides, and what a stuck thread keeps others from."""

from __future__ import annotations

import os

import pytest

from refitd.daemon.path import CHILDREN, choose
from refitd.daemon.stuck import Stuck
from refitd.errors import Refused


@pytest.mark.parametrize(
    ("asked", "configured", "visible", "mode", "path", "why"),
    [
        (None, "auto", True, "", "child", CHILDREN.reason),
        (None, "child", True, "", "child", "data.path says so"),
        ("library", "auto", True, "", "library", "the client asked for it"),
        ("library", "library", True, "", "library", "data.path says so"),
        ("auto", "child", False, "exclusive process", "child", "data.path says so"),
        ("auto", "auto", False, "default", "library", "separate containers"),
        ("auto", "auto", True, "exclusive process", "library", "compute mode exclusive process"),
        ("auto", "auto", True, "default", "child", "a child that cannot map the memory makes way"),
        ("auto", "auto", True, "", "child", "a child that cannot map the memory makes way"),
    ],
)
def test_the_path_and_its_reason(asked, configured, visible, mode, path, why):
    """What the client asks for, what the configuration allows, what no child could do."""
    chosen = choose(asked, configured, visible, mode)
    assert chosen.path == path
    assert why in chosen.reason


def test_a_thread_that_is_forbidden_is_refused():
    """Clients of other users must not be handed the memory of their neighbours."""
    with pytest.raises(Refused) as caught:
        choose("library", "child", True, "")
    assert (caught.value.field, caught.value.got) == ("path", "library")


def test_memory_is_not_free_while_a_stuck_thread_may_map_it():
    """It is when the thread's pipe has ended, and then the descriptor is closed."""

    class Handle:
        key = "engine/r0/0"
        pidfd, end = os.pipe()

    stuck = Stuck()
    stuck.add(Handle, {"trainer/run0/0": 3})
    os.close(Handle.pidfd)
    stuck.require_free("trainer/run0/1")
    with pytest.raises(Refused, match="engine/r0/0"):
        stuck.require_free("trainer/run0/0")
    os.close(Handle.end)
    stuck.require_free("trainer/run0/0")
    assert stuck._threads == []
    stuck.close()
