"""What a daemon is at one moment, as plain data: the truth behind gauges, which live as long as what they tell of.

Names that end in ``_at`` are seconds since the epoch. All of it is read in the daemon's loop and then only passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """A replica whose lead is on this node.

    ``step`` and ``revision``: of its last commit, 0 before the first. ``lag``: publications behind the newest, None
    where that cannot be said. ``ready``: it serves the newest publication, or one at most ``job.max_lag`` older.
    """

    job: str
    replica: str
    step: int
    revision: int
    lag: int | None
    ready: bool


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job on this node.

    ``generation``, ``revision``, ``step``: the newest publication, 0 before the first. ``lease_held``: our lease in the
    store surely stands; ``contact_at``: when the store last renewed it, 0 without one. ``members`` (by state: active,
    draining, parked) and ``replicas`` (by state: ready, behind) are the leader's count of the whole job and empty
    elsewhere. ``loans``: memories lent to us now, by side; ``movers``: this node's ranks by whether their mover runs
    or starts.
    """

    job: str
    leads: bool
    joined: bool
    paused: bool
    generation: int
    revision: int
    step: int
    lease_held: bool
    contact_at: float
    members: Mapping[str, int] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    loans: Mapping[str, int] = field(default_factory=dict)
    movers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One daemon. ``connections``: clients by side; ``store_requests``: sent so far, by kind.

    ``planned_bandwidth``: bytes a second that plans count on, by link; a link of which nothing is known is left out.
    """

    jobs: tuple[JobFacts, ...] = ()
    replicas: tuple[ReplicaFacts, ...] = ()
    connections: Mapping[str, int] = field(default_factory=dict)
    store_requests: Mapping[str, int] = field(default_factory=dict)
    planned_bandwidth: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether somebody may be sent work, and why."""

    ready: bool
    reason: str
