"""Writes of a leader are guarded by its own leadership, and by no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from refitd.daemon.leading import Leading
from refitd.epoch.codec import encode
from refitd.epoch.facts import Write
from refitd.epoch.records import Leader
from refitd.epoch.view import View
from refitd.store import CreateRevision

WRITE = Write("lanes/r0", b"{}", 3, "a test")


@pytest.mark.parametrize(("leads", "writes"), [("a", 1), ("b", 0)])
def test_what_a_leader_decided_is_not_written_under_its_successor(leads: str, writes: int) -> None:
    """The last of several writes comes when somebody else leads: its record must not stand for ours."""
    view, asked = View(), []
    view.put("leader", encode(Leader(leads, f"life of {leads}")), 9, 9)

    async def write(key: str, *_rest: Any, guards: list[Any]) -> bool:
        asked.append((key, guards))
        return True

    agreement = SimpleNamespace(view=view, write=write, compare_path=lambda key: key)
    membership = SimpleNamespace(incarnation="life of a", joined=True)
    leading = Leading(MagicMock(node="a", agreement=agreement, membership=membership))
    assert asyncio.run(leading._carry_out(WRITE)) is bool(writes)
    assert asked == [("lanes/r0", [CreateRevision("leader", 9)])] * writes
