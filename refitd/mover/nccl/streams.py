"""Streams of a device that serve one lane after another.

torch's allocator keeps memory by stream, 2 MiB at a time for what is small, and never gives it to another stream: new
streams for each lane cost a mover 2 MiB with each turn that launches something on them.
"""

from __future__ import annotations

import threading
from typing import Any

_free: dict[tuple[str, str], list[Any]] = {}
_lock = threading.Lock()


def take(device: str, use: str) -> Any:
    """A stream for ``use`` on which nothing runs: one that was given back, where there is one, else a new one."""
    import torch

    with _lock:
        kept = _free.get((device, use), [])
        for stream in reversed(kept):
            if stream.query():
                kept.remove(stream)
                return stream
    make: Any = torch.cuda.Stream
    return make(device=device)


def give(device: str, use: str, stream: Any) -> None:
    """From any thread, when nothing more will be started on it; what was started may be under way."""
    with _lock:
        _free.setdefault((device, use), []).append(stream)
