"""The one seam to whatever moves bytes: `peer` (shared memory) and `tcp` here; NCCL and CUDA IPC fit the same lines."""

from __future__ import annotations

from typing import Protocol

from refitd.mover.round import Round


class Transport(Protocol):
    """All edges of one link class of one lane under one token.

    Failures are reported on the lane's board and in its round, by edge; no method raises for them.
    """

    def connect(self) -> None:
        """Begin to build and warm every edge; the board's ``warm`` and ``broken`` tell how it went."""

    def run(self, round_: Round) -> None:
        """Begin this round's buckets. Earlier rounds have been halted by the caller, who holds the board's lock."""

    def progress(self) -> int:
        """Payload bytes that this transport has moved in the current round."""

    def revoke(self) -> None:
        """Stop: nothing new begins, and whatever blocks is woken. Returns at once; the lane cannot run again."""

    def abort(self) -> None:
        """Return when no worker is left. After that nothing of the lane is read or written. `revoke` comes first."""

    def close(self) -> None:
        """Free descriptors and buffers. `abort` comes first."""
