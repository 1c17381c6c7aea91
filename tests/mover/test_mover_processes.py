"""Real movers: forked by the pool, driven by messages, killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mover_rig import ENGINES, JOB, LANE, SECRET, TRAINERS, DataPort, Lent, column_cut

from refitd.hook.memfd import create_document
from refitd.mover.pool import MoverPool

ENGINE = ENGINES[0]


class Daemon:
    """One daemon for all ranks of a sketch: real movers, one data port each."""

    def __init__(self, sketch, environ=None):
        self.sketch = sketch
        self.pool = MoverPool(environ=environ)
        self.lent, self.handles, self.ports = {}, {}, {}
        self.messages = {}
        self.exits = []
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self):
        for ref in self.sketch.storages:
            lent = self.lent[ref.rank] = Lent(ref.rank, {ref.name: (ref.numel, ref.dtype)})
            if ref.rank.startswith("trainer"):
                bits = np.random.default_rng(1).integers(0, 256, lent.arrays[ref.name].nbytes, np.uint8)
                lent.arrays[ref.name].view(np.uint8)[:] = bits
            await self.spawn(ref.rank)
        return self

    async def __aexit__(self, *_error):
        for port in self.ports.values():
            port.close()
        await self.pool.close()
        for lent in self.lent.values():
            lent.close()

    async def spawn(self, key):
        self.messages[key] = asyncio.Queue()
        self.handles[key] = await self.pool.spawn(key, self._heard, lambda handle: self.exits.append(handle.pid))
        if key not in self.ports:
            on_edge = functools.partial(self._loop.call_soon_threadsafe, self._on_edge, key)
            self.ports[key] = DataPort(on_edge)
        writable = key.startswith("engine")
        self.handles[key].send(self.lent[key].message(writable), [*self.lent[key].fds, self.lent[key].page.fd])

    def _heard(self, handle, message, fds):
        assert fds == []
        self.messages[handle.key].put_nowait(message)

    def _on_edge(self, key, hello, sock):
        with sock:
            message = {"kind": "edge", **{name: hello[name] for name in ("lane", "token", "src")}}
            self.handles[key].send(message, [sock.fileno()])

    async def heard(self, key, kind, tolerant=False):
        async with asyncio.timeout(30):
            while (message := await self.messages[key].get())["kind"] != kind:
                assert tolerant or message["kind"] != "failed", message
        return message

    async def build(self, token):
        for key, handle in self.handles.items():
            program = self.sketch.program(key)
            connect = [
                {"dst": dst, "host": "127.0.0.1", "port": self.ports[dst].number}
                for dst in {b.dst for b in program.sends()}
            ]
            accept = sorted({b.src for b in program.receives()})
            fd = create_document("program", program.to_bytes())
            head = {"kind": "build", "lane": LANE, "token": token, "rank": key, "secret": SECRET, "job": JOB}
            handle.send({**head, "connect": connect, "accept": accept}, [fd])
            os.close(fd)
        for key in self.handles:
            await self.heard(key, "built")

    def run(self, token, attempt=1, **options):
        words = {key: lent.page.loan_word for key, lent in self.lent.items()}
        head = {"kind": "run", "lane": LANE, "token": token, "attempt": attempt, "publication": [1, attempt]}
        for handle in self.handles.values():
            handle.send({**head, "words": words, **options})

    async def revoke(self, token):
        for handle in self.handles.values():
            handle.send({"kind": "revoke", "lane": LANE, "token": token})
        return {key: await self.heard(key, "revoked", tolerant=True) for key in self.handles}

    def landed(self):
        got = self.lent[ENGINE].arrays["w"].reshape(-1, self.sketch.program(ENGINE).moves[0][9])
        rows = [self.lent[key].arrays["w"].reshape(len(got) // 2, -1) for key in TRAINERS]
        return np.array_equal(got, np.concatenate(rows)[:, : got.shape[1]])


def _run(test):
    """Run a coroutine test in a loop of its own."""

    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return wrapper


def _counts(pid):
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:")
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), maps


def _grown(before: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]]) -> bool:
    return any(new > old for key in before for new, old in zip(now[key], before[key], strict=True))


@_run
async def test_movers_carry_a_refit_and_leave_no_trace_after_many_turns():
    """I8: a refit is bit-exact under every token, and descriptors, threads and mappings return to their baseline."""
    async with Daemon(column_cut(64, 32)) as daemon:
        await daemon.build(1)
        await daemon.revoke(1)
        before = {key: _counts(handle.pid) for key, handle in daemon.handles.items()}
        for token in range(2, 12):
            await daemon.build(token)
            daemon.lent[ENGINE].arrays["w"][:] = 0
            daemon.run(token)
            done = await daemon.heard(ENGINE, "done")
            assert (done["token"], done["rx"]) == (token, {"network": 64 * 16 * 2})
            assert daemon.landed()
            assert (await daemon.revoke(token))[ENGINE]["verified"] == list(range(8))
        deadline = time.monotonic() + 5  # the kernel forgets a thread a moment after it was joined, before and after
        while _grown(before, now := {key: _counts(handle.pid) for key, handle in daemon.handles.items()}):
            assert time.monotonic() < deadline, (now, before)
            await asyncio.sleep(0.01)


@_run
async def test_a_killed_source_fails_its_edge_at_once_and_a_new_mover_takes_over():
    """SIGKILL of a peer is told long before the progress deadline; the next token works with that mover's next life."""
    async with Daemon(column_cut(64, 32)) as daemon:
        await daemon.build(1)
        victim = daemon.handles[TRAINERS[0]]
        os.kill(victim.pid, signal.SIGSTOP)
        daemon.run(1, progress_timeout=30)
        os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        while (message := await daemon.messages[ENGINE].get())["kind"] != "failed":
            pass
        assert time.monotonic() - started < 10
        assert message["edge"] == [TRAINERS[0], ENGINE]
        await victim.gone()
        assert daemon.exits == [victim.pid]
        await daemon.spawn(TRAINERS[0])
        assert daemon.handles[TRAINERS[0]].life == 2
        await daemon.revoke(1)
        await daemon.build(2)
        daemon.run(2)
        await daemon.heard(ENGINE, "done")
        assert daemon.landed()


