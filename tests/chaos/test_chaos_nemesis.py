"""Faults that must not stand in the way of the processes that they are about."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from refitd.demo.chaos.nemesis import Nemesis
from refitd.demo.chaos.schedule import Strike
from refitd.hook.wire import Decoder, encode


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[dict[str, Any]]) -> None:
    """A daemon's hook, as far as an operator needs it."""
    decoder = Decoder()
    while data := await reader.read(1 << 16):
        decoder.feed(data)
        while (frame := decoder.pop()) is not None:
            message = frame[0]
            asked.append(message)
            said = {"proto": 1, "server": "refitd", "node": "c"}
            if message["method"] == "drain":
                said = {"drained": not message["cancel"], "reason": "no lane uses this node"}  # type: ignore[dict-item]
            writer.write(encode({"id": message["id"], "ok": True, **said}))
    writer.close()


def test_a_drain_is_asked_while_the_loop_goes_on(tmp_path: Path) -> None:
    """The daemon may wait for the driver's word at a failpoint: here the driver's loop itself has to answer."""
    socket = tmp_path / "hook.sock"
    scene = SimpleNamespace(cluster=SimpleNamespace(daemons={"c": SimpleNamespace(socket=socket)}))
    strike = Strike(1, "drain", "c", "", 0.0, 0.0)
    asked: list[dict[str, Any]] = []

    async def scenario() -> None:
        server = await asyncio.start_unix_server(lambda r, w: answer(r, w, asked), socket)
        async with server:
            end = Nemesis(SimpleNamespace(scene=scene), strike).begin()  # type: ignore[arg-type]
            await end()

    asyncio.run(scenario())
    assert [m["cancel"] for m in asked if m["method"] == "drain"] == [False, False, True]
