"""The trainer's side: offer weights, learn when they may change again, and who has them now.

Nothing here waits without bound and nothing here ends a trainer: without a daemon that answers, an offer is SKIPPED.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from refitd.errors import RefitdError
from refitd.failpoints import failpoint
from refitd.hook.blocks import Block, blocks_of
from refitd.hook.client import CALL_SECONDS, FIRST_SECONDS, RELEASE_SECONDS, Client, Identity, Registration
from refitd.hook.executor import AUTO
from refitd.hook.gpu.lend import current_device
from refitd.hook.memory import Export, Staging
from refitd.hook.messages import SKIPPED, TRAINER
from refitd.hook.offer import Offer
from refitd.hook.registration import Geometry, keep_of, moved, require_layout
from refitd.stamps import stamp

PLAN_SECONDS = 2.0


class Trainer:
    """One trainer rank. Made by `connect_trainer`; a context manager.

    `plan_seconds`: how long an offer waits for a first lane to plan it before it is SKIPPED.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.plan_seconds = PLAN_SECONDS
        self._layout: Geometry | None = None
        self._staging = Staging()
        self._seq = 0
        self._offers: weakref.WeakValueDictionary[int, Offer] = weakref.WeakValueDictionary()
        self._told: object = None

    def register(self, layout: Geometry) -> None:
        """Hand over this rank's geometry. Raises what the daemon finds wrong with it (LayoutError, Refused).

        Without a daemon the layout is kept and handed over when one answers.
        """
        registration = Registration(TRAINER, keep_of(layout, ()), layout.to_bytes(), _no_state, None, current_device())
        self._layout, self._told = layout, None
        self.client.register(registration, time.monotonic() + FIRST_SECONDS)

    def publish(self, step: int, tensors: Mapping[str, Any], streams: Sequence[Any] = ()) -> Offer:
        """Offer live weights. ``tensors``: storage name -> tensor (torch, DTensor or NumPy), as in the layout.

        Tensors in a `SharedArena`, and tensors that are all on one GPU, are lent until `Offer.released` returns; all
        others are copied here. ``streams``: every torch.cuda.Stream that has written them; an event is recorded on each
        and waited for. Without any, all that the GPU was given so far is waited for. The daemon's part takes 0.2 s at
        most (5 s the first time). Raises InputError for tensors that are not the layout's, streams not of their GPU.
        """
        stamp("publish", self.client.identity.key)
        self.client.own()
        blocks = blocks_of(tensors, moved(self._layout, require_layout(self._layout).keep))
        seconds = CALL_SECONDS if self._seq else FIRST_SECONDS
        self._take_memory_back()
        started = time.monotonic()
        if not self._reach_daemon(started + seconds):
            return self._skipped(step, self.client.failure)
        seconds -= time.monotonic() - started
        export = self._export(blocks, streams)
        stamp("publish.synced", self.client.identity.key)
        return self._offer(step, export, seconds)

    def _take_memory_back(self) -> None:
        """End the loan of the last offer, staged or live, before anything of it is overwritten."""
        self.client.end_loan()
        self._seq += 1
        for offer in list(self._offers.values()):
            offer.settle(SKIPPED, "a newer publish replaced it")

    def _reach_daemon(self, deadline: float) -> bool:
        reached = self.client.drain() or self.client.advance(deadline)
        self._hear()
        return reached

    def _export(self, blocks: Mapping[str, Block], streams: Sequence[Any]) -> Export:
        export = self._staging.export(blocks, streams)
        for block, place in export.staged:
            block.save(place)
        return export

    def _offer(self, step: int, export: Export, seconds: float) -> Offer:
        offer = Offer(self, self._seq, step, export.live)
        try:
            offer.await_answer(self._send(step, export), time.monotonic() + seconds)
        except RefitdError as error:
            self._told = None
            return self._skipped(step, str(error))
        self._offers[offer.seq] = offer
        self._hear()
        failpoint("offer", role="trainer", key=self.client.identity.key)
        return offer

    def _send(self, step: int, export: Export) -> int:
        """Start the publish; memory that this daemon knows already is not described again."""
        inodes = [os.fstat(fd).st_ino for fd in export.fds] if export.device is None else []
        telling = (self.client.life, export.fields(), inodes)
        known, self._told = telling == self._told, telling
        fields = {"memory": None} if known else export.fields()
        try:
            return self.client.start(
                "publish", () if known else export.fds, seq=self._seq, step=step, word=self.client.page.loan_word,
                **fields,
            )  # fmt: skip
        finally:
            export.close()
            stamp("publish.sent", self.client.identity.key)

    def _skipped(self, step: int, reason: str) -> Offer:
        offer = Offer(self, self._seq, step, live=False)
        offer.settle(SKIPPED, reason)
        return offer

    def listen(self, deadline: float) -> None:
        """Wait a little, at most until ``deadline``, and hand events to their offers. Raises DaemonUnavailable."""
        try:
            if not self.client.events:
                self.client.wait(deadline)
        finally:
            self._hear()

    def _hear(self) -> None:
        while self.client.events:
            event = self.client.events.popleft()
            offer = self._offers.get(event.get("seq", 0))
            if offer is not None:
                offer.hear(event)

    def release(self) -> None:
        """Before weights that were lent are freed or moved: returns when no mover has them mapped.

        Raises DaemonUnavailable where that cannot be known, Refused where the daemon does not answer in time.
        """
        self._take_memory_back()
        self._told = None
        self.client.release(RELEASE_SECONDS)

    def close(self) -> None:
        """Withdraw everything and end the registration; harmless when repeated."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _no_state() -> None:
    return None


def connect_trainer(
    job: str, run: str, rank: int, world_size: int, socket: str | None = None, path: str = AUTO
) -> Trainer:
    """Connect rank ``rank`` of the trainer group ``run``. Works without a daemon too, which is then tried again later.

    ``path``: who moves the weights, a ``child`` of the daemon or a thread of this process (``library``); ``auto``: a
    child where one can reach the memory. Raises InputError for bad names and ranks, Refused where the daemon does not
    let this rank in.
    """
    return Trainer(Client(Identity(job, TRAINER, run, rank, world_size), socket, mover=path).connect())
