"""Writable memory on loan to a mover, from the moment it is lent until a commit, across deaths of the daemon."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping

from refitd.errors import DaemonUnavailable, ReceiveFailed, RefitdError, StoreTimeout, StoreUnavailable
from refitd.failpoints import failpoint
from refitd.hook.blocks import Block
from refitd.hook.channel import Answered, readable, remaining
from refitd.hook.client import Client
from refitd.hook.memory import SharedArena, Staging
from refitd.hook.messages import Ticket
from refitd.hook.wire import Message
from refitd.stamps import stamp

_CALL_SECONDS = 10.0
_RETRY_SECONDS = 0.1
_RELEASE_SECONDS = 1.0
_SETTLE_SECONDS = 10.0  # a daemon that has just started may refuse until its movers run and its records are read


class Loan:
    """One receive: lends, follows the daemon's events, and lends again to the next daemon when this one dies."""

    def __init__(
        self,
        client: Client,
        ticket: Ticket,
        blocks: Mapping[str, Block],
        staging: Staging,
        deadline: float,
        others: Callable[[Message], None],
    ) -> None:
        """``others`` is given the events that are not about this loan."""
        self._client, self._ticket, self._deadline, self._others = client, ticket, deadline, others
        self._staging, self._export = staging, staging.export(blocks)
        stamp("receive.synced", client.identity.key)
        self._mover: int | None = None
        self._patient_until = 0.0
        self._lent, self._word = False, 0
        self._was_dirty = client.page.dirty

    @property
    def arena(self) -> SharedArena | None:
        """Where that was received which lies outside of memory that could be lent; None where nothing does."""
        return self._export.arena

    def run(self) -> Ticket:
        """Lend until a commit comes; the ticket that was committed.

        Raises ReceiveFailed: the rank is then dirty, unless the daemon refused before anything was lent.
        """
        self._client.page.dirty = 1
        try:
            self._fill_staging()
            while True:
                try:
                    return self._once()
                except DaemonUnavailable as error:
                    self._recover(error)
        except BaseException:
            self._take_back()
            raise
        finally:
            self._forget_mover()
            self._export.close()

    def _fill_staging(self) -> None:
        """What no piece covers (padding) must come back as it was, so staging starts as a copy."""
        self._client.end_loan()
        for block, place in self._export.staged:
            block.save(place)

    def land(self) -> None:
        """Copy what was received outside of the live tensors into them."""
        for block, place in self._export.staged:
            block.load(place)

    def _once(self) -> Ticket:
        """One daemon's share of it."""
        self._lend()
        if failpoint("early-apply", role="engine", key=self._client.identity.key):
            return self._ticket
        while True:
            while self._client.events:
                if (done := self._hear(self._client.events.popleft())) is not None:
                    return done
            if time.monotonic() >= self._deadline:
                raise ReceiveFailed("no commit came within the timeout")
            self._client.wait(self._deadline)

    def _lend(self) -> None:
        """Lend everything to this daemon; while its store is away, try again until the deadline."""
        self._forget_events()
        while (answer := self._try_to_lend()) is None:
            if time.monotonic() >= self._deadline:
                raise ReceiveFailed("the daemon could not take the loan in time")
            time.sleep(_RETRY_SECONDS)
        self._keep_mover(answer[1])

    def _try_to_lend(self) -> Answered | None:
        self._word, fds = self._client.end_loan(), self._export.fds
        loan = {"ticket": self._ticket.to_json(), "word": self._word, **self._export.fields()}
        try:
            number = self._client.start("receive", fds, **loan)
            stamp("receive.sent", self._client.identity.key)
            answer = self._client.finish(number, self._call_deadline())
        except (StoreUnavailable, StoreTimeout):
            return None
        except DaemonUnavailable:
            raise
        except RefitdError as error:
            if time.monotonic() < self._patient_until:
                return None
            raise ReceiveFailed(f"the daemon refused: {error}") from error
        self._lent = True  # without an answer it may be lent all the same
        if answer is None:
            self._client.forget(number)
            raise ReceiveFailed("the daemon did not answer the loan in time")
        return answer

    def _call_deadline(self) -> float:
        return min(self._deadline, time.monotonic() + _CALL_SECONDS)

    def _forget_events(self) -> None:
        """What was said about an earlier loan must not count for this one."""
        for event in list(self._client.events):
            if event["event"] == "ticket":
                self._others(event)
        self._client.events.clear()

    def _hear(self, event: Message) -> Ticket | None:
        """React to one event; the ticket of a commit. What a slow daemon says of an earlier receive is nothing."""
        name = event["event"]
        if event.get("loan", self._word) != self._word:
            return None
        if name == "commit":
            stamp("commit.heard", self._client.identity.key)
            return self._commit(Ticket.from_json(event["ticket"]))
        if name == "failed":
            raise ReceiveFailed(event["reason"])
        if name == "relend":
            self._relend()
        else:
            self._others(event)
        return None

    def _commit(self, ticket: Ticket) -> Ticket | None:
        asked = self._ticket
        newer = (ticket.generation, ticket.revision) >= (asked.generation, asked.revision)
        return ticket if newer and (ticket.job, ticket.replica) == (asked.job, asked.replica) else None

    def _relend(self) -> None:
        """The daemon wants the memory for another attempt, or another mover: the old loan ends first."""
        try:
            answer = self._client.call("relent", deadline=self._call_deadline(), word=self._client.end_loan())
        except DaemonUnavailable:
            raise
        except RefitdError as error:
            raise ReceiveFailed(f"the daemon refused: {error}") from error
        if answer is not None and answer[1]:
            self._keep_mover(answer[1])

    def _keep_mover(self, fds: list[int]) -> None:
        """Hold the pidfd of the mover that may write, the first of ``fds``; close the others."""
        self._forget_mover()
        self._mover = fds[0] if fds else None
        for fd in fds[1:]:
            os.close(fd)

    def _forget_mover(self) -> None:
        if self._mover is not None:
            os.close(self._mover)
            self._mover = None

    def _recover(self, error: DaemonUnavailable) -> None:
        """The daemon is gone: when its mover has ended too, find the next daemon."""
        self._lent = True
        if self._mover is not None and not readable(self._mover, self._deadline):
            raise ReceiveFailed(f"{error}, and its mover still runs") from error
        self._forget_mover()
        while not self._client.advance(min(self._deadline, time.monotonic() + _RETRY_SECONDS)):
            if time.monotonic() >= self._deadline:
                raise ReceiveFailed(f"{error}, and none came back in time") from error
            time.sleep(min(_RETRY_SECONDS, remaining(self._deadline)))
        self._patient_until = time.monotonic() + _SETTLE_SECONDS

    def _take_back(self) -> None:
        """Nothing that is written from here on counts; memory that was never lent is as clean as before."""
        if not self._lent:
            self._client.page.dirty = self._was_dirty
            return
        self._client.end_loan()
        self._staging.discard()
        with contextlib.suppress(RefitdError):
            self._client.call("release", deadline=time.monotonic() + _RELEASE_SECONDS)
