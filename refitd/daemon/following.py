"""The picture of one job's records, kept by one watch of those that this daemon has a use for.

Everybody follows what all share, in the order in which it was written. Acks are followed lane by lane by the lane's
nodes, in their own order; a leader follows everything. Nothing may rest on the order between the two: an ack names its
lane's token and its publication, and who writes because of acks compares their revisions.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Protocol

import structlog

from refitd.daemon.paths import Paths
from refitd.epoch.view import View
from refitd.errors import ProtocolError
from refitd.store import Event, Item, Put, Resync, Span, Store, Watch

_RETRY_SECONDS = (0.2, 30.0)  # before a watch that failed is opened again: the first time, and at most
MANY_LANES = 8  # with more, and most of all, it takes less to follow all acks


class Call(Protocol):
    """Runs a blocking request to the store."""

    def __call__(self, request: Callable[[], Any], /) -> Awaitable[Any]: ...


class Following:
    """Keeps `view`. All methods but those of the thread belong to the event loop; ``poke`` says that it has changed."""

    def __init__(
        self, store: Store, paths: Paths, call: Call, poke: Callable[[], None], broken: Callable[[], None]
    ) -> None:
        self.view = View()
        self.whole = 0  # where everything is followed: a revision at which everything was read
        self._store, self._paths, self._call, self._poke, self._broken = store, paths, call, poke, broken
        self._heard: dict[Span, int] = {}  # what is followed, and the revision up to which all of it has been told
        self._log = structlog.get_logger().bind(job=paths.prefix.split("/")[2])
        self._loop = asyncio.get_running_loop()
        self._watch: Watch | None = None
        self._told: deque[Event] = deque()
        self._due = False  # the loop will look at what was told
        self._closing = threading.Event()
        self._follower: threading.Thread | None = None

    async def read(self) -> int:
        """Read all records once; the revision at which they stood. Raises StoreError."""
        items, revision = await self._call(partial(self._store.list, self._paths.everything))
        for item in items:
            self.take(item)
        return int(revision)

    async def start(self) -> None:
        """Read what all share, and follow it. Raises StoreError where the store does not answer."""
        shared = self._paths.shared
        items, revision = await self._call(partial(self._store.list, shared))
        self._resync(shared, items, revision)
        self._watch = await self._call(partial(self._store.watch, shared, revision + 1))
        self._follower = threading.Thread(target=self._follow, name=f"watch{self._paths.prefix}", daemon=True)
        self._follower.start()

    def stop(self) -> None:
        """End the watch; `join` waits for its thread."""
        self._closing.set()
        if self._watch:
            self._watch.close()

    async def join(self) -> None:
        """Wait for the thread to end."""
        if self._follower:
            await asyncio.to_thread(self._follower.join)

    def revision_heard(self, key: str) -> int:
        """The revision up to which everything has been told that concerns a record."""
        return self._heard.get(self._span(self._paths.path(key)), 0)

    # Whom we listen to.

    async def follow(self, replicas: Collection[str], lender: str = "") -> None:
        """Follow the acks of these lanes, and the offers of a node, and nothing more. Raises StoreError."""
        paths, self.whole = self._paths, 0
        many = len(replicas) > MANY_LANES and 2 * len(replicas) > len(self.view.lanes)
        all_acks = bool(replicas) and (many or paths.acks in self._heard)  # once all, always all: it takes less to stay
        wanted = {paths.acks} if all_acks else {paths.acks_of(replica) for replica in replicas}
        wanted |= {paths.shared, *([paths.offers_of(lender)] if lender else ())}
        if self._heard.keys() == wanted:
            return
        self._leave(wanted)
        for span in sorted(wanted - self._heard.keys()):
            items, revision = await self._call(partial(self._store.list, span))
            self._begin(span, items, revision)

    async def follow_all(self, since: int) -> None:
        """Follow everything, and have read all of it at ``since`` or later. Raises StoreError.

        One list, so that a leader begins with a picture that was true as a whole, and as late as its leadership.
        """
        if self.whole >= since:
            return
        paths = self._paths
        self._leave({paths.shared, paths.private})
        items, revision = await self._call(partial(self._store.list, paths.everything))
        for span in (paths.shared, paths.private):
            found = [item for item in items if span.holds(item.key)]
            if span in self._heard:
                self._resync(span, found, revision)
            else:
                self._begin(span, found, revision)
        self.whole = revision

    async def picture(self) -> View:
        """All records as they are now, whatever of them we follow. Raises StoreError."""
        if self.whole:
            return self.view
        other = Following(self._store, self._paths, self._call, self._poke, self._broken)
        await other.read()
        return other.view

    def follows(self, replica: str) -> bool:
        """Whether we know the acks of a lane."""
        return self._span(self._paths.acks_of(replica).first) in self._heard

    def _begin(self, span: Span, items: list[Item], revision: int) -> None:
        if self._watch is not None:
            self._watch.add(span, revision + 1)
        if self._resync(span, items, revision):
            self._poke()

    def _leave(self, wanted: set[Span]) -> None:
        """Follow nothing but that; what nobody tells us of any more is forgotten, unless it will be read anew."""
        for span in self._heard.keys() - wanted:
            del self._heard[span]
            if self._watch is not None:
                self._watch.drop(span)
            for key in [*self._keys(span)]:
                if not any(other.holds(self._paths.path(key)) for other in wanted):
                    self.view.delete(key, self.view.revision_of(key) + 1)

    def _span(self, path: str) -> Span:
        """What we follow a key by; an empty span where we do not."""
        shared = self._paths.shared
        if shared.holds(path):
            return shared
        return next((span for span in self._heard if span.holds(path)), Span("", "\0"))

    def _keys(self, span: Span) -> list[str]:
        keys = self.view.keys()
        return [key for key in keys if span.holds(self._paths.path(key))]

    # What the watch tells.

    def _follow(self) -> None:
        """Thread: hand every change to the loop, and begin again after a fault, more and more slowly."""
        watch, pause = self._watch, _RETRY_SECONDS[0]
        while not self._closing.is_set():
            try:
                watch = watch or self._open_watch()
                for event in watch:
                    self._told.append(event)
                    if not self._due:
                        self._due = True
                        self._loop.call_soon_threadsafe(self._take_in)
                    pause = _RETRY_SECONDS[0]
                return
            except Exception as error:  # noqa: BLE001 - a daemon that no longer follows its records is worse than dead
                self._broken()  # what we do not hear of may be somebody's return
                self._log.warning("watch_failed", error=repr(error), again=pause)
                self._closing.wait(pause)
                watch, pause = None, min(2 * pause, _RETRY_SECONDS[1])

    def _open_watch(self) -> Watch:
        """A watch that begins with what all share. `stop` ends it, whichever of the two comes first."""
        watch = self._watch = self._store.watch(self._paths.shared)
        self._loop.call_soon_threadsafe(self._anew)
        if self._closing.is_set():
            watch.close()
        return watch

    def _anew(self) -> None:
        """A new watch: all but what it began with is to be read and followed again."""
        self.whole = 0
        self._heard = {span: heard for span, heard in self._heard.items() if span == self._paths.shared}
        self._poke()

    def _take_in(self) -> None:
        self._due = False
        changed = False
        while self._told:
            changed = self._apply(self._told.popleft()) or changed
        if changed:
            self._poke()

    def _apply(self, event: Event) -> bool:
        """One change; whether it says anything new."""
        if isinstance(event, Resync):
            return event.span in self._heard and self._resync(event.span, list(event.items), event.revision)
        path, revision = (
            (event.item.key, event.item.mod_revision) if isinstance(event, Put) else (event.key, event.revision)
        )
        span = self._span(path)
        heard = self._heard.get(span)
        if heard is None or revision <= heard:
            return False  # from before it was read, or after we left it
        self._heard[span] = revision - 1  # more of the same revision may follow
        return self.take(event.item) if isinstance(event, Put) else self.view.delete(self._paths.key(path), revision)

    def take(self, item: Item) -> bool:
        """A record as it was read; whether it is new. A broken one is logged, and none."""
        key = self._paths.key(item.key)
        try:
            return self.view.put(key, item.value, item.create_revision, item.mod_revision)
        except ProtocolError as error:
            self._log.error("record_refused", key=key, error=str(error))
            return False

    def _resync(self, span: Span, items: list[Item], revision: int) -> bool:
        """A part of the picture anew; an event that says nothing new must not wake anybody."""
        self._heard[span] = revision
        present = {self._paths.key(item.key) for item in items}
        gone = [self.view.delete(key, revision + 1) for key in self._keys(span) if key not in present]
        come = [self.take(item) for item in items]
        return any([*gone, *come])
