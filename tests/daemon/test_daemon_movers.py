"""Movers that cannot be started or told anything are tried again; memory is let go of once nobody has it mapped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.daemon import movers as module
from refitd.daemon.movers import Movers
from refitd.errors import ProtocolError, TransportError
from refitd.mover import pool as pool_module
from refitd.mover.pool import MoverPool

OWNER, READER = "trainer/run/0", "engine/r0/0"


class Handle:
    """A mover that answers when the test says so, and ends when it is told to."""

    def __init__(self, key: str) -> None:
        self.key, self.pid, self.life, self.stuck = key, 7, 1, False
        self.said: list[dict[str, Any]] = []
        self.killed = False
        self._gone = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    def send(self, message: dict[str, Any], fds: Any = ()) -> None:
        del fds
        self.said.append(message)

    def kill(self) -> None:
        self.killed = True

    def end(self, movers: Movers) -> None:
        self._gone.set()
        movers._on_exit(cast("Any", self))

    async def gone(self) -> None:
        await self._gone.wait()


class Node:
    """A trainer's rank and an engine's that reads from it, each with its mover."""

    def __init__(self, pool: Any = None) -> None:
        self.job = cast("Any", SimpleNamespace(
            job="j", node="n", ranks={}, limit=SimpleNamespace(fd=3), lanes={}, on_mover_exit=lambda _key: None,
            poke=lambda: None,
        ))  # fmt: skip
        metrics = SimpleNamespace(fault=lambda *_: None, mover_restarted=lambda: None)
        self.movers = Movers(pool, self.job, cast("Any", metrics))

    def rank(self, key: str, mover: Handle | None) -> Any:
        rank = cast("Any", SimpleNamespace(
            key=key, mover=mover, mounted={}, life=1, path=SimpleNamespace(path="child"), host=None,
        ))  # fmt: skip
        self.job.ranks[key] = rank
        if mover is not None:
            self.movers._mapped[cast("Any", mover)] = rank.mounted
        return rank

    def answers(self, handle: Handle) -> None:
        self.movers._on_message(cast("Any", handle), {"kind": "unmounted", "memory": OWNER}, [])


def run(test: Callable[[Node, Any, Handle, Handle], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "held_up", lambda *_: "")

    async def scenario() -> None:
        node, own, reader = Node(), Handle(OWNER), Handle(READER)
        owner = node.rank(OWNER, own)
        owner.mounted[OWNER] = 1
        node.rank(READER, reader).mounted[OWNER] = 1
        await test(node, owner, own, reader)
        await node.movers.close()

    asyncio.run(scenario())


async def still(task: asyncio.Task[None]) -> bool:
    await asyncio.sleep(0.01)
    return not task.done()


def test_a_release_waits_for_all_that_have_the_memory_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own mover and every reader."""

    async def test(node: Node, owner: Any, own: Handle, reader: Handle) -> None:
        task = asyncio.create_task(node.movers.unmap(owner))
        assert await still(task)
        node.answers(own)
        assert await still(task)
        node.answers(reader)
        await task
        assert own.said == reader.said == [{"kind": "unmount", "memory": OWNER}]
        assert (own.killed, reader.killed) == (False, False)

    run(test, monkeypatch)


def test_an_answer_may_come_before_anybody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Movers are quick."""

    async def test(node: Node, owner: Any, own: Handle, reader: Handle) -> None:
        for handle in (own, reader):
            answer = partial(asyncio.get_running_loop().call_soon, node.answers, handle)
            monkeypatch.setattr(handle, "send", lambda *_, answer=answer: answer())
        await node.movers.unmap(owner)
        assert not node.movers._unmaps

    run(test, monkeypatch)


def test_a_release_waits_for_what_the_last_connection_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client hung up, came back and releases: its old mover is still ending, and a reader has not answered yet."""

    async def test(node: Node, owner: Any, own: Handle, reader: Handle) -> None:
        del node.job.ranks[OWNER]
        node.movers.drop(owner)
        assert own.killed
        task = asyncio.create_task(node.movers.unmap(node.rank(OWNER, None)))
        assert await still(task)
        own.end(node.movers)
        assert await still(task)
        node.answers(reader)
        await task
        assert reader.said == [{"kind": "unmount", "memory": OWNER}]

    run(test, monkeypatch)


