"""The mover as a thread of its client: cut off, given up, followed by another, never two at a time."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import select
import threading

import pytest

from refitd.errors import DaemonUnavailable, DeviceError, TransportError
from refitd.hook.executor import Executor
from refitd.mover import child, pool, thread_handle
from refitd.mover.library import ThreadHost
from refitd.mover.pool import MoverPool
from refitd.mover.thread import MoverThread
from refitd.mover.thread_handle import ClientHost

KEY = "engine/r0/0"


class Rig:
    """A client's thread, and a daemon that uses it."""

    def __init__(self):
        self.thread_host = ThreadHost(KEY)
        self.host = ClientHost(os.dup(self.thread_host.theirs.fileno()))
        self.thread_host.theirs.close()
        self.pool, self.messages, self.exits = MoverPool(), asyncio.Queue(), []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_error):
        await self.pool.close()
        self.host.close()
        self.thread_host.cut()
        assert await asyncio.to_thread(self.thread_host.ended, 5.0)

    async def spawn(self):
        handle = await self.pool.spawn(KEY, self._heard, self.exits.append, self.host)
        assert (await self.heard())["kind"] == "started"
        return handle

    def _heard(self, _handle, message, _fds):
        self.messages.put_nowait(message)

    async def heard(self):
        async with asyncio.timeout(5):
            return await self.messages.get()


def ended(fd):
    """Whether a descriptor that tells a mover's end has fired."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def in_a_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture
def hung(monkeypatch):
    """Movers that do not let go before the event is set."""
    go = threading.Event()
    close = child.Mover.close
    monkeypatch.setattr(child.Mover, "close", lambda mover: go.wait(20) and close(mover))
    monkeypatch.setattr(thread_handle, "CUT_SECONDS", 0.1)
    yield go
    go.set()


@in_a_loop
async def test_a_thread_obeys_is_cut_off_and_is_followed_by_another():
    """Commands and answers as with a child; after the cut its pipe ends, and the same host runs the next life."""
    async with Rig() as rig:
        first = await rig.spawn()
        assert (first.in_client, first.life, first.pid) == (True, 1, os.getpid())
        first.send({"kind": "revoke", "lane": "r0", "token": 7})
        assert (await rig.heard())["kind"] == "revoked"
        end = os.dup(first.pidfd)
        assert not ended(end)
        first.kill()
        await asyncio.wait_for(first.gone(), 5)
        assert (ended(end), first.stuck, rig.exits) == (True, False, [first])
        os.close(end)
        second = await rig.spawn()
        assert (second.life, second.alive) == (2, True)


@in_a_loop
async def test_a_thread_that_does_not_end_is_given_up_and_nobody_follows_it(hung, monkeypatch):
    """Gone for the daemon, not for whoever holds its pipe; the host answers nobody until it has let go."""
    async with Rig() as rig:
        handle = await rig.spawn()
        end = os.dup(handle.pidfd)
        handle.kill()
        await asyncio.wait_for(handle.gone(), 5)
        assert (handle.stuck, ended(end), rig.exits) == (True, False, [handle])
        monkeypatch.setattr(pool, "FORK_SECONDS", 0.2)
        with pytest.raises(TransportError, match="its thread did not start a mover"):
            await rig.pool.spawn(KEY, lambda *_: None, lambda _: None, rig.host)
        hung.set()
        async with asyncio.timeout(5):
            while not ended(end):
                await asyncio.sleep(0.01)
        os.close(end)


@in_a_loop
async def test_pings_have_more_patience_where_a_client_may_hold_the_interpreter(monkeypatch):
    """A ping that waits is a sign of death for a child, and not yet for a thread."""
    async with Rig() as rig:
        handle = await rig.spawn()
        handle._timer.cancel()
        handle._pings.append((10**6, asyncio.get_running_loop().time() - 2.0))
        assert handle.alive_within(1.0)
        assert not handle.alive_within(0.3)
        handle._pings.clear()


@pytest.mark.parametrize("corrupt", [False, True])
@in_a_loop
async def test_what_would_end_a_child_ends_the_thread_only(monkeypatch, caplog, corrupt):
    """A device that breaks in a worker, a command that makes no sense: the mover ends, this process does not."""

    def revoke(mover, _message, _fds):
        def work():
            raise DeviceError("launch", "CUDA_ERROR_ILLEGAL_ADDRESS")

        MoverThread(work, "worker").start()

    monkeypatch.setattr(child.Mover, "_revoke", revoke)
    async with Rig() as rig:
        handle = await rig.spawn()
        handle.send({"kind": "dance"} if corrupt else {"kind": "revoke", "lane": "r0", "token": 7})
        await asyncio.wait_for(handle.gone(), 5)
        assert not handle.stuck
        assert (await rig.spawn()).life == 2
    assert ("dance" if corrupt else "CUDA_ERROR_ILLEGAL_ADDRESS") in caplog.text


@in_a_loop
async def test_a_forked_child_does_not_hide_the_end():
    """Children that a client forks, such as data loaders, hold nothing by which the daemon watches it."""
    async with Rig() as rig:
        handle = await rig.spawn()
        go, tell = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(tell)
            os.read(go, 1)
            os._exit(0)
        os.close(go)
        try:
            handle.kill()
            await asyncio.wait_for(handle.gone(), 5)
            assert not handle.stuck
        finally:
            os.close(tell)
            os.waitpid(pid, 0)


@in_a_loop
async def test_nothing_is_left_of_fifty_lives():
    """Threads and descriptors are at baseline."""
    async with Rig() as rig:
        gc.collect()  # what earlier tests have left for it would go meanwhile
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _life in range(50):
            handle = await rig.spawn()
            handle.kill()
            await asyncio.wait_for(handle.gone(), 5)
        after = threading.active_count(), len(os.listdir("/proc/self/fd"))
        assert all(now <= was for now, was in zip(after, before, strict=True)), (before, after)


@in_a_loop
async def test_a_client_has_no_second_thread_while_the_first_runs(hung):
    """Also not for another daemon: it is told why, and tries again later."""
    executor = Executor(KEY, "library")
    path, thread_host = executor.begin("auto", None)
    assert path == "library"
    host, lives = ClientHost(os.dup(thread_host.theirs.fileno())), MoverPool()
    thread_host.theirs.close()
    handle = await lives.spawn(KEY, lambda *_: None, lambda _: None, host)
    assert not await asyncio.to_thread(executor.end, 0.1)
    with pytest.raises(DaemonUnavailable, match="the mover thread of the last connection has not ended"):
        await asyncio.to_thread(executor.begin, "auto", None)
    hung.set()
    await handle.gone()
    assert await asyncio.to_thread(executor.end, 5.0)
    _path, thread_host = executor.begin("auto", None)
    thread_host.theirs.close()
    assert executor.end(5.0)
    await lives.close()
    host.close()


def test_who_gets_a_thread():
    """A thread where it is asked for, or where a child might fail: memory on a device."""
    assert Executor(KEY, "child").begin("library", "GPU-0") == ("child", None)
    assert Executor(KEY, "auto").begin("auto", None) == ("auto", None)
    assert Executor(KEY, "auto").begin("child", "GPU-0") == ("child", None)
    for asked, told, device, path in (("auto", "auto", "GPU-0", "auto"), ("auto", "library", None, "library")):
        executor = Executor(KEY, asked)
        got, host = executor.begin(told, device)
        assert got == path
        host.theirs.close()
        assert executor.end()
