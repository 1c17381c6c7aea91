"""Keeps one lease alive, and says by its own clock from when on it may be dead.

The clock starts before a renewal is sent, so it is never behind the store's: until ``deadline`` the lease and its keys
surely stand. After an outage the old lease is tried first; only the store says that it is gone.

    HELD --deadline passes--> DOUBTFUL --renewed--> HELD
      `------------- the store does not know it ------> LOST --acquire()--> HELD
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable

from refitd.errors import LeaseLost, RefitdError
from refitd.store._chance import CHANCE
from refitd.store.base import Lease, Store

_RETRY = (0.1, 0.3)  # seconds between tries in an outage; a renewal itself waits for the store
_JOIN = 5.0


class Hold(enum.Enum):
    """What the owner may believe of its lease."""

    HELD = "held"
    DOUBTFUL = "doubtful"
    LOST = "lost"


Told = Callable[[Hold, str], None]


def _nobody(_hold: Hold, _reason: str) -> None:
    """Tell nobody."""


class LeaseKeeper:
    """A lease of ``ttl`` seconds, renewed every ``every`` seconds by a thread that needs nothing else.

    ``told(hold, reason)`` is called once for each change, in order, from one of two threads: at the deadline (not when
    a slow call comes back), when a renewal succeeds after it, and when the store says that the lease is gone.
    """

    def __init__(self, store: Store, ttl: float, every: float, told: Told | None = None) -> None:
        self._store, self._ttl, self._every, self._told = store, ttl, every, told or _nobody
        self._changed = threading.Condition()
        self._telling = threading.RLock()
        self._lease: Lease | None = None
        self._hold, self._deadline, self._closed = Hold.LOST, 0.0, False
        self._why, self._failed_at = "no answer yet", -math.inf  # of the last renewal that failed
        self._threads = [
            threading.Thread(target=target, name=f"lease-{name}", daemon=True)
            for target, name in ((self._renew_for_ever, "renew"), (self._watch_clock, "clock"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lease(self) -> Lease | None:
        """The lease to write under, also while it is in doubt; None when it is lost."""
        return self._lease

    @property
    def deadline(self) -> float:
        """time.monotonic() until which the lease surely stands."""
        return self._deadline

    @property
    def alive(self) -> bool:
        """Whether the lease surely stands now, also right after this process was stopped for a while."""
        return self._lease is not None and time.monotonic() < self._deadline

    @property
    def failed_at(self) -> float:
        """time.monotonic() of the last renewal that came to nothing, also where the lease is not in doubt yet."""
        return self._failed_at

    def acquire(self) -> Lease:
        """Take a new lease; an old one is given no thought. Raises StoreError."""
        sent = time.monotonic()
        lease = self._store.grant(self._ttl)
        self._set(lease, sent + lease.ttl, Hold.HELD, "granted")
        return lease

    def close(self, revoke: bool = True) -> None:
        """End the threads, and give the lease up with all its keys. Raises StoreError when that fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN)
        lease, self._lease = self._lease, None
        if lease is not None and revoke:
            lease.revoke()

    def _renew_for_ever(self) -> None:
        pause = self._every
        while self._wait(pause):
            pause = self._renew()

    def _renew(self) -> float:
        """One renewal; seconds until the next."""
        lease, sent = self._lease, time.monotonic()
        if lease is None:
            return self._every
        try:
            left = lease.keepalive()
        except LeaseLost as error:
            self._set(None, 0.0, Hold.LOST, str(error), of=lease)
        except RefitdError as error:  # a password file that is just being replaced must not end this thread
            self._why, self._failed_at = str(error), time.monotonic()
            return CHANCE.uniform(*_RETRY)
        else:
            self._set(lease, sent + left, Hold.HELD, "renewed", of=lease)
        return self._every

    def _watch_clock(self) -> None:
        """Tell of the deadline when it passes, whatever the renewing thread waits for."""
        while not self._closed:
            with self._changed:
                wait = None if self._hold is not Hold.HELD else self._deadline - time.monotonic()
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                lease, deadline = self._lease, self._deadline
            self._doubt(lease, deadline)

    def _doubt(self, lease: Lease | None, deadline: float) -> None:
        with self._telling:
            with self._changed:
                if self._closed or self._lease is not lease or self._deadline != deadline:
                    return  # renewed just now
                self._hold = Hold.DOUBTFUL
            self._told(Hold.DOUBTFUL, f"not renewed for its time to live: {self._why}")

    def _set(self, lease: Lease | None, deadline: float, hold: Hold, reason: str, of: Lease | None = None) -> None:
        """What is known now; ``of``: nothing, when that is no longer the lease."""
        with self._telling:
            with self._changed:
                if self._closed or (of is not None and self._lease is not of):
                    return
                before, self._hold = self._hold, hold
                self._lease, self._deadline = lease, deadline
                self._changed.notify_all()
            if hold is not before:
                self._told(hold, reason)

    def _wait(self, seconds: float) -> bool:
        """Whether to go on after a pause."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed, seconds)
