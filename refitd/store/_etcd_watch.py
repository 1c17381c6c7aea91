"""List-then-watch on one etcd stream: resumes after its last revision, and says Resync where history has a gap.

etcd3's own watcher is not used: it drops every watch at a disconnect and spins while the server is away.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from refitd.errors import PermissionDenied, StoreError, StoreTimeout, StoreUnavailable
from refitd.store._etcd_channel import Channel, etcdrpc
from refitd.store.base import Deleted, Event, Item, Put, Resync

Lister = Callable[[str], tuple[list[Item], int]]
_BACKOFF = (0.05, 2.0)  # first and longest pause between attempts, seconds; half of it is random
RESYNC_AFTER = 60.0  # an outage longer than this, in seconds, ends in a Resync


def key_range(prefix: str) -> tuple[bytes, bytes]:
    """etcd's first key and range end for all keys with ``prefix``."""
    raw = prefix.encode()
    stripped = raw.rstrip(b"\xff")
    return (raw, stripped[:-1] + bytes([stripped[-1] + 1])) if stripped else (b"\0", b"\0")


def to_item(kv: Any) -> Item:
    """Our Item for etcd's KeyValue."""
    return Item(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


class EtcdWatch:
    """A Watch over one etcd stream, read in the caller's thread."""

    def __init__(self, channel: Channel, lister: Lister, prefix: str, from_revision: int) -> None:
        self._channel, self._list, self._prefix, self._next = channel, lister, prefix, from_revision
        self._pending: deque[Event] = deque()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._call: Any = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._token: str | None = None
        self._cluster = 0
        self._failures = 0
        self._denied = False
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
        try:
            if self._next <= 0:
                self._resync(*self._list(self._prefix))
            elif self._call is None:
                self._open()
            else:
                self._take(next(self._call))
        except StopIteration:
            self._lost()
        except grpc.RpcError:
            self._lost()
        except (StoreUnavailable, StoreTimeout):
            self._lost()

    def _open(self) -> None:
        first, end = key_range(self._prefix)
        create = etcdrpc.WatchCreateRequest(key=first, range_end=end, start_revision=self._next)
        self._channel.use(lambda client, metadata: self._start(client, metadata, create), write=False)

    def _start(self, client: Any, metadata: tuple[tuple[str, str], ...], create: Any) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self._token = dict(metadata).get("token")
            self._requests = queue.SimpleQueue()
            self._requests.put(etcdrpc.WatchRequest(create_request=create))
            requests = iter(self._requests.get, None)
            self._call = etcdrpc.WatchStub(client.channel).Watch(requests, metadata=metadata)

    def _take(self, response: Any) -> None:
        self._contact()
        if response.compact_revision:
            self._next = 0
            self._drop()
        elif response.canceled:
            self._canceled(response.cancel_reason)
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

    def _canceled(self, reason: str) -> None:
        self._drop()
        if "permission denied" not in reason:
            raise StoreError(f"etcd ended the watch of {self._prefix!r}: {reason}")
        # etcd says the same for a token that it no longer knows: log in once more before believing it.
        if self._denied or not self._channel.has_user:
            raise PermissionDenied(f"etcd: watch of {self._prefix!r}: {reason}")
        self._denied = True
        self._channel.forget_token(self._token)

    def _contact(self) -> None:
        self._failures, self._last_contact = 0, time.monotonic()

    def _lost(self) -> None:
        self._drop()
        if time.monotonic() - self._last_contact > RESYNC_AFTER:
            self._next = 0
        first, longest = _BACKOFF
        pause = min(first * 2.0 ** min(self._failures, 10), longest)
        self._failures += 1
        self._stop.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    def _drop(self) -> None:
        with self._lock:
            call, self._call = self._call, None
            self._requests.put(None)
        if call is not None:
            call.cancel()
