"""refitd: fault-tolerant elastic refit, shard to shard.

What trainers and engines use; nothing here imports torch, grpc or a logger until it is needed.
"""

from refitd.errors import (
    ConfigError,
    DaemonUnavailable,
    InputError,
    LayoutError,
    MismatchError,
    PlanError,
    ProtocolError,
    ReceiveFailed,
    RefitdError,
    Refused,
    StoreError,
)
from refitd.hook.engine import connect_engine
from refitd.hook.memory import shared_empty
from refitd.hook.messages import RELEASED, SKIPPED, Report, Ticket
from refitd.hook.trainer import connect_trainer
from refitd.layout import Layout
from refitd.plan import reshard

__all__ = [
    "RELEASED",
    "SKIPPED",
    "ConfigError",
    "DaemonUnavailable",
    "InputError",
    "Layout",
    "LayoutError",
    "MismatchError",
    "PlanError",
    "ProtocolError",
    "ReceiveFailed",
    "RefitdError",
    "Refused",
    "Report",
    "StoreError",
    "Ticket",
    "connect_engine",
    "connect_trainer",
    "reshard",
    "shared_empty",
]
