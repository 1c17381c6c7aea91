"""What a leader knows beside the records, and what it wants written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Facts:
    """What its own clock tells a leader (`refitd.epoch.patience`), and its configuration.

    ``grace_over``: unpublished offers have waited long enough for silent or absent ranks. ``joins_settled``: nobody has
    joined for a while. ``store_settled``: everybody who was cut off from the store could be back. ``flapping``: nodes
    that joined too often, and how often. ``calm``: parked nodes that have been quiet long enough. ``silent``: (replica,
    node) pairs without a word under their lane's token for too long. ``slow``: replicas whose refit has neither moved
    bytes nor ended for too long. ``unheld``: nobody has held the newest publication for long, and replicas
    wait for it. ``gone``: replicas without any rank for so long that they will not come back.
    ``ended``: so is the whole job. ``max_dirty``: see `refitd.config.JobConfig`.
    """

    grace_over: bool = True
    joins_settled: bool = True
    store_settled: bool = True
    flapping: tuple[tuple[str, int], ...] = ()
    calm: frozenset[str] = frozenset()
    silent: frozenset[tuple[str, str]] = frozenset()
    slow: frozenset[str] = frozenset()
    unheld: bool = False
    gone: frozenset[str] = frozenset()
    ended: bool = False
    max_dirty: int = 0


class Write(NamedTuple):
    """One record to put (or delete, where ``data`` is None) if its revision is still ``expected``.

    ``guards``: other records and the revisions that they must still have (0: absent).
    """

    key: str
    data: bytes | None
    expected: int
    reason: str
    guards: tuple[tuple[str, int], ...] = ()
