"""One offer of a trainer: when its weights may change again, and what became of it."""

from __future__ import annotations

import time
from typing import Protocol

from refitd.errors import DaemonUnavailable, RefitdError
from refitd.hook.channel import Answered
from refitd.hook.client import CALL_SECONDS, Client
from refitd.hook.messages import RELEASED, SKIPPED, Outcome, Report
from refitd.hook.wire import Message

_REPORT_SECONDS = 5.0


class Publisher(Protocol):
    """What an offer needs of its trainer."""

    client: Client
    plan_seconds: float

    def listen(self, deadline: float) -> None:
        """Wait a little for events and hand them to their offers. Raises DaemonUnavailable."""


class Offer:
    """One publish. `step` is its label; `reason` says why it was SKIPPED, or nobody took a copy (empty otherwise)."""

    def __init__(self, publisher: Publisher, seq: int, step: int, live: bool) -> None:
        """``live``: memory of the caller itself is lent, so the loan word must change before it may."""
        self.seq, self.step, self.reason = seq, step, ""
        self._publisher, self._client, self._live = publisher, publisher.client, live
        self._life = publisher.client.life
        self._published = time.monotonic()
        self._call: int | None = None
        self._planned = False
        self._over = False  # the daemon will not take it, whatever `released` said of weights that were copied
        self._outcome: Outcome | None = None
        self._report: Report | None = None

    def released(self, timeout: float = 30.0) -> Outcome:
        """Wait until the weights may change again, at most ``timeout`` seconds.

        RELEASED: every reader has what it needs (or the weights were copied at publish). SKIPPED: they were not
        taken, and `reason` says why. Either way what is read of these weights from now on cannot be committed.
        """
        if self._outcome is None and not self._live:
            self._outcome = RELEASED
        deadline = time.monotonic() + timeout
        while self._outcome is None:
            self._look(deadline)
        self._end_loan()
        return self._outcome

    def committed(self, timeout: float = 60.0, min_replicas: int | None = None) -> Report:
        """The report of this publication: one stored report, the same on every rank.

        Waits until all replicas (or ``min_replicas``) have it, at most ``timeout`` seconds; then the report is
        closed as it stands. Without a daemon, or for an offer that never became a publication: a local report
        without replicas, whose `closed` says why.
        """
        try:
            self._wait_for_report(time.monotonic() + timeout, min_replicas)
        except DaemonUnavailable:
            return self._report or self._local("no daemon")
        except RefitdError as error:
            return self._report or self._local(str(error))
        return self._report or self._local(self.reason or "the daemon has no report of it")

    def hear(self, event: Message) -> None:
        """Take in one event about this offer."""
        if event["event"] == "planned":
            self._planned = True
        elif event["event"] == "released":
            self._over = event["outcome"] == SKIPPED
            reason = event["reason"] if self._over else ""
            self.settle(Outcome(event["outcome"]), reason)
            self.reason = self.reason or reason
        elif event["event"] == "report":
            self._report = Report.from_json(event["report"])

    def settle(self, outcome: Outcome, reason: str) -> None:
        """Decide what `released` returns, unless that is decided."""
        if self._outcome is None:
            self._outcome, self.reason = outcome, reason

    def await_answer(self, call: int, deadline: float) -> None:
        """Wait for the daemon's answer to the publish; what is not there at ``deadline`` is looked for later."""
        self._call = call
        self._fetch_answer(deadline)

    def _fetch_answer(self, deadline: float) -> None:
        if self._call is not None:
            answer: Answered | None = self._client.finish(self._call, deadline)
            self._call = None if answer is not None else self._call

    def _look(self, deadline: float) -> None:
        """Learn more, or decide."""
        try:
            self._listen(deadline)
            self._fetch_answer(time.monotonic())
        except RefitdError as error:
            self.settle(SKIPPED, str(error))
        now = time.monotonic()
        if self._outcome is None and not self._planned and now - self._published > self._publisher.plan_seconds:
            self._withdraw(f"no lane has planned it within {self._publisher.plan_seconds:g} s")
        elif self._outcome is None and now >= deadline:
            self._withdraw("its readers had not finished at the caller's timeout")

    def _listen(self, deadline: float) -> None:
        if self._life != self._client.life:
            raise DaemonUnavailable("the daemon that took the offer is gone")
        self._publisher.listen(deadline)

    def _withdraw(self, reason: str) -> None:
        self.settle(SKIPPED, reason)
        self._end_loan()
        self._client.tell("withdraw", seq=self.seq, reason=reason)

    def _end_loan(self) -> None:
        if self._live:
            self._live = False
            self._client.end_loan()

    def _wait_for_report(self, deadline: float, min_replicas: int | None) -> None:
        if not self._ended:
            self._ask_report(False, min_replicas)
            while self._report is None and not self._ended and time.monotonic() < deadline:
                self._listen(deadline)
        if self._report is None:
            self._ask_report(True, min_replicas)

    @property
    def _ended(self) -> bool:
        return self._over or self._outcome is SKIPPED

    def _ask_report(self, close: bool, min_replicas: int | None) -> None:
        if self._life != self._client.life:
            raise DaemonUnavailable("the daemon that took the offer is gone")
        deadline = time.monotonic() + (_REPORT_SECONDS if close else CALL_SECONDS)
        answer = self._client.call("report", deadline=deadline, seq=self.seq, close=close, min_replicas=min_replicas)
        if answer is not None and answer[0]["report"] is not None:
            self._report = Report.from_json(answer[0]["report"])

    def _local(self, closed: str) -> Report:
        return Report(0, 0, self.step, [], {}, closed)
