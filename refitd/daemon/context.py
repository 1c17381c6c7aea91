"""What a lane needs of the daemon around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from refitd.config import Config
from refitd.daemon.agree import Agreement
from refitd.daemon.rank import LocalRank
from refitd.daemon.secret import Secret
from refitd.epoch.records import PubId, Slot, SlotId
from refitd.plan import Rank
from refitd.telemetry.history import Refit
from refitd.telemetry.metrics import Metrics


class Context(Protocol):
    """One job on this node, as its lanes see it."""

    job: str
    node: str
    secret: Secret
    config: Config
    metrics: Metrics
    agreement: Agreement
    ranks: dict[str, LocalRank]

    async def plan_ranks(self, slots: Sequence[Slot | SlotId]) -> list[Rank]:
        """Slots with their layouts. Raises TransportError where a layout cannot be fetched."""

    def address(self, node: str) -> tuple[str, int]:
        """Host and port of a node's data port."""

    def keep_blob(self, data: bytes) -> str:
        """Serve a document from here on; its digest."""

    async def blob(self, node: str, digest: str) -> bytes:
        """A document of a node."""

    def spread(self, key: str, publication: PubId, whole: bool) -> None:
        """A local rank has verified what it brought in from outside (``whole``: everything): others may read it."""

    def counted(self, key: str, refit: Refit, rx: Mapping[str, int], tx: Mapping[str, int]) -> None:
        """Payload bytes moved by a rank's mover for a refit since it last said so, by link."""

    def poke(self) -> None:
        """Look again at everything soon."""
