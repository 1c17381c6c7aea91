"""The membership store: one protocol over ``memory://``, ``etcd://`` and ``etcd+spawn://``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refitd.errors import ConfigError
from refitd.store.base import (
    Compare,
    CreateRevision,
    Deleted,
    DeleteOp,
    Event,
    GetOp,
    Item,
    Keys,
    Lease,
    ModRevision,
    Op,
    Put,
    PutOp,
    Resync,
    Span,
    Store,
    TxnResult,
    Value,
    Watch,
    below,
    span_of,
)
from refitd.store.memory import MemoryStore

if TYPE_CHECKING:
    from refitd.store.spawn import EtcdProcess, Prefer

__all__ = [
    "Compare",
    "CreateRevision",
    "DeleteOp",
    "Deleted",
    "Event",
    "GetOp",
    "Item",
    "Keys",
    "Lease",
    "MemoryStore",
    "ModRevision",
    "Op",
    "Put",
    "PutOp",
    "Resync",
    "Span",
    "Store",
    "TxnResult",
    "Value",
    "Watch",
    "below",
    "open_store",
    "span_of",
    "spawn_etcd",
]


_EXPECTED = "memory://, etcd://host:port[,host:port] or etcd+spawn://[data folder]"


def open_store(
    url: str,
    *,
    user: str = "",
    password_file: str = "",
    ca: str = "",
    cert: str = "",
    key: str = "",
    listen: str = "",
    request_timeout: float = 2.0,
) -> Store:
    """The store at ``url``; the options are those of the configuration's ``store`` section.

    ``memory://`` is a new, private store each time; etcd need not be up yet. ``listen``: where a spawned etcd serves
    other daemons too, which needs ``ca``, ``cert`` and ``key``. Raises ConfigError for a URL that is none of ours,
    StoreUnavailable when a spawned etcd does not come up. grpc is imported only when etcd is asked for.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("memory", "etcd", "etcd+spawn") or (scheme == "memory" and rest):
        raise ConfigError("store.url", _EXPECTED, repr(url) if "@" not in url else "one with '@'")  # a password's
    credentials = {"user": user, "password_file": password_file, "ca": ca, "cert": cert, "key": key}
    if listen:
        return _spawn(rest, listen, scheme, credentials, request_timeout)
    for name, given in credentials.items():
        if given and scheme != "etcd":
            raise ConfigError(f"store.{name}", "an etcd:// URL that it is for", f"{scheme}://")
    if scheme == "memory":
        return MemoryStore()
    if scheme == "etcd+spawn":
        from refitd.store.spawn import SpawnedStore

        return SpawnedStore(rest, request_timeout)
    from refitd.store._etcd_endpoint import Credentials
    from refitd.store.etcd import EtcdStore

    return EtcdStore(rest, Credentials(**credentials), request_timeout)


def _spawn(data: str, listen: str, scheme: str, credentials: dict[str, str], request_timeout: float) -> Store:
    """An etcd of our own that other machines can reach: only by certificates."""
    from refitd.store._etcd_endpoint import Credentials
    from refitd.store.spawn import SpawnedStore, Where

    if scheme != "etcd+spawn":
        raise ConfigError("store.listen", "an etcd+spawn:// URL that it is for", f"{scheme}://")
    if credentials["user"] or not all(credentials[name] for name in ("ca", "cert", "key")):
        given = [name for name, value in credentials.items() if value]
        raise ConfigError("store.listen", "store.ca, store.cert and store.key, and no user", f"only {given}")
    host, _, port = listen.rpartition(":")
    return SpawnedStore(data, request_timeout, where=Where(host, int(port), Credentials(**credentials)))


def spawn_etcd(data: str | None = None, prefer: Prefer = "path", port: int = 0, fsync: bool = False) -> EtcdProcess:
    """Start an etcd of our own; see refitd.store.spawn.spawn_etcd."""
    from refitd.store import spawn

    return spawn.spawn_etcd(data, prefer, port, fsync)
