"""The weights that an ``in_place`` rank received last: lent with each registration, so that others can read them.

A daemon that comes anew knows a rank's memory only from what it is told, and the engine passes its tensors to
``receive`` alone. Without this its neighbours could not catch up from it before the next publication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from refitd.errors import DaemonUnavailable
from refitd.hook.blocks import Block
from refitd.hook.memory import SharedArena, Staging
from refitd.hook.page import ControlPage


class Served:
    """A `Shadow` that is the live weights, or the staging that they were loaded from; nothing while they are dirty."""

    def __init__(self, page: ControlPage, staging: Staging) -> None:
        self._page, self._staging = page, staging
        self._blocks: Mapping[str, Block] | None = None
        self._arena: SharedArena | None = None

    def keep(self, blocks: Mapping[str, Block], arena: SharedArena | None) -> None:
        """They have a whole publication now, and so has the staging ``arena`` of those that were not lent themselves.
        Their tensors stay alive until `forget`.
        """
        self._blocks, self._arena = blocks, arena

    def forget(self) -> None:
        """They are about to change, to move or to be freed."""
        self._blocks = self._arena = None

    @contextlib.contextmanager
    def lend(self) -> Iterator[tuple[Mapping[str, Any], Sequence[int]]]:
        """What ``register`` says of them, and their descriptors, which are valid inside."""
        if self._blocks is None or self._page.dirty:
            yield {}, ()
            return
        with contextlib.ExitStack() as stack:
            try:
                lent = stack.enter_context(self._staging.registered(self._blocks, self._arena))
            except DaemonUnavailable:
                lent = {}, ()
            yield lent
