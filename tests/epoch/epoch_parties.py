"""Who takes part in the model of a cluster: clients with their pages and memory, lanes of a node, nodes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from refitd.epoch.records import (
    Offer,
    PubId,
    RankInfo,
)

NONE = PubId(0, 0)


@dataclass
class Rank:
    """A client process with its page and memory, and its mover (``life`` 0: none)."""

    key: str
    world: int
    halves: str
    incarnation: int = 1
    life: int = 1
    lives: int = 1  # movers that the rank has had: a number is never used again
    alive: bool = True
    chunks: dict[str, int] = field(default_factory=dict)  # half -> the weights it holds
    landed: set[str] = field(default_factory=set)  # halves that arrived with their trailer, for `lent_for`
    dirty: bool = False
    served: PubId = NONE
    # What the daemon knows, lost with it.
    receiving: bool = False
    lent_for: PubId | None = None
    complete: PubId | None = None
    offer: Offer | None = None
    seq: int = 0
    came_with: PubId = NONE

    @property
    def trains(self) -> bool:
        return self.key.startswith("trainer/")

    def new_mover(self) -> None:
        self.lives += 1
        self.life = self.lives

    def forget(self) -> None:
        self.receiving, self.lent_for, self.complete, self.offer, self.landed = False, None, None, None, set()

    def register(self) -> None:
        """The daemon hears from the client what it serves."""
        self.came_with = NONE if self.dirty else self.served

    def holds(self, publication: PubId) -> bool:
        serves = self.served == publication and not self.dirty
        return self.complete == publication or (serves and not self.receiving)

    def info(self) -> RankInfo:
        side, group, rank = self.key.split("/")
        mode = "in_place" if side == "engine" else side
        return RankInfo(
            self.key, side, group, int(rank), self.world, f"{self.key}#{self.incarnation}", self.halves,
            mode, self.life, True, self.came_with,
        )  # fmt: skip


@dataclass
class Driver:
    """One lane on one node, under the token that the node knows."""

    token: int = 0
    built: bool = False
    prepared: PubId | None = None
    declared: bool = False
    edge: tuple[str, ...] = ()
    failed: str = ""


@dataclass
class Node:
    name: str
    ranks: dict[str, Rank]
    alive: bool = True
    life: int = 1
    drivers: dict[str, Driver] = field(default_factory=dict)
    planners: tuple[int, ...] = (1,)
    dissents: bool = False  # computes other plans than everybody else, until it is started anew


def copy_node(node: Node) -> Node:
    ranks = {}
    for key, rank in node.ranks.items():
        ranks[key] = copy.copy(rank)
        ranks[key].chunks, ranks[key].landed = dict(rank.chunks), set(rank.landed)
    drivers = {replica: copy.copy(driver) for replica, driver in node.drivers.items()}
    return Node(node.name, ranks, node.alive, node.life, drivers, node.planners, node.dissents)
