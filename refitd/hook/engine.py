"""The engine's side: tickets at step boundaries, memory lent while new weights come in, and the switch to them.

The control page holds the truth about this rank (what it serves, whether it is dirty, which ticket it took), so a
daemon that comes back learns it from there. An engine that is dirty must not serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from refitd.errors import InputError, ReceiveFailed, RefitdError, Refused
from refitd.failpoints import failpoint
from refitd.hook.blocks import blocks_of
from refitd.hook.client import FIRST_SECONDS, RELEASE_SECONDS, Client, Identity, Registration
from refitd.hook.executor import AUTO
from refitd.hook.gpu.lend import current_device
from refitd.hook.loan import Loan
from refitd.hook.memory import Staging
from refitd.hook.messages import DEVICE_SHADOW, ENGINE, HOST_SHADOW, IN_PLACE, SHADOWS, Ticket
from refitd.hook.page import Taken
from refitd.hook.registration import Geometry, keep_of, moved
from refitd.hook.served import Served
from refitd.hook.shadows import DeviceShadow, HostShadow
from refitd.hook.wire import Message
from refitd.stamps import stamp

RECEIVE_SECONDS = 120.0
_BACKOFF = (0.1, 2.0)
_STALE_SECONDS = 10.0  # an engine has time: dropping a slow daemon would throw a transfer away


class Engine:
    """One engine rank. Made by `connect_engine`; a context manager."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.step: int | None = None
        self._layout: Geometry | None = None
        self._mode, self._keep = IN_PLACE, list[str]()
        self._staging = Staging()
        self._served = Served(client.page, self._staging)
        self._shadow: HostShadow | DeviceShadow | None = None
        self._offered: Ticket | None = None
        self._taken: Ticket | None = None

    @property
    def publication(self) -> tuple[int, int] | None:
        """(generation, revision) of what was committed here last, None before the first; see `dirty`."""
        page = self.client.page
        return (page.generation, page.revision) if page.generation or page.revision else None

    @property
    def dirty(self) -> bool:
        """True while the weights may be a mix of publications: this rank must not serve."""
        return bool(self.client.page.dirty)

    def register(
        self, layout: Geometry, mode: str = IN_PLACE, keep: Iterable[str] = (), budget: int | None = None
    ) -> None:
        """Hand over this geometry and how it takes new weights: ``in_place``, ``host_shadow`` or ``device_shadow``.

        ``keep``: patterns of storages that the trainer does not own. ``budget``, for ``device_shadow``: bytes of the
        current CUDA device that the shadow may take; it is allocated here. Raises InputError, DeviceError where there
        is no memory left, and what the daemon finds wrong (LayoutError, MismatchError, Refused). Without a daemon all
        is kept and handed over when one answers.
        """
        if mode not in (IN_PLACE, *SHADOWS):
            raise InputError("mode", f"{IN_PLACE}, {HOST_SHADOW} or {DEVICE_SHADOW}", repr(mode))
        patterns, document = keep_of(layout, keep), layout.to_bytes()
        self._layout, self._mode, self._keep = layout, mode, patterns
        self._shadow = self._make_shadow(layout, budget)
        self._served.forget()
        self.client.register(
            Registration(mode, patterns, document, self._state, self._shadow or self._served, current_device()),
            time.monotonic() + FIRST_SECONDS,
        )

    def _make_shadow(self, layout: Geometry, budget: int | None) -> HostShadow | DeviceShadow | None:
        if self._mode in SHADOWS:
            self.client.page.set_shadow_publication(0, 0)  # whatever the one before it holds
        if self._mode == DEVICE_SHADOW:
            return DeviceShadow(moved(layout, self._keep), budget)
        return HostShadow(layout.storages) if self._mode == HOST_SHADOW else None

    def _state(self) -> dict[str, Any] | None:
        page, publication = self.client.page, self.publication
        if publication is None and not self.dirty:
            return None
        generation, revision = publication or (0, 0)
        return {
            "generation": generation, "revision": revision, "step": self.step or 0,
            "token": page.token, "dirty": self.dirty,
        }  # fmt: skip

    def pending(self, wait: float = 0.0) -> Ticket | None:
        """The ticket that this replica should take now, or None. Only the replica's lead is ever given one.

        Every rank asks between two steps all the same: here it takes in what its daemon says, and comes back to one
        that was restarted. Without all of its ranks a replica gets nothing.

        Never blocks unless ``wait`` seconds are given. A ticket stays until it was received or applied, or until the
        daemon replaces it; one to ``apply`` is taken by being returned and is not replaced any more, unless it is for
        what is served already.
        """
        self.client.own()
        deadline = time.monotonic() + wait
        self._hear()
        while self._current() is None and time.monotonic() < deadline:
            self._wait(deadline)
            self._hear()
        return self._take() if self._taken is None else self._taken

    def _current(self) -> Ticket | None:
        return self._taken or self._offered

    def _wait(self, deadline: float) -> None:
        try:
            self.client.wait(deadline)
        except RefitdError:
            time.sleep(min(max(deadline - time.monotonic(), 0.0), _BACKOFF[0]))

    def _take(self) -> Ticket | None:
        """Hand the offered ticket out. For a shadow this is the commit: on the page first, then told. One for what is
        served already is for another rank of the replica, and stays an offer."""
        ticket = self._offered
        if ticket is not None and ticket.kind == "apply" and not self._serves(ticket):
            self._offered = None
            self.client.page.take(_taken(ticket))
            if self._shadowed() != (ticket.generation, ticket.revision):
                return None  # it is being filled with a newer one already
            self._taken = ticket
            self.client.tell("committed", ticket=ticket.to_json())
        return ticket

    def _hear(self) -> None:
        """Take in what came; without a daemon try to get one back, without waiting for it."""
        if not self.client.drain() and not self.client.advance(time.monotonic()):
            self._offered = None  # the next daemon decides anew what this replica should take
        while self.client.events:
            self._hear_one(self.client.events.popleft())

    def _hear_one(self, event: Message) -> None:
        if event["event"] == "ticket":
            stamp("ticket.heard", self.client.identity.key)
            self._offered = None if event["ticket"] is None else Ticket.from_json(event["ticket"])
        elif event["event"] == "commit":
            self._repeat(Ticket.from_json(event["ticket"]))

    def _repeat(self, ticket: Ticket) -> None:
        """A daemon that does not know whether its commit arrived asks again: say yes where it did."""
        if self._serves(ticket) and ticket.token == self.client.page.token:
            self._tell_done(ticket)

    def _serves(self, ticket: Ticket) -> bool:
        return not self.dirty and self.publication == (ticket.generation, ticket.revision)

    def receive(self, ticket: Ticket, tensors: Mapping[str, Any], timeout: float | None = None) -> Ticket:
        """``in_place``, on every worker of the paused replica: lend the weights' memory and return when committed.

        This rank is `dirty` from here until the whole publication was verified. Returns the ticket that was
        committed (a newer one where the publication was replaced meanwhile). The tensors are kept, so that daemons to
        come can lend them to neighbours, until the next receive or `release`. ``timeout`` seconds, 120 where None.
        Raises InputError or Refused before anything is lent; ReceiveFailed when it ends without a commit, and then
        the rank stays dirty and can receive again.
        """
        stamp("receive", self.client.identity.key)
        self._check(ticket, "receive", IN_PLACE)
        blocks = blocks_of(tensors, moved(self._layout, self._keep))
        self._hear()
        deadline = time.monotonic() + (RECEIVE_SECONDS if timeout is None else timeout)
        self._served.forget()
        loan = Loan(self.client, ticket, blocks, self._staging, deadline, self._hear_one)
        done = loan.run()
        failpoint("apply", role="engine", key=self.client.identity.key)
        loan.land()
        self._served.keep(blocks, loan.arena)
        self._switch(done)
        self._tell_done(done)
        stamp("receive.ended", self.client.identity.key)
        return done

    def apply(self, ticket: Ticket, tensors: Mapping[str, Any]) -> None:
        """In a shadow mode, on every worker at the same step boundary: copy the shadow into the live weights.

        On a GPU that is one batch on a stream of its own, after all that was begun on the device before.

        Raises InputError for tensors that are not the layout's, Refused for a ticket that is older than what is
        served, for another replica, or whose publication the shadow does not hold (any more); ReceiveFailed where the
        shadow changed during the copy, and DeviceError: the rank then stays dirty.
        """
        self._check(ticket, "apply", *SHADOWS)
        self._hear()  # a worker that is only told to apply has to read what its daemon says, too
        blocks = blocks_of(tensors, moved(self._layout, self._keep))
        assert self._shadow is not None
        seal = self._seal(ticket)
        self.client.page.dirty = 1
        failpoint("apply", role="engine", key=self.client.identity.key)
        self._shadow.load(blocks)
        if self._seal(ticket, torn=True) != seal:
            raise ReceiveFailed("the shadow changed while it was copied")
        self._switch(ticket)
        self.client.tell("applied", ticket=ticket.to_json())

    def _seal(self, ticket: Ticket, torn: bool = False) -> int:
        """The shadow's loan word while the shadow holds the ticket's publication as a whole."""
        page = self.client.page
        word, held = page.shadow_loan_word, self._shadowed()
        if held != (ticket.generation, ticket.revision):
            self._drop(ticket)
            if torn:
                raise ReceiveFailed(f"the shadow changed while it was copied: it holds {held}")
            raise Refused("ticket", f"the publication in the shadow, {held}", f"{ticket.generation}, {ticket.revision}")
        return word

    def _shadowed(self) -> tuple[int, int]:
        """The publication that the shadow holds. What the page says before a daemon knows this shadow is of another."""
        return self.client.page.shadow_publication if self.client.known else (0, 0)

    def _check(self, ticket: Ticket, kind: str, *modes: str) -> None:
        self.client.own()
        if ticket.kind != kind or self._mode not in modes:
            expected = f"{kind} in mode {' or '.join(modes)}"
            raise InputError("ticket.kind", expected, f"{ticket.kind} in mode {self._mode}")
        who = self.client.identity
        if (ticket.job, ticket.replica) != (who.job, who.group):
            raise Refused("ticket.replica", f"{who.job}/{who.group}", f"{ticket.job}/{ticket.replica}")
        if (ticket.generation, ticket.revision) < (self.publication or (0, 0)):
            raise Refused("ticket", f"a publication from {self.publication}", f"{ticket.generation}, {ticket.revision}")

    def _switch(self, ticket: Ticket) -> None:
        """Record what is served now; dirty is cleared last, when the rest is true."""
        page = self.client.page
        page.take(_taken(ticket))
        page.generation, page.revision, page.token = ticket.generation, ticket.revision, ticket.token
        self.step = ticket.step
        page.dirty = 0
        self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        """Nothing more is to be done about tickets up to this one's publication."""
        if self._taken is not None and _taken(self._taken)[:2] <= _taken(ticket)[:2]:
            self._taken = None
        if self._offered is not None and _taken(self._offered)[:2] <= _taken(ticket)[:2]:
            self._offered = None

    def _tell_done(self, ticket: Ticket) -> None:
        self.client.tell("committed", ticket=ticket.to_json())
        self.client.tell("applied", ticket=ticket.to_json())

    def release(self) -> None:
        """Before sleep or before the weights move: returns when no mover has this rank's memory mapped.

        A shadow on a device is freed: the next publication comes after the next `register`. Raises DaemonUnavailable
        where that cannot be known.
        """
        self._served.forget()
        self.client.end_loan()
        self.client.release(RELEASE_SECONDS)
        self.client.end_loan()  # nor does anybody count what was read since, under the word that stood there meanwhile
        if self._shadow is not None:
            self._shadow.drop()

    def close(self) -> None:
        """End the registration; harmless when repeated."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _taken(ticket: Ticket) -> Taken:
    return Taken(ticket.generation, ticket.revision, ticket.token)


def connect_engine(
    job: str, replica: str, rank: int, world_size: int, socket: str | None = None, path: str = AUTO
) -> Engine:
    """Connect rank ``rank`` of ``replica``. Works without a daemon too, which is then tried again at each `pending`.

    ``path``: as for a trainer. Raises InputError for bad names and ranks, Refused where the daemon does not let this
    rank in.
    """
    return Engine(
        Client(Identity(job, ENGINE, replica, rank, world_size), socket, _BACKOFF, _STALE_SECONDS, path).connect()
    )