@_run
async def test_a_stopped_source_fails_its_edge_after_the_progress_timeout():
    """SIGSTOP of a peer is told once no byte came for progress_timeout, and its handle stops answering pings."""
    async with Daemon(column_cut(64, 32)) as daemon:
        await daemon.build(1)
        os.kill(daemon.handles[TRAINERS[1]].pid, signal.SIGSTOP)
        started = time.monotonic()
        daemon.run(1, progress_timeout=0.8)
        async with asyncio.timeout(4):
            while (message := await daemon.messages[ENGINE].get())["kind"] != "failed":
                pass
        assert time.monotonic() - started > 0.7
        assert (message["edge"], message["reason"]) == ([TRAINERS[1], ENGINE], "no byte for 0.8 s")
        assert message["verified"] == [0, 1, 2, 3]
        await asyncio.sleep(0.4)
        assert not daemon.handles[TRAINERS[1]].alive_within(0.5)
        assert daemon.handles[ENGINE].alive_within(0.5)


@_run
async def test_tokens_at_or_below_a_revoked_one_are_refused():
    """I4: after revoke, commands under that token or a lower one do nothing; a revoke below the current is harmless."""
    async with Daemon(column_cut(16, 8)) as daemon:
        await daemon.build(5)
        assert (await daemon.revoke(3))[ENGINE]["verified"] == []
        daemon.run(5)
        await daemon.heard(ENGINE, "done")
        assert (await daemon.revoke(5))[ENGINE]["verified"] == list(range(8))
        for token, reason in ((5, "stale token"), (4, "stale token"), (6, "lane is not built")):
            daemon.handles[ENGINE].send(
                {"kind": "run", "lane": LANE, "token": token, "attempt": 2, "publication": [1, 2], "words": {}}
            )
            message = await asyncio.wait_for(daemon.messages[ENGINE].get(), 2)
            assert (message["kind"], message["reason"], message["token"]) == ("failed", reason, token)


