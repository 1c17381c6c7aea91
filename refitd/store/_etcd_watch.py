"""List-then-watch on one etcd stream: resumes after its last revisions, and says Resync where history has a gap.

etcd keeps the order of changes within a watch, not from one watch of a stream to another: one whose reader is slow, or
that begins in the past, falls behind alone.

etcd3's own watcher is not used: it drops every watch at a disconnect and spins while the server is away.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from refitd.errors import (
    InputError,
    PermissionDenied,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    Unauthenticated,
    Untrusted,
)
from refitd.store._chance import CHANCE
from refitd.store._etcd_channel import Channel
from refitd.store._etcd_codec import key_range, to_item
from refitd.store._etcd_endpoint import Endpoint, Metadata, Stubs, etcdrpc
from refitd.store._etcd_errors import translate
from refitd.store.base import Deleted, Event, Item, Keys, Put, Resync, Span, span_of

Lister = Callable[[Keys], tuple[list[Item], int]]
_BACKOFF = (0.05, 2.0)  # first and longest pause between attempts, seconds; half of it is random
RESYNC_AFTER = 60.0  # an outage longer than this, in seconds, ends in a Resync


class _Followed:
    """A span that a watch follows: ``next`` is the first revision that it has not given yet, 0 where it must list."""

    def __init__(self, span: Span, next_: int) -> None:
        self.span, self.next = span, next_


class _Stream:
    """One watch stream at one server, for many spans. It is ended when the server does not confirm one in time."""

    def __init__(self, channel: Channel) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked: deque[_Followed] = deque()  # what the server has yet to confirm, which it does in this order
        self._ids: dict[int, _Followed] = {}
        self._timeout, self._timer = channel.timeout, threading.Timer(0, lambda: None)
        self.endpoint: Endpoint
        self.metadata: Metadata
        self.endpoint, self.metadata, self._call = channel.stream("watch", self._start)

    def _start(self, stubs: Stubs, metadata: Metadata) -> Any:
        return stubs.watch.Watch(iter(self._requests.get, None), metadata=metadata)

    def follow(self, followed: _Followed) -> None:
        """Ask for a span's changes."""
        first, end = key_range(followed.span)
        create = etcdrpc.WatchCreateRequest(key=first, range_end=end, start_revision=followed.next)
        self._asked.append(followed)
        if len(self._asked) == 1:
            self._expect()
        self._requests.put(etcdrpc.WatchRequest(create_request=create))

    def leave(self, followed: _Followed) -> None:
        """Ask for no more of a span; one that is not confirmed yet is left once it is."""
        for number in [number for number, other in self._ids.items() if other is followed]:
            del self._ids[number]
            self._requests.put(etcdrpc.WatchRequest(cancel_request=etcdrpc.WatchCancelRequest(watch_id=number)))

    def read(self) -> Any:
        """The next response. Raises gRPC's errors, StopIteration at the end."""
        return next(self._call)

    def about(self, response: Any) -> _Followed | None:
        """Whose response that is; None for a span that was left."""
        if not response.created:
            found = self._ids.get(response.watch_id)
            if response.canceled:
                self._ids.pop(response.watch_id, None)
            return found
        self._timer.cancel()
        followed = self._asked.popleft()
        if self._asked:
            self._expect()
        if not response.canceled:
            self._ids[response.watch_id] = followed
        return followed

    def close(self) -> None:
        self._timer.cancel()
        self._requests.put(None)
        self.endpoint.release(self._call)

    def _expect(self) -> None:
        self._timer = threading.Timer(self._timeout, self._call.cancel)
        self._timer.daemon = True
        self._timer.start()


