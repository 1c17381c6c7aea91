"""`Plan`: what every plan can do, whichever way it was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from refitd.plan.held import Held
from refitd.plan.program import Bucket, Program


class Plan(Protocol):
    """Who sends what to whom, proven. ``totals`` count payload bytes in the destinations' dtypes."""

    @property
    def digest(self) -> str:
        """32 hex digits: equal plans, equal digests, on every processor."""

    @property
    def totals(self) -> Mapping[str, int]:
        """Bytes by class of link, and the least over the network."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the plan is as it is."""

    @property
    def ranks(self) -> tuple[str, ...]:
        """Keys of all ranks that the plan was made for."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, by number."""

    def program(self, rank: str) -> Program:
        """What ``rank`` does. Raises InputError for a rank that the plan does not know."""

    def held(self, rank: str, buckets: Iterable[int]) -> Held:
        """What ``rank`` has once these of its buckets are verified. Raises InputError for buckets of others."""

    def left(self, held: Mapping[str, Held]) -> Plan:
        """The same without what ranks hold already, by key."""