def test_a_release_does_not_take_an_answer_to_the_last_one_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has mapped the memory again since."""

    async def test(node: Node, owner: Any, own: Handle, reader: Handle) -> None:
        first = asyncio.create_task(node.movers.unmap(owner))
        assert await still(first)
        first.cancel()
        node.answers(own)
        node.job.ranks[READER].mounted[OWNER] = 2
        second = asyncio.create_task(node.movers.unmap(owner))
        assert await still(second)
        node.answers(reader)
        assert await still(second)
        node.answers(reader)
        await second

    run(test, monkeypatch)


def test_a_reader_that_was_killed_and_whose_rank_is_gone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has mapped is known until it has ended."""

    async def test(node: Node, owner: Any, own: Handle, reader: Handle) -> None:
        node.movers.drop(node.job.ranks.pop(READER))
        task = asyncio.create_task(node.movers.unmap(owner))
        assert await still(task)
        node.answers(own)
        assert await still(task)
        reader.end(node.movers)
        await task

    run(test, monkeypatch)


def test_a_mover_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while; the memory is free once it has ended."""
    monkeypatch.setattr(module, "UNMAP_SECONDS", 0.05)

    async def test(node: Node, owner: Any, own: Handle, reader: Handle) -> None:
        task = asyncio.create_task(node.movers.unmap(owner))
        assert await still(task)
        node.answers(own)
        while not reader.killed:
            assert await still(task)
        reader.end(node.movers)
        await task
        assert not own.killed

    run(test, monkeypatch)


class Full(Handle):
    """One that cannot be sent a descriptor, as none is left."""

    def send(self, message: dict[str, Any], fds: Any = ()) -> None:
        raise OSError(24, "Too many open files")


class Pool:
    """Its first mover is not started, the next cannot be sent a descriptor, and the third is good."""

    def __init__(self) -> None:
        self.made: list[Handle] = []
        self.asked = 0

    async def spawn(self, key: str, *_: Any) -> Handle:
        self.asked += 1
        if self.asked == 1:
            raise TransportError(("daemon", key), "the fork server did not fork")
        handle = Full(key) if self.asked == 2 else Handle(key)
        self.made.append(handle)
        return handle


def test_a_rank_gets_a_mover_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever went wrong with those before."""
    monkeypatch.setattr(module, "_BACKOFF", (0.0,))
    monkeypatch.setattr(module, "held_up", lambda *_: "")

    async def scenario() -> None:
        pool = Pool()
        node = Node(pool)
        rank = node.rank(READER, None)
        node.movers.want(READER)
        while not pool.made:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert (pool.made[0].killed, rank.mover, pool.asked) == (True, None, 2)
        pool.made[0].end(node.movers)
        while rank.mover is None:
            await asyncio.sleep(0.01)
        assert rank.mover is pool.made[1]
        assert pool.made[1].said == [{"kind": "limit"}]
        await node.movers.close()

    asyncio.run(scenario())


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Exception]], None]]:
    """Have fork servers fail to start."""

    def refuse(error: type[Exception]) -> None:
        def fails(*_: Any, **__: Any) -> None:
            raise ProtocolError("frame", "a mover's", "noise") if error is ProtocolError else OSError(11, "no process")

        monkeypatch.setattr(pool_module.subprocess, "Popen", fails)

    yield refuse
    monkeypatch.undo()


@pytest.mark.parametrize("error", [OSError, ProtocolError])
def test_a_fork_server_that_cannot_be_started_is_a_transport_error(
    refusing: Callable[[type[Exception]], None], error: type[Exception]
) -> None:
    """Which is tried again."""
    refusing(error)

    async def scenario() -> None:
        with pytest.raises(TransportError, match="it did not start"):
            await MoverPool().spawn(READER, lambda *_: None, lambda _: None)

    asyncio.run(scenario())
