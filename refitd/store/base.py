"""What a membership store does: keys with revisions, leases, transactions and watches, as etcd has them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from refitd.errors import InputError

MAX_OPS = 128  # etcd's own limit of the parts of a transaction


@dataclass(frozen=True, slots=True)
class Item:
    """One key as it stood at a revision. ``lease`` is the lease id, 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Span(NamedTuple):
    """All keys from ``first`` on and before ``end``; an empty ``end`` means to the last key. Keys sort by code points,
    which is how etcd sorts their UTF-8 bytes."""

    first: str
    end: str

    def holds(self, key: str) -> bool:
        """Whether a key is one of them."""
        return self.first <= key and (not self.end or key < self.end)


def below(prefix: str) -> Span:
    """The keys that start with ``prefix``; empty: all keys. Raises InputError where it ends in the last code point."""
    if prefix.endswith(chr(0x10FFFF)):
        raise InputError("prefix", "not the last code point at the end", repr(prefix))
    return Span(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else "")


Keys: TypeAlias = str | Span  # a prefix, or what lies between two keys


def span_of(keys: Keys) -> Span:
    """Keys as a span."""
    return keys if isinstance(keys, Span) else below(keys)


@dataclass(frozen=True, slots=True)
class CreateRevision:
    """Holds when ``key`` was created at ``revision``; 0 means that it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ModRevision:
    """Holds when ``key`` last changed at ``revision``; 0 means that it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Value:
    """Holds when ``key`` exists and has exactly this value."""

    key: str
    value: bytes


Compare: TypeAlias = CreateRevision | ModRevision | Value


class Lease(Protocol):
    """A promise to be alive; its keys vanish when it is not renewed within ``ttl`` seconds."""

    @property
    def id(self) -> int:
        """The store's number of this lease, never 0."""

    @property
    def ttl(self) -> float:
        """Seconds that a renewal buys."""

    def keepalive(self) -> float:
        """Renew; the seconds now left. Raises LeaseLost, StoreUnavailable, StoreTimeout."""

    def revoke(self) -> None:
        """Give the lease up, with its keys; nothing happens when it is gone already."""


@dataclass(frozen=True, slots=True)
class PutOp:
    """Write ``value`` at ``key``; under ``lease`` when given, else under none."""

    key: str
    value: bytes
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class DeleteOp:
    """Remove ``key``; nothing happens when it does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class GetOp:
    """Read ``key``; its Item or None goes to ``TxnResult.items``."""

    key: str


Op: TypeAlias = PutOp | DeleteOp | GetOp


@dataclass(frozen=True, slots=True)
class TxnResult:
    """``ok``: all compares held. ``revision``: the store's afterwards. ``items``: of the GetOps that ran, in order."""

    ok: bool
    revision: int
    items: tuple[Item | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Put:
    """A key was written."""

    item: Item


@dataclass(frozen=True, slots=True)
class Deleted:
    """A key was removed, or its lease ended, at ``revision``."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Resync:
    """History has a gap: forget every key of ``span``; these are all its items at ``revision``."""

    items: tuple[Item, ...]
    revision: int
    span: Span = field(default=Span("", ""), compare=False)


Event: TypeAlias = Put | Deleted | Resync


class Watch(Protocol):
    """Iterator of changes to some keys, of each span's in the order of their revisions; blocks until the next.

    Spans are followed side by side and wait for each other nowhere: a change in one may be told after a later change in
    another. They must not overlap.
    """

    def __iter__(self) -> Iterator[Event]:
        """This watch itself."""

    def __next__(self) -> Event:
        """The next event; StopIteration after close(). Raises PermissionDenied, Unauthenticated."""

    def add(self, keys: Keys, from_revision: int) -> None:
        """Follow more keys, from any thread, without waiting: pass a list's revision + 1."""

    def drop(self, keys: Keys) -> None:
        """Follow some keys no more, from any thread; changes that were on their way may still be told."""

    def close(self) -> None:
        """End the iterator, from any thread."""


class Counts:
    """How many requests of each kind were sent: get, list, put, txn, grant, keepalive, revoke, watch, compact, login.

    What was sent again counts again, and a Resync is a list.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()

    def add(self, kind: str) -> None:
        """Count one request."""
        with self._lock:
            self._numbers[kind] += 1

    def so_far(self) -> Counter[str]:
        """A copy; subtract an earlier one to see what a piece of work cost."""
        with self._lock:
            return self._numbers.copy()

    def __repr__(self) -> str:
        return f"Counts({dict(self.so_far())})"


class Store(Protocol):
    """A membership store. Calls block for at most the request timeout and may come from any thread."""

    def get(self, key: str) -> Item | None:
        """The key as it is now, or None."""

    def list(self, keys: Keys) -> tuple[list[Item], int]:
        """All items of a prefix or a span, by key, and the revision that they were read at."""

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write; the revision it got. Raises LeaseLost; StoreTimeout when the outcome is unknown."""

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        """Do ``then`` when every compare holds, else ``otherwise``, as one change with one revision.

        Raises InputError when a branch writes a key twice or has more than MAX_OPS parts, LeaseLost, and StoreTimeout
        (outcome unknown, also after it was read back).
        """

    def grant(self, ttl_seconds: float) -> Lease:
        """A new lease. etcd rounds up to whole seconds and gives at least what it was asked for."""

    def watch(self, keys: Keys, from_revision: int = 0) -> Watch:
        """Changes with revision ``from_revision`` and later: pass a list's revision + 1.

        0 starts with a Resync. So does a revision whose history is gone.
        """

    @property
    def counts(self) -> Counts:
        """What was asked of the store so far."""

    @property
    def away(self) -> bool:
        """Whether what was heard of the store last is that it cannot be asked: nobody may learn anything new by it."""

    def close(self) -> None:
        """End all watches and free threads, sockets and children; later calls raise StoreUnavailable."""


def check_txn(compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> None:
    """Refuse what etcd refuses: an empty key, a key written twice in a branch, too many parts. Raises InputError."""
    for part in (*compares, *then, *otherwise):
        check_key("txn.key", part.key)
    _check_number("compares", compares)
    check_ops("then", then)
    check_ops("otherwise", otherwise)


def check_ops(name: str, ops: Sequence[Op]) -> None:
    """Refuse a branch that writes one key twice or is too long, as etcd does. Raises InputError."""
    _check_number(name, ops)
    written: set[str] = set()
    for op in ops:
        if isinstance(op, GetOp):
            continue
        if op.key in written:
            raise InputError(f"txn.{name}", "each key written once", f"{op.key} twice")
        written.add(op.key)


def _check_number(name: str, parts: Sequence[Op | Compare]) -> None:
    if len(parts) > MAX_OPS:
        raise InputError(f"txn.{name}", f"at most {MAX_OPS}", str(len(parts)))


def check_key(field: str, key: str) -> None:
    """Refuse an empty key. Raises InputError."""
    if not key:
        raise InputError(field, "a key", "an empty string")