class EtcdWatch:
    """A Watch over one etcd stream, read in the caller's thread."""

    def __init__(self, channel: Channel, lister: Lister, span: Span, from_revision: int) -> None:
        self._channel, self._list = channel, lister
        self._spans = {span: _Followed(span, from_revision)}
        self._pending: deque[Event] = deque()
        self._lock = threading.Lock()  # of spans and stream
        self._stop = threading.Event()
        self._stream: _Stream | None = None
        self._cluster = 0
        self._failures = 0
        self._denied = False
        self._untrusted = 0  # servers in a row that TLS refused
        self._last_contact = time.monotonic()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._stop.is_set():
            if self._pending:
                return self._pending.popleft()
            self._advance()
        raise StopIteration

    def add(self, keys: Keys, from_revision: int) -> None:
        """Follow more keys, on the stream that there is. Raises InputError without a revision to begin at."""
        if from_revision < 1:
            raise InputError("add.from_revision", "at least 1", str(from_revision))
        followed = _Followed(span_of(keys), from_revision)
        with self._lock:
            self._forget(followed.span)
            self._spans[followed.span] = followed
            if self._stream is not None:
                self._stream.follow(followed)

    def drop(self, keys: Keys) -> None:
        """Follow some keys no more."""
        with self._lock:
            self._forget(span_of(keys))

    def _forget(self, span: Span) -> None:
        followed = self._spans.pop(span, None)
        if followed is not None and self._stream is not None:
            self._stream.leave(followed)

    def close(self) -> None:
        """End the iterator, from any thread."""
        self._stop.set()
        self._drop()

    def _advance(self) -> None:
        stream = self._stream
        behind = next((followed for followed in tuple(self._spans.values()) if followed.next <= 0), None)
        try:
            if behind is not None:
                self._resync(behind, *self._list(behind.span))
            elif stream is None:
                self._open()
            else:
                self._take(stream, stream.read())
        except StopIteration:
            self._failed(stream, "it ended a watch")
        except grpc.RpcError as error:
            self._broken(stream, error)
        except (StoreUnavailable, StoreTimeout):
            self._lost()

    def _broken(self, stream: _Stream | None, error: grpc.RpcError) -> None:
        """A stream that etcd refused is denied; one that was cut is resumed elsewhere, if anybody is to be trusted."""
        ours = translate(error, write=False, address=stream.endpoint.address if stream else "")
        if isinstance(ours, Unauthenticated | PermissionDenied):
            self._refused(stream, ours)
            return
        ours = self._channel.explained(stream.endpoint, ours) if stream else ours
        self._untrusted = self._untrusted + 1 if isinstance(ours, Untrusted) else 0
        if self._untrusted >= self._channel.servers:
            self._drop()
            raise ours
        self._failed(stream, str(ours))

    def _failed(self, stream: _Stream | None, reason: str) -> None:
        if stream is not None and not self._stop.is_set():
            self._channel.blame(stream.endpoint, reason)
        self._lost()

    def _open(self) -> None:
        stream = _Stream(self._channel)
        with self._lock:
            if not self._stop.is_set():
                self._stream = stream
                for followed in self._spans.values():
                    stream.follow(followed)
                return
        stream.close()

    def _take(self, stream: _Stream, response: Any) -> None:
        self._contact()
        self._channel.note(response.header)
        with self._lock:
            followed = stream.about(response)
            if followed is not None and self._spans.get(followed.span) is not followed:
                stream.leave(followed)
                return
        if followed is None:
            return
        if response.compact_revision:
            followed.next = 0
        elif response.canceled:
            self._canceled(stream, followed.span, response.cancel_reason)
        elif response.created:
            self._denied = False
            self._check_history(stream, response.header, followed)
        elif response.events:
            # Not the header's revision: while a watch catches up, that is ahead of the events sent so far.
            followed.next = response.events[-1].kv.mod_revision + 1
            self._pending.extend(self._event(event) for event in response.events)

    def _event(self, event: Any) -> Event:
        if event.type == event.DELETE:
            return Deleted(event.kv.key.decode(), event.kv.mod_revision)
        return Put(to_item(event.kv))

    def _check_history(self, stream: _Stream, header: Any, followed: _Followed) -> None:
        """A server whose history ends before ours lags behind, or was set up anew; a list tells which."""
        same = self._cluster in (0, header.cluster_id)
        self._cluster = header.cluster_id
        if same and header.revision + 1 >= followed.next:
            return
        _items, revision = self._list(followed.span)
        if not same:
            self._drop()
            self._begin_anew()
        elif revision + 1 < followed.next:
            followed.next = 0
            with self._lock:
                stream.leave(followed)

    def _begin_anew(self) -> None:
        for followed in tuple(self._spans.values()):
            followed.next = 0

    def _resync(self, followed: _Followed, items: list[Item], revision: int) -> None:
        self._contact()
        followed.next = revision + 1
        with self._lock:
            if self._spans.get(followed.span) is not followed:
                return
            if self._stream is not None:
                self._stream.follow(followed)
        self._pending.append(Resync(tuple(items), revision, followed.span))

    def _canceled(self, stream: _Stream, span: Span, reason: str) -> None:
        text = f"etcd ended the watch of {span.first!r} to {span.end!r}: {reason}"
        if "permission denied" in reason:
            self._refused(stream, PermissionDenied(text))
        elif "auth" in reason.lower():
            self._refused(stream, Unauthenticated(text))
        elif "no leader" in reason:
            self._failed(stream, reason)
        else:
            self._drop()
            raise StoreError(text)

    def _refused(self, stream: _Stream | None, error: StoreError) -> None:
        """etcd says the same for a token that it no longer knows: log in once more before believing it."""
        self._drop()
        if self._denied or stream is None or not self._channel.login.has_user:
            raise error
        self._denied = True
        self._channel.login.forget(stream.metadata)

    def _contact(self) -> None:
        self._failures, self._last_contact = 0, time.monotonic()

    def _lost(self) -> None:
        self._drop()
        if time.monotonic() - self._last_contact > RESYNC_AFTER:
            self._begin_anew()
        first, longest = _BACKOFF
        pause = min(first * 2.0 ** min(self._failures, 10), longest)
        self._failures += 1
        self._stop.wait(pause * CHANCE.uniform(0.5, 1.0))

    def _drop(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
