"""Where there is no etcd: all nodes of a scene in one process, over one store in its memory.

``python -m refitd.bench.cards.nodes CONFIG…``. Everything but the store and the interpreter is each node's own:
records, data port, hook, movers. SIGTERM ends all.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from refitd.config import load
from refitd.daemon import app
from refitd.store import MemoryStore, Store
from refitd.telemetry.logs import setup


class Shared(MemoryStore):
    """The first node that leaves does not take it from the others."""

    def close(self) -> None:
        """It ends with the process."""


async def serve(paths: Sequence[str]) -> None:
    """Run a daemon for each configuration until SIGTERM."""
    configs = [load(path) for path in paths]
    setup(configs[0].log.level, configs[0].log.format)
    store = Shared()

    def open_store(*_where: object, **_options: object) -> Store:
        return store

    vars(app)["open_store"] = open_store
    daemons = [app.Daemon(config) for config in configs]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    for daemon in daemons:
        await daemon.start()
    await stop.wait()
    for daemon in daemons:
        await daemon.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
