"""Every error that refitd raises, in one tree. Each says in one sentence what went wrong.

RefitdError
├── InputError                 somebody handed us something wrong: names field, expected, got
│   ├── ConfigError            configuration (exit status 78)
│   ├── LayoutError            one or more violations in one layout or one side
│   ├── MismatchError          the two sides do not describe the same model
│   ├── ProtocolError          bytes on a socket that break the protocol
│   └── Refused                a request that the rules do not allow (uid, claimed rank, stale ticket)
├── PlanError                  no plan exists (a region has no holder), with the regions
│   └── ProofError             a plan failed its own proof; never execute it
├── StoreError
│   ├── StoreUnavailable       nothing was changed; try again
│   ├── StoreTimeout           the outcome is unknown; read back before acting
│   ├── LeaseLost              the lease is gone, and all keys with it
│   ├── Compacted              the asked revision is no longer in the history
│   ├── PermissionDenied       the user may not touch this key
│   ├── Unauthenticated        no or wrong credentials
│   └── Untrusted              TLS failed: a certificate, an authority or a host name is refused
├── TransportError             an edge or a mover failed; names the edge
├── DeviceError                a GPU, its driver or its memory failed; names the call
├── DaemonUnavailable          no daemon answers at the socket
└── ReceiveFailed              a receive ended without a commit; the rank stays dirty
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

EX_CONFIG = 78


class RefitdError(Exception):
    """Base of everything that refitd raises on purpose."""


class InputError(RefitdError):
    """Something handed to refitd is wrong: ``field`` was ``got`` where ``expected`` was needed."""

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field, self.expected, self.got = field, expected, got


class ConfigError(InputError):
    """A configuration key is unknown, mistyped or out of range (exit status 78)."""


class ProtocolError(InputError):
    """Bytes arrived that break the protocol; the connection is closed."""


class Refused(InputError):
    """The request is well formed and not allowed."""


class _Violations(InputError):
    """Several faults of one object, reported together."""

    def __init__(self, violations: Iterable[InputError]) -> None:
        self.violations: Sequence[InputError] = tuple(violations)
        first = self.violations[0]
        super().__init__(first.field, first.expected, first.got)

    def __str__(self) -> str:
        return "; ".join(f"{v.field}: expected {v.expected}, got {v.got}" for v in self.violations)


class LayoutError(_Violations):
    """A layout contradicts itself, or a side contradicts itself; lists every violation."""


class MismatchError(_Violations):
    """Source and destination do not describe the same model; lists every difference."""


class PlanError(RefitdError):
    """No plan exists: a region that is needed has no holder."""


class ProofError(PlanError):
    """A plan failed its own proof; it must never run."""


class StoreError(RefitdError):
    """The membership store failed."""


class StoreUnavailable(StoreError):
    """The store did not take the request; nothing was changed."""


class StoreTimeout(StoreError):
    """The store did not answer in time; the outcome is unknown and must be read back."""


class LeaseLost(StoreError):
    """The lease expired or was revoked, and every key under it is gone."""


class Compacted(StoreError):
    """The history before ``revision`` is gone; list again."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"history before revision {revision} was compacted")
        self.revision = revision


class PermissionDenied(StoreError):
    """The store's user may not touch this key."""


class Unauthenticated(StoreError):
    """The store did not accept the credentials."""


class Untrusted(StoreError):
    """TLS failed: we refuse the store's certificate, authority or name, or it refuses ours; nothing was changed."""


class TransportError(RefitdError):
    """An edge between two ranks failed."""

    def __init__(self, edge: tuple[str, str], reason: str) -> None:
        super().__init__(f"edge {edge[0]} -> {edge[1]}: {reason}")
        self.edge, self.reason = edge, reason


class DeviceError(RefitdError):
    """A call to a GPU's driver failed: ``call`` answered ``status``."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
        self.call, self.status = call, status


class CommunicatorError(RefitdError):
    """A communicator failed: ``call`` ended with ``status``, or did not end in time."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
        self.call, self.status = call, status


class DaemonUnavailable(RefitdError):
    """No refitd daemon answers at the socket."""


class ReceiveFailed(RefitdError):
    """A receive ended without a commit; the rank stays dirty and must not serve."""
