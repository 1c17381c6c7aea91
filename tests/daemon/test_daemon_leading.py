"""Writes of a leader are guarded by its own leadership, and by no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

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


@pytest.mark.parametrize(("key", "poked"), [("lanes/r0", ["r0"]), ("refits/r0", ["r0"]), ("generation", [])])
def test_a_lane_hears_at_once_what_was_decided_for_it(
    key: str, poked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks before the leader looks again: there may be nothing more to decide, and much to begin."""
    view, order = View(), []
    view.put("leader", encode(Leader("a", "life of a")), 9, 9)
    agreement = MagicMock(view=view, write=AsyncMock(return_value=True))
    job = MagicMock(node="a", agreement=agreement)
    job.agreement.following.follow_all = AsyncMock()
    job.membership.incarnation, job.membership.joined = "life of a", True
    leading = Leading(job)

    async def lane(woken: asyncio.Event) -> None:
        await woken.wait()
        order.append("lane")

    async def decide() -> bool:
        order.append("decide")
        return order.count("decide") == 1 and await leading._carry_out(Write(key, b"{}", 3, "a test"))

    async def scenario() -> None:
        woken = asyncio.Event()
        job.poke_lane.side_effect = lambda _replica: woken.set()
        task = asyncio.create_task(lane(woken))
        await asyncio.sleep(0)
        monkeypatch.setattr(leading, "_decide", decide)
        await leading.lead()
        woken.set()
        await task

    asyncio.run(scenario())
    assert [call.args[0] for call in job.poke_lane.call_args_list] == poked
    assert order == (["decide", "lane", "decide"] if poked else ["decide", "decide", "lane"])


def test_a_replica_is_asked_for_by_the_layouts_of_its_ranks() -> None:
    """Sources that have all of them hold what it needs; one that is gone needs nothing that could be held."""
    view = SimpleNamespace(replicas=lambda: {"r0": {0: SimpleNamespace(digest="a"), 1: SimpleNamespace(digest="b")}})
    leading = Leading(MagicMock(node="a", agreement=MagicMock(view=view), known_layout=lambda _digest: None))
    assert leading._covers("r0", ("a", "b", "elsewhere"))
    assert not leading._covers("r0", ("a",)), "it waits for a layout that we lack"
    assert not leading._covers("r1", ("a", "b"))
