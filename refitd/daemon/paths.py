"""Where a job's records lie in the store, and which of them are told to whom.

Most records concern everybody. Acks and offers do not: an ack is for the nodes of its lane, an offer for the leader,
and at 1,024 nodes a turn of all lanes writes thousands of them. They lie apart, as ``_acks/…`` and ``_offers/…``, so
that what everybody follows is one span, told in one order.
"""

from __future__ import annotations

from refitd.store import Span, below

_PRIVATE = ("acks/", "offers/")


class Paths:
    """One job's part of the store, ``/refitd/<job>/``."""

    def __init__(self, job: str) -> None:
        self.prefix = f"/refitd/{job}/"
        self.everything = below(self.prefix)
        self.private = below(f"{self.prefix}_")
        self.shared = Span(self.private.end, self.everything.end)  # names begin with letters, which sort behind "_"
        self.acks = below(self.path("acks/"))

    def path(self, key: str) -> str:
        """The store's key of a record."""
        return f"{self.prefix}_{key}" if key.startswith(_PRIVATE) else self.prefix + key

    def key(self, path: str) -> str:
        """A record by its key in the store."""
        return path.removeprefix(self.prefix).removeprefix("_")

    def acks_of(self, replica: str) -> Span:
        """Everybody's acks in one lane."""
        return below(self.path(f"acks/{replica}/"))

    def offers_of(self, node: str) -> Span:
        """The offers of one node."""
        path = self.path(f"offers/{node}")
        return Span(path, f"{path}\0")
