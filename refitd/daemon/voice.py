"""What this node says of one lane: its ack, under the lane's token and its own membership."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from refitd.daemon.rank import NO_PUBLICATION
from refitd.epoch.codec import encode
from refitd.epoch.records import Ack, PubId
from refitd.store import Compare, CreateRevision, ModRevision

if TYPE_CHECKING:
    from refitd.daemon.lane import LaneDriver

_BACKOFF = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0)
_REASON = 2000  # characters of a reason that go into a record


class Failure(NamedTuple):
    """Why a token will not do; ``edge`` names two ranks where an edge failed, ``permanent``: nor will another."""

    edge: tuple[str, ...]
    reason: str
    permanent: bool

    def __str__(self) -> str:
        return " -> ".join(self.edge) + (": " if self.edge else "") + self.reason


class Voice:
    """Speaks for one lane driver. Failures that repeat are said more and more slowly, until a commit."""

    def __init__(self, driver: LaneDriver) -> None:
        self._driver = driver
        self.failure: Failure | None = None
        self._failures = 0
        self._after = 0.0

    def reset(self) -> None:
        """A new token: nothing has failed under it."""
        self.failure = None

    def committed(self) -> None:
        """What failed before is no reason to be slow any more."""
        self._failures = 0

    def fail(self, failure: Failure) -> float:
        """This token will not do; seconds until that is said. At once where our word is "verified": a commit may rest
        on that as long as it stands.
        """
        self.failure, delay = failure, _BACKOFF[min(self._failures, len(_BACKOFF) - 1)]
        said = self._driver.context.agreement.view.ack(self._driver.replica, self._driver.context.node)
        if said is not None and (said.token, said.phase) == (self._driver.token, "verified"):
            delay = 0.0
        self._failures += 1
        self._after = time.monotonic() + delay
        return delay

    async def speak(self) -> bool:
        """Write the ack where it differs from the record; whether it was written. Raises StoreError."""
        driver, ack = self._driver, self._ack()
        agreement, node = driver.context.agreement, driver.context.node
        if ack is None or ack == agreement.view.ack(driver.replica, node):
            return False
        member = agreement.view.members.get(node)
        if member is None or not agreement.alive:
            return False
        guards: list[Compare] = [
            ModRevision(agreement.compare_path(f"lanes/{driver.replica}"), driver.token),
            CreateRevision(agreement.compare_path(f"members/{node}"), member.created),
        ]
        key = f"acks/{driver.replica}/{node}"
        return await agreement.write(key, encode(ack), agreement.view.revision_of(key), leased=True, guards=guards)

    def _ack(self) -> Ack | None:
        driver, built = self._driver, self._driver.built
        each = [rank.served for rank in driver.my_members()]
        served, ahead = min(each, default=NO_PUBLICATION), max(each, default=NO_PUBLICATION)
        digest = built.plan.digest if built else ""
        lead, void = self._lead()
        if self.failure:
            edge, reason, permanent = self.failure
            if time.monotonic() < self._after:
                return None
            reason = reason[:_REASON]
            return Ack(driver.token, digest, "failed", 0, 0, {}, served, edge, reason, permanent, lead, ahead, void)
        if not built or not built.ready:
            return None
        phase, publication = self._progress()
        held = {rank.key: driver.held[rank.key] for rank in driver.my_members() if rank.key in driver.held}
        shown = (
            {key: driver.context.keep_blob(held[key].to_bytes()) for key in sorted(held)} if phase != "built" else {}
        )
        return Ack(driver.token, digest, phase, *publication, shown, served, lead=lead, ahead=ahead, void=void)

    def _lead(self) -> tuple[PubId, int]:
        """What the lead serves, may begin to serve (it took the ticket) or was sent away from, and up to which ticket
        receives are void, for nodes whose ranks may still wait in one."""
        lane = self._driver.lane
        lead = self._driver.context.ranks.get(lane.lead.key) if lane and lane.members else None
        if lead is None:
            return NO_PUBLICATION, 0
        return max(lead.served, lead.left, lead.taken if lead.shadowed else NO_PUBLICATION), lead.void

    def _progress(self) -> tuple[str, PubId]:
        prepared, attempt = self._driver.prepared, self._driver.attempt
        if prepared is None:
            return "built", NO_PUBLICATION
        done = attempt and attempt.declared and attempt.publication == prepared
        return ("verified" if done else "prepared"), prepared
