"""The membership store: one protocol over ``memory://``, ``etcd://`` and ``etcd+spawn://``."""

from __future__ import annotations

from refitd.errors import ConfigError
from refitd.store.base import (
    Compare,
    CreateRevision,
    Deleted,
    DeleteOp,
    Event,
    GetOp,
    Item,
    Lease,
    ModRevision,
    Op,
    Put,
    PutOp,
    Resync,
    Store,
    TxnResult,
    Value,
    Watch,
)
from refitd.store.memory import MemoryStore

__all__ = [
    "Compare",
    "CreateRevision",
    "DeleteOp",
    "Deleted",
    "Event",
    "GetOp",
    "Item",
    "Lease",
    "MemoryStore",
    "ModRevision",
    "Op",
    "Put",
    "PutOp",
    "Resync",
    "Store",
    "TxnResult",
    "Value",
    "Watch",
    "open_store",
]


def open_store(url: str) -> Store:
    """The store at ``url``. Raises ConfigError for a scheme that is none of ours."""
    scheme, _, rest = url.partition("://")
    if scheme == "memory" and not rest:
        return MemoryStore()
    raise ConfigError("store.url", "memory://, etcd://host:port[,host:port] or etcd+spawn://[data folder]", repr(url))
