"""The reference of the protocol is made from the code."""

from __future__ import annotations

from reference import PAGE, filled, tables

from refitd.epoch import view
from refitd.hook import messages


def test_the_reference_is_up_to_date() -> None:
    """docs/protocol.md has the tables of `python tests/docs/reference.py`, whatever stood between their marks."""
    page = PAGE.read_text()
    assert filled(page) == page
    assert filled(page.replace("| `relent` |", "| `relented` |")) == page


def test_nothing_is_left_out() -> None:
    """Each message of the hook, each kind of record, and each record inside of one has a row."""
    rows = {name: table.count("\n") - 2 for name, table in tables().items()}
    assert rows["messages"] == len(messages.REQUESTS) + len(messages.EVENTS)
    assert rows["records"] == len(view._SINGLES) + len(view._TABLES)
    named = {"OfferId", "RankInfo", "Offer", "Slot", "SlotId", "Exclusion", "Suspicion"}
    assert {line.split(" | ")[0].removeprefix("| ") for line in tables()["parts"].splitlines()[2:]} == named
