"""The body of an engine process: serve, and take new weights at a step boundary, together with its replica.

Serving is a digest over all weights: whatever a rank would have computed with, the driver learns of. The lead asks for
tickets; the driver carries each to every rank, as an engine's own control plane would.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import refitd
from refitd.demo.model import settle
from refitd.demo.nursery import Options, tell
from refitd.demo.shards import digest, engine_layout, engine_storages, raw
from refitd.demo.weights import Spec
from refitd.errors import RefitdError
from refitd.hook.messages import Ticket
from refitd.hook.wire import Connection, Message

POLL_SECONDS = 0.004
SERVE_SECONDS = 0.04
RECEIVE_SECONDS = 60.0


class EngineBody:
    """One rank. It serves only while the driver says that the whole replica does, and never while it is dirty."""

    def __init__(self, options: Options, driver: Connection, spec: Spec) -> None:
        self._options, self._driver = options, driver
        self.storages = engine_storages(spec, options["rank"])
        self.hook = refitd.connect_engine(
            job=options["job"], replica=options["replica"], rank=options["rank"], world_size=options["world"]
        )
        self.hook.register(engine_layout(spec, options["rank"]), mode=options["mode"])
        self.serving, self._due = False, 0.0
        self._spell = 0  # which of the driver's orders to serve we follow
        self._served: tuple[int, str] | None = None
        self._forwarded: Ticket | None = None

    def loop(self) -> None:
        """Serve until the driver hangs up (EOFError)."""
        tell(self._driver, "ready")
        while True:
            try:
                command, _fds = self._driver.receive(timeout=POLL_SECONDS)
                self._obey(command)
            except TimeoutError:
                self._turn()

    def _turn(self) -> None:
        """A step of the engine, where one is due, and its boundary."""
        if self.serving and not self.hook.dirty and time.monotonic() >= self._due:
            self._serve()
            self._due = time.monotonic() + SERVE_SECONDS
        self._ask()

    def _serve(self) -> None:
        step = self.hook.step
        if step is not None and (served := (step, digest(self.storages))) != self._served:
            self._served = served
            tell(self._driver, "serving", step=step, digest=served[1], spell=self._spell)

    def _ask(self) -> None:
        """Between two steps, ask for new weights (the lead is given a ticket); then wait for the driver's word."""
        ticket = self.hook.pending()
        if ticket is not None and ticket != self._forwarded:
            self._forwarded = ticket
            self.serving = False
            tell(self._driver, "ticket", ticket=ticket.to_json())

    def _obey(self, command: Message) -> None:
        match command["do"]:
            case "serve":
                self.serving, self._due, self._spell = True, 0.0, command["spell"]
                self._turn()
            case "hold":
                self.serving, self._served = False, None
            case "ticket":
                self._switch(Ticket.from_json(command["ticket"]))
            case "dump":
                self._dump(Path(command["path"]))

    def _switch(self, ticket: Ticket) -> None:
        self.serving, self._served = False, None
        tell(self._driver, "switching", ticket=ticket.to_json())
        try:
            if self._has(ticket):
                pass  # it came another way: by an earlier ticket, for a publication that replaced that one
            elif ticket.kind == "receive":
                ticket = self.hook.receive(ticket, self.storages, timeout=RECEIVE_SECONDS)
            else:
                self.hook.apply(ticket, self.storages)
        except RefitdError as error:  # the lead asks again; a dirty rank stays out of service
            self._forwarded = None
            tell(self._driver, "failed", why=f"{type(error).__name__}: {error}")
        else:
            tell(self._driver, "switched", ticket=ticket.to_json())
            tell(self._driver, "held", step=ticket.step, digest=digest(self.storages))

    def _has(self, ticket: Ticket) -> bool:
        return not self.hook.dirty and self.hook.publication == (ticket.generation, ticket.revision)

    def _dump(self, path: Path) -> None:
        """All storages, in the order of their names, for the driver's comparison."""
        with path.open("wb") as out:
            for name in sorted(self.storages):
                out.write(raw(self.storages[name]))
        tell(self._driver, "dumped", path=str(path))


def run(options: Options, driver: Connection, spec: Spec) -> None:
    """Serve until the driver hangs up. ``options``: job, replica, rank, world, mode, socket."""
    settle()
    os.environ["REFITD_SOCKET"] = options["socket"]
    EngineBody(options, driver, spec).loop()
