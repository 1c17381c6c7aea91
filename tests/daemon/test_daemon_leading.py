"""Writes of a leader are guarded by its own leadership, and by no other."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest

from refitd.daemon import job as job_module
from refitd.daemon.job import Job
from refitd.daemon.leading import Leading
from refitd.epoch.codec import encode
from refitd.epoch.facts import Write
from refitd.epoch.records import Leader, Slot
from refitd.epoch.view import View
from refitd.errors import TransportError
from refitd.store import CreateRevision
from refitd.testing import split_layout

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


def test_a_decision_does_not_wait_for_a_node_that_does_not_send_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for long, and not again while it is being asked; another node with the same layout is asked instead."""
    monkeypatch.setattr(job_module, "LEARN_SECONDS", 0.05)
    asked: list[str] = []

    async def blob(node: str, digest: str) -> bytes:
        asked.append(f"{node} {digest}")
        if node == "mute":
            await asyncio.sleep(3600.0)
        if node == "broken":
            raise TransportError(("a", node), "connection refused")
        return layout.to_bytes()

    async def scenario() -> None:
        job = cast("Any", SimpleNamespace(_layouts={}, _learning={}, _log=MagicMock(), blob=blob, poke=MagicMock()))
        job._learn, job._layout = partial(Job._learn, job), partial(Job._layout, job)
        slots = [Slot(f"engine/r{i}/0", node, 1, "i", 1, digest) for i, (node, digest) in enumerate(where)]
        for _ in range(2):
            await asyncio.wait_for(Job.learn_layouts(job, slots), 10.0)
        assert list(job._layouts) == ["there"]
        assert list(job._learning) == ["silent"]
        assert job.poke.called
        job._learning["silent"].cancel()
        await asyncio.gather(*job._learning.values(), return_exceptions=True)
        assert job._learning == {}

    layout = split_layout({"w": ((4, 6), "float32")}, 0, 1)
    where = [("mute", "silent"), ("broken", "there"), ("well", "there")]
    asyncio.run(scenario())
    assert asked == ["mute silent", "broken there", "well there"]


def test_documents_of_other_nodes_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repair has others; a job's own, and those that were fetched lately, are not fetched."""
    monkeypatch.setattr(job_module, "KEEP_BLOBS", 2)
    fetched: list[str] = []

    async def fetch(_address: str, _secret: Any, digest: str) -> bytes:
        fetched.append(digest)
        return digest.encode()

    monkeypatch.setattr(job_module, "fetch_blob", fetch)

    async def scenario() -> list[bytes]:
        job = cast("Any", SimpleNamespace(
            blobs={"own": b"own"}, _fetched={}, secret=None, address=lambda _node: ("127.0.0.1", 1),
        ))  # fmt: skip
        found = [await Job.blob(job, "b", digest) for digest in ("own", "1", "2", "2", "3", "1")]
        assert sorted(job._fetched) == ["1", "3"]
        return found

    assert asyncio.run(scenario()) == [b"own", b"1", b"2", b"2", b"3", b"1"]
    assert fetched == ["1", "2", "3", "1"]
