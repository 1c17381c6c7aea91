"""One run of a program in a simulated mover: what is verified, what was sent, and what failed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from refitd.plan import NETWORK, Program

Edge = tuple[str, str]


class Round:
    """One run of a program."""

    def __init__(self, program: Program, message: dict[str, Any]) -> None:
        self.program, self.options = program, message
        self.attempt, self.publication = message["attempt"], tuple(message["publication"])
        self.words: dict[str, int] = dict(message["words"])
        self.incoming = {bucket.id: bucket for bucket in program.receives()}
        self.outgoing = list(program.sends())
        self.verified: set[int] = set()
        self.sent: set[int] = set()
        self.ready: dict[str, int] = {}
        self.failures: dict[Edge, str] = {}
        self.rx: Counter[str] = Counter()
        self.tx: Counter[str] = Counter()
        self.told: set[Edge] = set()
        self.stopped = self.told_landed = self.told_done = False

    @property
    def landed(self) -> bool:
        return all(b.stage != 0 or i in self.verified for i, b in self.incoming.items())

    @property
    def finished(self) -> bool:
        complete = len(self.verified) == len(self.incoming) and len(self.sent) == len(self.outgoing)
        return complete and not self.failures

    def expects(self, edge: Edge) -> bool:
        src = edge[0]
        if edge in self.failures:
            return False
        return any(b.src == src and b.link == NETWORK and i not in self.verified for i, b in self.incoming.items())

    def needs(self, edge: Edge) -> bool:
        if edge[0] != self.program.rank:
            return self.expects(edge)
        return any(b.dst == edge[1] and b.id not in self.sent for b in self.outgoing)

    def state(self) -> dict[str, Any]:
        verified = sorted(self.verified)
        return {"attempt": self.attempt, "verified": verified, "rx": dict(self.rx), "tx": dict(self.tx)}
