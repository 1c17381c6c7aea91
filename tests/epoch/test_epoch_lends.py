"""Who counts as a holder when a daemon has lost its hold on a client's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from epoch_records import Book, info

from refitd.epoch.holders import holders
from refitd.epoch.records import Commit, PubId


@pytest.mark.parametrize("lends", [True, False])
def test_a_committed_rank_holds_only_what_its_daemon_can_lend(lends: bool) -> None:
    """A replica that committed serves others only through ranks whose memory is at hand after a daemon's restart."""
    book = Book()
    rank = info("engine/r0/0")
    book.node("c", replace(rank, lends=lends))
    book.put("commits/r0", Commit(1, 7, 3, 5, {"engine/r0/0": rank.incarnation}))
    assert list(holders(book.view, PubId(1, 7))) == ["engine/r0/0"] * lends
