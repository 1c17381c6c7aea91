"""Where a rank's mover runs: in a child of the daemon, or in a thread of the client. Decided at registration.

What a child can map shows in the end when it maps it; `refitd.daemon.movers` falls back then. Here is what is known
before: what was asked for, and what no child could do.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from refitd.daemon.devices import Devices
from refitd.errors import Refused
from refitd.hook.executor import AUTO, CHILD, LIBRARY


class Chosen(NamedTuple):
    """``path`` is ``child`` or ``library``; ``reason`` says why."""

    path: str
    reason: str


CHILDREN = Chosen(CHILD, "memory of the host reaches every child")


def choose(asked: str | None, configured: str, visible: bool, mode: str) -> Chosen:
    """``asked``: what the client has a thread for (``auto``, ``library``), None where it has none.

    ``configured``: data.path. ``visible``: the daemon sees the client's process. ``mode``: the device's compute mode,
    empty where that is not known. Raises Refused for a thread that the configuration forbids.
    """
    if configured == CHILD:
        if asked == LIBRARY:
            raise Refused("path", "child, as data.path says", asked)
        return Chosen(CHILD, "data.path says so")
    if asked == LIBRARY:
        return Chosen(LIBRARY, "the client asked for it" if configured == AUTO else "data.path says so")
    if asked is None:
        return CHILDREN
    if not visible:
        return Chosen(LIBRARY, "the daemon does not see the client's process: they are in separate containers")
    if mode not in ("", "default"):
        return Chosen(LIBRARY, f"compute mode {mode}: no child can use the GPU beside the client")
    return Chosen(CHILD, "nothing speaks against it; a child that cannot map the memory makes way for the client")


async def compute_mode(asked: str | None, device: str | None) -> str:
    """The device's compute mode by NVML; empty where nobody needs it, or NVML does not know."""
    if asked != AUTO or device is None:
        return ""
    return await asyncio.to_thread(_compute_mode, device)


def _compute_mode(device: str) -> str:
    devices = Devices()
    try:
        devices.refresh()
        found = devices.present.get(device)
        return found.compute_mode if found else ""
    finally:
        devices.close_quietly()
