"""What a membership store does: keys with revisions, leases, transactions and watches, as etcd has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from refitd.errors import InputError


@dataclass(frozen=True, slots=True)
class Item:
    """One key as it stood at a revision. ``lease`` is the lease id, 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


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
    """History has a gap: forget everything under the prefix; these are all its items at ``revision``."""

    items: tuple[Item, ...]
    revision: int


Event: TypeAlias = Put | Deleted | Resync


class Watch(Protocol):
    """Iterator of the changes below a prefix, in the order of their revisions; blocks until the next one."""

    def __iter__(self) -> Iterator[Event]:
        """This watch itself."""

    def __next__(self) -> Event:
        """The next event; StopIteration after close(). Raises PermissionDenied, Unauthenticated."""

    def close(self) -> None:
        """End the iterator, from any thread."""


class Store(Protocol):
    """A membership store. Calls block for at most the request timeout and may come from any thread."""

    def get(self, key: str) -> Item | None:
        """The key as it is now, or None."""

    def list(self, prefix: str) -> tuple[list[Item], int]:
        """All items whose key starts with ``prefix``, by key, and the revision that they were read at."""

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write; the revision it got. Raises LeaseLost; StoreTimeout when the outcome is unknown."""

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        """Do ``then`` when every compare holds, else ``otherwise``, as one change with one revision.

        Raises InputError when a branch writes a key twice, LeaseLost, and StoreTimeout (outcome unknown).
        """

    def grant(self, ttl_seconds: float) -> Lease:
        """A new lease. etcd rounds up to whole seconds and gives at least what it was asked for."""

    def watch(self, prefix: str, from_revision: int = 0) -> Watch:
        """Changes with revision ``from_revision`` and later: pass a list's revision + 1.

        0 starts with a Resync. So does a revision whose history is gone.
        """

    def close(self) -> None:
        """End all watches and free threads, sockets and children; later calls raise StoreUnavailable."""


def check_ops(name: str, ops: Iterable[Op]) -> None:
    """Refuse a branch that writes one key twice, as etcd does. Raises InputError."""
    written: set[str] = set()
    for op in ops:
        if isinstance(op, GetOp):
            continue
        if op.key in written:
            raise InputError(f"txn.{name}", "each key written once", f"{op.key} twice")
        written.add(op.key)


def check_key(field: str, key: str) -> None:
    """Refuse an empty key. Raises InputError."""
    if not key:
        raise InputError(field, "a key", "an empty string")
