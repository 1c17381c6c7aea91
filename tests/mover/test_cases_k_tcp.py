"""Group K of the field cases over tcp: ranks that die or stand still in a round, and lanes made in another order."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from mover_rig import ENGINES, LANE, SECRET, Sketch, column_cut
from test_mover_processes import Daemon, _run

from refitd.hook.memfd import create_document

TRAINER, THIRD = "trainer/run/0", "engine/r0/2"
FOUR = (TRAINER, *ENGINES, THIRD)
BUCKETS, ROW = 32, 1 << 20  # more than sockets take for a reader that stands still
LIMIT = 30.0  # seconds that a survivor may take to say so


def broadcast(*engines: str, digest: str = "d" * 32) -> Sketch:
    """32 MiB from one trainer to each engine, in buckets of 1 MiB."""
    sketch = Sketch([(key, "w", "uint8", BUCKETS * ROW) for key in (TRAINER, *engines)], digest)
    for n in range(BUCKETS):
        for engine in engines:
            sketch.add(TRAINER, engine, "network", [("w", n * ROW, ROW, 1, "w", n * ROW, ROW, 1, 1, ROW)])
    return sketch


def arrived(daemon: Daemon, engine: str) -> bool:
    return bool((daemon.lent[engine].arrays["w"] == daemon.lent[TRAINER].arrays["w"]).all())


async def failed(daemon: Daemon, key: str) -> list[str]:
    """The edge that a rank names in its failure."""
    async with asyncio.timeout(LIMIT):
        while (message := await daemon.messages[key].get())["kind"] != "failed":
            pass
    edge: list[str] = message["edge"]
    return edge


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_k1_survivors_name_the_rank_that_is_gone_and_three_go_on(number: signal.Signals) -> None:
    """K1: killed, or standing still past the progress deadline. The source names the edge; all survivors give the lane
    up when asked, alive and with their old descriptors closed; the next lane of three has the weights."""
    gone = ENGINES[1]

    @_run
    async def scenario() -> None:
        async with Daemon(broadcast(*ENGINES, THIRD)) as daemon:
            await daemon.build(1)
            victim = daemon.handles[gone]
            os.kill(victim.pid, signal.SIGSTOP)  # in the middle: its socket takes what fits, and no more
            daemon.run(1, progress_timeout=30.0 if number is signal.SIGKILL else 0.5)
            os.kill(victim.pid, number)
            assert await failed(daemon, TRAINER) == [TRAINER, gone]
            if number is signal.SIGSTOP:
                os.kill(victim.pid, signal.SIGKILL)  # a mover that misses its deadline is replaced, not waited for
            await victim.gone()
            del daemon.handles[gone]
            async with asyncio.timeout(LIMIT):
                await daemon.revoke(1)
            assert sorted(daemon.handles) == sorted(key for key in FOUR if key != gone)
            daemon.sketch = broadcast(ENGINES[0], THIRD, digest="e" * 32)
            await daemon.build(2)
            daemon.run(2)
            for engine in (ENGINES[0], THIRD):
                await daemon.heard(engine, "done")
                assert arrived(daemon, engine)

    scenario()


def build(daemon: Daemon, key: str, lane: str) -> None:
    """Order one rank to make one lane."""
    program = daemon.sketch.program(key)
    connect = [
        {"dst": dst, "host": "127.0.0.1", "port": daemon.ports[dst].number}
        for dst in sorted({b.dst for b in program.sends()})
    ]
    accept = sorted({b.src for b in program.receives()})
    fd = create_document("program", program.to_bytes())
    head = {"kind": "build", "lane": lane, "token": 1, "rank": key, "secret": SECRET, "job": "job"}
    daemon.handles[key].send({**head, "connect": connect, "accept": accept}, [fd])
    os.close(fd)


@_run
async def test_k3_two_lanes_made_in_opposite_order_on_two_ranks_are_both_there() -> None:
    """K3: one side hears A then B, the other B and half a second later A: nobody waits for ever, both lanes work."""
    async with Daemon(column_cut(64, 32)) as daemon:
        sources = [key for key in daemon.handles if key.startswith("trainer")]
        for lane in (LANE, "r1"):
            for key in sources:
                build(daemon, key, lane)
        build(daemon, ENGINES[0], "r1")
        await asyncio.sleep(0.5)
        build(daemon, ENGINES[0], LANE)
        for key in daemon.handles:
            lanes = {(await daemon.heard(key, "built"))["lane"] for _ in range(2)}
            assert lanes == {LANE, "r1"}
        daemon.run(1)
        await daemon.heard(ENGINES[0], "done")
        assert daemon.landed()