@_run
async def test_memory_that_cannot_be_mounted_is_reported_and_unmounting_unmaps():
    """A mount beyond its memfd is told by memory key and the mover lives on; unmounted means no mapping is left."""
    async with Daemon(column_cut(16, 8)) as daemon:
        handle, lent = daemon.handles[ENGINE], daemon.lent[ENGINE]
        await daemon.build(1)
        daemon.run(1)
        await daemon.heard(ENGINE, "done")  # a lane whose round is over keeps nothing mapped
        handle.send({"kind": "unmount", "memory": ENGINE})
        await daemon.heard(ENGINE, "unmounted")
        assert _counts(handle.pid)[2] == 0
        message = lent.message(writable=True)
        message["storages"] = [{**message["storages"][0], "nbytes": 1 << 20}]
        handle.send(message, [*lent.fds, lent.page.fd])
        failed = await asyncio.wait_for(daemon.messages[ENGINE].get(), 2)
        assert (failed["kind"], failed["memory"]) == ("failed", ENGINE)
        assert f"at least {1 << 20} bytes" in failed["reason"]
        assert handle.alive


@pytest.mark.parametrize(
    "message", [{"kind": "dance"}, {"kind": "build", "lane": LANE}, {"kind": "revoke", "lane": LANE, "token": "new"}]
)
@_run
async def test_a_corrupt_command_ends_the_mover(message):
    """A command that breaks the protocol makes the mover exit; on_exit comes once and gone returns."""
    pool, exits = MoverPool(), []
    handle = await pool.spawn(ENGINE, lambda *_: None, exits.append)
    handle.send(message)
    await asyncio.wait_for(handle.gone(), 3)
    await pool.close()
    assert exits == [handle]


@_run
async def test_movers_die_with_their_fork_server_and_the_next_spawn_starts_another():
    """A dead fork server takes its movers along and is replaced."""
    pool, exits = MoverPool(), []
    first = await pool.spawn(ENGINE, lambda *_: None, exits.append)
    pool._server.process.kill()
    await asyncio.wait_for(first.gone(), 3)
    second = await pool.spawn(ENGINE, lambda *_: None, exits.append)
    assert (second.life, second.alive, exits) == (2, True, [first])
    await pool.close()
    assert exits == [first, second]


@_run
async def test_a_mover_that_reads_nothing_is_killed():
    """Messages that a stopped mover leaves unread for a second end it, and sending never blocks."""
    pool, exits = MoverPool(), []
    handle = await pool.spawn(ENGINE, lambda *_: None, exits.append)
    os.kill(handle.pid, signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(4):
        handle.send({"kind": "ping", "n": 0, "padding": "x" * 500_000})
    assert time.monotonic() - started < 5  # and not as long as nobody reads
    await asyncio.wait_for(handle.gone(), 30)
    await pool.close()
    assert exits == [handle]


_DAEMON = """
import asyncio, sys, time
from refitd.mover.pool import MoverPool

async def main():
    handle = await MoverPool().spawn("engine/r0/0", lambda *_: None, lambda _: None)
    print(handle.pid, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_movers_end_when_the_daemon_does():
    """SIGKILL of the daemon ends its movers, which nobody else is there to end."""
    daemon = subprocess.Popen([sys.executable, "-c", _DAEMON], stdout=subprocess.PIPE)
    with daemon, daemon.stdout as out:
        pidfd = os.pidfd_open(int(out.readline()))
        daemon.kill()
    assert select.select([pidfd], [], [], 3)[0] == [pidfd]
    os.close(pidfd)


class Listener:
    """Listens for failpoints and answers them."""

    def __init__(self, path, answers):
        self.path, self.answers, self.reached = path, answers, []

    async def __aenter__(self):
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_error):
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        facts = json.loads(await reader.readline())
        self.reached.append((facts["name"], facts["role"], facts["key"]))
        writer.write(self.answers.get(facts["name"], "go").encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


@pytest.mark.parametrize("plant", [False, True])
def test_failpoints_are_reached_once_a_run_and_a_planted_fault_tears_the_weights(tmp_path, plant):
    """Each mover passes transfer once; skip-trailer makes a receiver count a bucket that it never wrote."""

    async def test():
        path = str(tmp_path / "failpoints")
        answers = {"skip-trailer": "skip"} if plant else {}
        async with (
            Listener(path, answers) as tester,
            Daemon(column_cut(16, 8), {**os.environ, "REFITD_FAILPOINTS": path}) as daemon,
        ):
            await daemon.build(1)
            daemon.run(1)
            for key in daemon.handles:
                await daemon.heard(key, "done")
            names = sorted((name, key) for name, _role, key in tester.reached)
            assert names == [("skip-trailer", ENGINE), *sorted(("transfer", key) for key in (ENGINE, *TRAINERS))]
            assert daemon.landed() is not plant

    asyncio.run(test())
