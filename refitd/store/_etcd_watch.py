"""List-then-watch on one etcd stream: resumes after its last revision, and says Resync where history has a gap.

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

from refitd.errors import PermissionDenied, StoreError, StoreTimeout, StoreUnavailable, Unauthenticated, Untrusted
from refitd.store._chance import CHANCE
from refitd.store._etcd_channel import Channel
from refitd.store._etcd_codec import key_range, to_item
from refitd.store._etcd_endpoint import Endpoint, Metadata, Stubs, etcdrpc
from refitd.store._etcd_errors import translate
from refitd.store.base import Deleted, Event, Item, Put, Resync

Lister = Callable[[str], tuple[list[Item], int]]
_BACKOFF = (0.05, 2.0)  # first and longest pause between attempts, seconds; half of it is random
RESYNC_AFTER = 60.0  # an outage longer than this, in seconds, ends in a Resync


class _Stream:
    """One watch stream at one server. It is ended when the server does not confirm it in time."""

    def __init__(self, channel: Channel, create: Any) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(etcdrpc.WatchRequest(create_request=create))
        self.endpoint: Endpoint
        self.metadata: Metadata
        self.endpoint, self.metadata, self._call = channel.stream("watch", self._start)
        self._timer = threading.Timer(channel.timeout, self._call.cancel)
        self._timer.daemon = True
        self._timer.start()

    def _start(self, stubs: Stubs, metadata: Metadata) -> Any:
        return stubs.watch.Watch(iter(self._requests.get, None), metadata=metadata)

    def read(self) -> Any:
        """The next response. Raises gRPC's errors, StopIteration at the end."""
        response = next(self._call)
        self._timer.cancel()
        return response

    def close(self) -> None:
        self._timer.cancel()
        self._requests.put(None)
        self.endpoint.release(self._call)


class EtcdWatch:
    """A Watch over one etcd stream, read in the caller's thread."""

    def __init__(self, channel: Channel, lister: Lister, prefix: str, from_revision: int) -> None:
        self._channel, self._list, self._prefix, self._next = channel, lister, prefix, from_revision
        self._pending: deque[Event] = deque()
        self._lock = threading.Lock()
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

    def close(self) -> None:
        """End the iterator, from any thread."""
        self._stop.set()
        self._drop()

    def _advance(self) -> None:
        stream = self._stream
        try:
            if self._next <= 0:
                self._resync(*self._list(self._prefix))
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
        first, end = key_range(self._prefix)
        stream = _Stream(self._channel, etcdrpc.WatchCreateRequest(key=first, range_end=end, start_revision=self._next))
        with self._lock:
            if not self._stop.is_set():
                self._stream = stream
                return
        stream.close()

    def _take(self, stream: _Stream, response: Any) -> None:
        self._contact()
        self._channel.note(response.header)
        if response.compact_revision:
            self._next = 0
            self._drop()
        elif response.canceled:
            self._canceled(stream, response.cancel_reason)
        elif response.created:
            self._denied = False
            self._check_history(response.header)
        elif response.events:
            # Not the header's revision: while a watch catches up, that is ahead of the events sent so far.
            self._next = response.events[-1].kv.mod_revision + 1
            self._pending.extend(self._event(event) for event in response.events)

    def _event(self, event: Any) -> Event:
        if event.type == event.DELETE:
            return Deleted(event.kv.key.decode(), event.kv.mod_revision)
        return Put(to_item(event.kv))

    def _check_history(self, header: Any) -> None:
        """A server whose history ends before ours lags behind, or was set up anew; a list tells which."""
        same = self._cluster in (0, header.cluster_id)
        self._cluster = header.cluster_id
        if same and header.revision + 1 >= self._next:
            return
        items, revision = self._list(self._prefix)
        if not same or revision + 1 < self._next:
            self._drop()
            self._resync(items, revision)

    def _resync(self, items: list[Item], revision: int) -> None:
        self._contact()
        self._pending.append(Resync(tuple(items), revision))
        self._next = revision + 1

    def _canceled(self, stream: _Stream, reason: str) -> None:
        text = f"etcd ended the watch of {self._prefix!r}: {reason}"
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
            self._next = 0
        first, longest = _BACKOFF
        pause = min(first * 2.0 ** min(self._failures, 10), longest)
        self._failures += 1
        self._stop.wait(pause * CHANCE.uniform(0.5, 1.0))

    def _drop(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
