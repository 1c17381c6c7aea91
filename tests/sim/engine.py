"""Simulated engines: replicas whose ranks take tickets together, lend memory, and serve what was committed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from typing import TYPE_CHECKING

from refitd.errors import DaemonUnavailable, ReceiveFailed, RefitdError, StoreTimeout, StoreUnavailable
from refitd.hook.messages import HOST_SHADOW, IN_PLACE, Ticket
from refitd.hook.page import Taken
from refitd.hook.shadow import shadow_offsets
from refitd.layout import Layout

from .client import Message, SimClient
from .loop import loop
from .memory import GARBAGE, SimMemory

if TYPE_CHECKING:
    from .world import Machine, World

RECEIVE_SECONDS = 120.0
_CALL_SECONDS = 10.0
_RETRY_SECONDS = 0.1
_SETTLE_SECONDS = 10.0


class Replica:
    """The processes that serve one copy of the model together. When one dies the others cannot go on: they end too, or
    wait for it (``waits``) and go on with the one that comes anew, once an order has been carried out by all.
    """

    def __init__(self, world: World, name: str, machines: list[Machine], layouts: list[Layout], mode: str) -> None:
        self.world, self.name, self.machines, self.layouts, self.mode = world, name, machines, layouts, mode
        self.ranks: dict[int, SimEngine] = {}
        self.retired = self.replaced = False
        self.waiting: set[SimEngine] = set()  # ranks that have not carried the present order out
        self.ordered: dict[int, SimEngine] = {}  # who there was when it was given
        self.applied: set[int] = set()  # ranks that had what they were to apply in their shadows
        self.refused: set[int] = set()  # ranks that had not
        self.torn = False  # some rank could not: nobody answers until an order is carried out by all
        self.waits = random.Random(f"waits {world.seed} {name}").random() < 0.4
        self.leaves = random.Random(f"leaves {world.seed} {name}").random() < 0.5  # who is sent away tries not again
        self.skips = name[-1] in "13579"  # some engines' ranks do nothing about a ticket for what they serve already

    @property
    def world_size(self) -> int:
        return len(self.machines)

    def become(self, machines: list[Machine], layouts: list[Layout]) -> None:
        """Of another size, once all that were there have ended."""
        self.machines, self.layouts = machines, layouts
        self.ranks.clear()
        self.waiting.clear()
        self.torn = False

    def leave_behind(self) -> Replica:
        """The processes that are here go on as a deployment that nobody waits for any more; but not one that no daemon
        has met yet: if it came to itself later, nobody could tell that it is the older one."""
        left = copy.copy(self)
        left.retired = left.replaced = True
        left.ranks, left.waiting = dict(self.ranks), set(self.waiting)
        for engine in self.ranks.values():
            engine.of = left
            if not engine.page.claim:
                engine.process.kill()
        return left

    def start(self, rank: int) -> None:
        if not self.retired and self.machines[rank].up and (rank not in self.ranks or self.ranks[rank].process.dead):
            self.torn = self.torn or rank in self.ranks
            self.ranks[rank] = SimEngine(self, rank)

    def whole(self) -> bool:
        return all(
            rank in self.ranks and not self.ranks[rank].process.dead and self.machines[rank].live_daemon
            for rank in range(self.world_size)
        )

    def order(self, ticket: Ticket) -> None:
        """The lead has a ticket: every worker does the same at its next step boundary."""
        self.torn, self.waiting = False, {engine for engine in self.ranks.values() if not engine.process.dead}
        self.ordered, self.applied, self.refused = dict(self.ranks), set(), set()
        for engine in self.ranks.values():
            engine.process.call(self.world.rng.uniform(0.0005, 0.01), engine.orders.put_nowait, ticket)

    def obeyed(self, engine: SimEngine, done: bool) -> None:
        self.waiting.discard(engine)
        self.torn = self.torn or not done

    def lead_is_done(self) -> bool:
        """Whether rank 0 has left the present order."""
        return self.ranks[0].process.dead or self.ranks[0] not in self.waiting

    @property
    def idle(self) -> bool:
        """Between two orders."""
        return not any(not engine.process.dead for engine in self.waiting)

    def end(self) -> None:
        for engine in list(self.ranks.values()):
            engine.process.kill()


class SimEngine(SimClient):
    """One rank of a replica."""

    side = "engine"
    stale_seconds = 10.0
    backoff = (0.1, 2.0)

    def __init__(self, replica: Replica, rank: int) -> None:
        self.of = replica
        self.orders: asyncio.Queue[Ticket] = asyncio.Queue()
        self.busy: Ticket | None = None
        self.step = 0
        self._offered: Ticket | None = None
        self._taken: Ticket | None = None
        self._mover: int | None = None
        self._lent, self._loan = False, 0
        self._keeps = False  # what was received is where the daemon was told that it is
        self._let_go = True  # since it last switched: it gave up a receive, released, or came anew to a daemon
        self._sent_away = False  # the daemon said that nobody waits for us in this receive
        self._patient_until = 0.0
        machine, layout = replica.machines[rank], replica.layouts[rank]
        super().__init__(machine, replica.name, rank, replica.world_size, layout, replica.mode)
        if replica.mode == HOST_SHADOW:
            _places, total = shadow_offsets(layout.storages)
            self.shadow = SimMemory(self, self.page, layout, total)
            self.world.remember(self, self.shadow)

    @property
    def publication(self) -> tuple[int, int]:
        return self.page.generation, self.page.revision

    def state(self) -> Message | None:
        if not any(self.publication) and not self.page.dirty:
            return None
        generation, revision = self.publication
        return {"generation": generation, "revision": revision, "step": self.step, "token": self.page.token,
                "dirty": bool(self.page.dirty)}  # fmt: skip

    def may_be_failed(self, act: str) -> bool:
        """Whether its daemon may fail a token for it: an engine that goes from one publication to the next, and does
        what it is called to, has given no reason."""
        again = "lends" in act and self.busy is not None and self.publication >= _taken(self.busy)[:2]
        return self._let_go or again

    def lends(self) -> tuple[Message, list[int]]:
        self._let_go = True
        if self._keeps and not self.page.dirty:
            return {"shadow": {"memory": self.memory.described(), "device": None}}, [self.memory.fd]
        return super().lends()

    async def main(self) -> None:
        rng = self.world.rng
        await asyncio.sleep(rng.uniform(0, 0.3))
        await self.advance(loop().time() + 5.0)
        while True:
            try:
                async with asyncio.timeout(rng.uniform(0.05, 0.3) * self.world.leisure):
                    ticket = await self.orders.get()
            except TimeoutError:
                await self._serve()
                continue
            self.busy = ticket
            self.of.obeyed(self, await self._obey(ticket))
            self.busy = None

    async def _serve(self) -> None:
        """A step of the engine: an answer from the weights as they are; between steps the lead asks for tickets."""
        await self._hear()
        if not self.page.dirty and any(self.publication) and self.of.idle and not self.of.torn:
            self.world.oracle.serves(self)
        if self.rank == 0 and self.of.idle and (ticket := self._pending()) is not None:
            self.of.order(ticket)

    async def _obey(self, ticket: Ticket) -> bool:
        """Carry a ticket out; whether this rank could."""
        if self.of.skips and self._serves(ticket) and (self._keeps or self.mode != IN_PLACE):
            return True
        while True:
            try:
                if ticket.kind == "receive":
                    await self._receive(ticket)
                else:
                    await self._apply(ticket)
                return True
            except ReceiveFailed as error:
                self.world.say("receive_failed", rank=self.key, reason=str(error))
                await asyncio.sleep(self.world.rng.uniform(0.05, 0.5))
                if self.of.lead_is_done() or self._sent_away:
                    return False  # nobody waits for us in this receive: the lead takes the next ticket
            except RefitdError as error:
                self.world.say("ticket_refused", rank=self.key, reason=str(error))
                return False

    # Tickets.

    def _pending(self) -> Ticket | None:
        offered = self._offered
        if self._taken is None and offered and offered.kind == "apply" and not self._serves(offered):
            self._offered = None
            self.page.take(_taken(offered))
            if self.page.shadow_publication != (offered.generation, offered.revision):
                return None
            self._taken = offered
            self.tell("committed", ticket=offered.to_json())
        return self._taken or self._offered

    async def _hear(self) -> None:
        self.check_alive()
        if not self.ready and not await self.advance(loop().time() + 0.2):
            self._offered = None
        while self.events:
            self._hear_one(self.events.popleft())

    def _hear_one(self, event: Message) -> None:
        if event["event"] == "ticket":
            self._offered = None if event["ticket"] is None else Ticket.from_json(event["ticket"])
        elif event["event"] == "commit":
            ticket = Ticket.from_json(event["ticket"])
            if self._serves(ticket) and ticket.token == self.page.token:
                self._tell_done(ticket)

    def _serves(self, ticket: Ticket) -> bool:
        return not self.page.dirty and self.publication == (ticket.generation, ticket.revision)

    def _switch(self, ticket: Ticket) -> None:
        page = self.page
        page.take(_taken(ticket))
        page.generation, page.revision, page.token = ticket.generation, ticket.revision, ticket.token
        self.step = ticket.step
        page.dirty = 0
        self._let_go = False
        self.world.oracle.switches(self, ticket)
        self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        if self._taken is not None and _taken(self._taken)[:2] <= _taken(ticket)[:2]:
            self._taken = None
        if self._offered is not None and _taken(self._offered)[:2] <= _taken(ticket)[:2]:
            self._offered = None

    def _tell_done(self, ticket: Ticket) -> None:
        self.tell("committed", ticket=ticket.to_json())
        self.tell("applied", ticket=ticket.to_json())

    def _check(self, ticket: Ticket) -> None:
        if (ticket.generation, ticket.revision) < self.publication:
            raise RefitdError(f"a ticket of {ticket.generation}, {ticket.revision} after {self.publication}")

    # host_shadow

    async def _apply(self, ticket: Ticket) -> None:
        self._check(ticket)
        assert self.shadow is not None
        seal = self._seal(ticket)
        self.page.dirty = 1
        await asyncio.sleep(self.world.rng.uniform(0.001, 0.02))
        self.memory.load(self.shadow)
        if self._seal(ticket) != seal:
            raise ReceiveFailed("the shadow changed while it was copied")
        self._switch(ticket)
        self.of.applied.add(self.rank)
        self.world.oracle.part(self, ticket)
        self.tell("applied", ticket=ticket.to_json())

    def _seal(self, ticket: Ticket) -> int:
        held = self.page.shadow_publication
        if held != (ticket.generation, ticket.revision):
            self._drop(ticket)
            self.of.refused.add(self.rank)
            self.world.oracle.part(self, ticket)
            raise RefitdError(f"the shadow holds {held}")
        return self.page.shadow_loan_word

    # in_place

    async def _receive(self, ticket: Ticket) -> None:
        self._check(ticket)
        await self._hear()
        deadline = loop().time() + RECEIVE_SECONDS
        was_dirty, self._lent, self._keeps, self._sent_away = self.page.dirty, False, False, False
        self.page.dirty = 1
        self.page.bump_loan()
        try:
            done = await self._until_committed(ticket, deadline)
        except ReceiveFailed:
            await self._take_back(was_dirty)
            raise
        finally:
            self._mover = None
        await asyncio.sleep(self.world.rng.uniform(0.0, 0.01))
        self._keeps = True
        self._switch(done)
        self._tell_done(done)

    async def _until_committed(self, ticket: Ticket, deadline: float) -> Ticket:
        while True:
            try:
                return await self._once(ticket, deadline)
            except DaemonUnavailable as error:
                await self._recover(error, deadline)

    async def _once(self, ticket: Ticket, deadline: float) -> Ticket:
        kept = [event for event in self.events if event["event"] == "ticket"]
        self.events.clear()
        for event in kept:
            self._hear_one(event)
        while (answer := await self._try_to_lend(ticket, deadline)) is None:
            if loop().time() >= deadline:
                raise ReceiveFailed("the daemon could not take the loan in time")
            await asyncio.sleep(_RETRY_SECONDS)
        self._mover = answer[0] if answer else None
        if self.world.plants("early-apply", self.machine.name):
            return ticket
        while True:
            while self.events:
                if (done := await self._loan_event(self.events.popleft(), ticket, deadline)) is not None:
                    return done
            if loop().time() >= deadline:
                raise ReceiveFailed("no commit came within the timeout")
            await self.listen(deadline - loop().time())

    async def _try_to_lend(self, ticket: Ticket, deadline: float) -> list[int] | None:
        word = self._loan = self.page.bump_loan()
        within = min(deadline - loop().time(), _CALL_SECONDS)
        try:
            answer = await self.call("receive", [self.memory.fd], within=within, ticket=ticket.to_json(), word=word,
                                     memory=self.memory.described())  # fmt: skip
        except (StoreUnavailable, StoreTimeout):
            return None
        except DaemonUnavailable:
            raise
        except RefitdError as error:
            if loop().time() < self._patient_until:
                return None
            raise ReceiveFailed(f"the daemon refused: {error}") from error
        self._lent = True
        if answer is None:
            raise ReceiveFailed("the daemon did not answer the loan in time")
        return answer[1]

    async def _loan_event(self, event: Message, ticket: Ticket, deadline: float) -> Ticket | None:
        name = event["event"]
        if event.get("loan", self._loan) != self._loan:
            return None
        if name == "commit":
            done = Ticket.from_json(event["ticket"])
            newer = (done.generation, done.revision) >= (ticket.generation, ticket.revision)
            return done if newer and done.replica == ticket.replica else None
        if name == "failed":
            self._sent_away = self.rank == 0 or self.of.leaves
            raise ReceiveFailed(event["reason"])
        if name == "relend":
            await self._relend(deadline)
        else:
            self._hear_one(event)
        return None

    async def _relend(self, deadline: float) -> None:
        within = min(deadline - loop().time(), _CALL_SECONDS)
        try:
            answer = await self.call("relent", within=within, word=self.page.bump_loan())
        except DaemonUnavailable:
            raise
        except RefitdError as error:
            raise ReceiveFailed(f"the daemon refused: {error}") from error
        if answer is not None and answer[1]:
            self._mover = answer[1][0]

    async def _recover(self, error: Exception, deadline: float) -> None:
        """The daemon is gone: when its mover has ended too, find the next daemon."""
        self._lent = True
        while self._mover is not None and self._mover in self.world.movers:
            if loop().time() >= deadline:
                raise ReceiveFailed(f"{error}, and its mover still runs") from error
            await asyncio.sleep(0.01)
        self._mover = None
        while not await self.advance(min(deadline, loop().time() + _RETRY_SECONDS)):
            if loop().time() >= deadline:
                raise ReceiveFailed(f"{error}, and none came back in time") from error
            await asyncio.sleep(_RETRY_SECONDS)
        self._patient_until = loop().time() + _SETTLE_SECONDS

    async def _take_back(self, was_dirty: int) -> None:
        if not self._lent:
            self.page.dirty = was_dirty
            return
        self._let_go = True
        self.page.bump_loan()
        try:
            await self.call("release", within=1.0)
        except RefitdError:
            return

    async def quietly_release(self) -> None:
        """Before the weights move, between two receives: nobody has the old place mapped afterwards, or reads it."""
        if self.busy is None:
            self._keeps, self._let_go = False, True
            self.page.bump_loan()
            with contextlib.suppress(RefitdError):
                if await self.call("release", within=5.0) is not None and self.busy is None:
                    self._move()

    def _move(self) -> None:
        """The weights go elsewhere; the memory that they were in is used for something else."""
        if self.mode == IN_PLACE:
            old, self.memory = self.memory, SimMemory(self, self.page, self.layout)
            self.memory.load(old)
            self.world.remember(self, self.memory)
            for array in old.arrays.values():
                array[...] = GARBAGE


def _taken(ticket: Ticket) -> Taken:
    return Taken(ticket.generation, ticket.revision, ticket.token)
