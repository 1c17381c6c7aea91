"""When a shadow that holds what is still to be applied may be emptied for a newer publication."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from refitd.daemon.prepare import APPLY_SECONDS, Preparer
from refitd.daemon.rank import LocalRank
from refitd.epoch.records import Ack, Lane, PubId, Slot
from refitd.hook.messages import HOST_SHADOW
from refitd.hook.page import ControlPage, Taken

BEFORE, HELD, NEXT = PubId(1, 5), PubId(1, 7), PubId(1, 8)
LEAD, MATE = "engine/r0/0", "engine/r0/1"


class Shadows:
    """A node with the lead, or with its mate only; both hold HELD and serve BEFORE."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.ranks = {}
        for key in keys:
            page = ControlPage.create()
            page.generation, page.revision = BEFORE
            page.set_shadow_publication(*HELD)
            self.ranks[key] = LocalRank(cast("Any", SimpleNamespace(key=key)), MagicMock(), "d", HOST_SHADOW, page)
        self.ack: Ack | None = None
        view = SimpleNamespace(ack=lambda _replica, node: self.ack if node == "a" else None)
        lane = Lane("r0", (Slot(LEAD, "a", 1, "i", 1, "d"), Slot(MATE, "b", 2, "j", 1, "d")), (), (), (), "")
        context = SimpleNamespace(ranks=self.ranks, agreement=SimpleNamespace(view=view))
        self.preparer = Preparer(cast("Any", SimpleNamespace(lane=lane, replica="r0", token=9, context=context)))
        self.preparer._since = NEXT, time.monotonic()

    def emptied(self, key: str) -> bool:
        """Whether it may be filled with NEXT; its page says the same."""
        may = self.preparer._spoil(self.ranks[key], NEXT)
        assert self.ranks[key].page.shadow_publication == ((0, 0) if may else HELD)
        if may:
            self.ranks[key].fill(NEXT)
        return may

    def lead_says(self, phase: str, about: PubId, lead: PubId, token: int = 9) -> None:
        self.ack = Ack(token, "d", phase, *about, {}, BEFORE, lead=lead)

    def applies(self, key: str) -> None:
        self.ranks[key].page.generation, self.ranks[key].page.revision = HELD


@pytest.fixture
def both() -> Iterator[Shadows]:
    yield from made(LEAD, MATE)


@pytest.fixture
def mate() -> Iterator[Shadows]:
    yield from made(MATE)


def made(*keys: str) -> Iterator[Shadows]:
    shadows = Shadows(keys)
    yield shadows
    for rank in shadows.ranks.values():
        rank.page.close()


def test_the_leads_shadow_goes_first(both: Shadows) -> None:
    """From then on it can take no ticket of what the others still hold."""
    assert not both.emptied(MATE)
    assert both.emptied(LEAD)
    assert both.emptied(MATE)


def test_what_the_lead_has_taken_is_applied_by_all(both: Shadows) -> None:
    """Each rank in its own time."""
    both.ranks[LEAD].page.take(Taken(*HELD, 5))
    assert not both.emptied(LEAD)
    both.applies(LEAD)
    assert both.emptied(LEAD)
    assert not both.emptied(MATE)
    both.applies(MATE)
    assert both.emptied(MATE)


def test_a_lead_that_takes_its_ticket_at_that_moment(both: Shadows, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wrote what it takes before it looked at its shadow; we look after we have emptied it."""
    lead = both.ranks[LEAD]
    monkeypatch.setattr(LocalRank, "spoil_shadow", lambda rank: rank.page.take(Taken(*HELD, 5)))
    assert not both.emptied(LEAD)
    assert (lead.taken, lead.page.shadow_publication) == (HELD, HELD)


@pytest.mark.parametrize(
    ("phase", "about", "lead", "token", "may"),
    [
        ("prepared", NEXT, BEFORE, 9, True),
        ("verified", NEXT, BEFORE, 9, True),
        ("built", PubId(0, 0), BEFORE, 9, False),  # its shadow may still be full
        ("failed", PubId(0, 0), BEFORE, 9, False),
        ("prepared", HELD, BEFORE, 9, False),
        ("prepared", NEXT, BEFORE, 8, False),
        ("prepared", NEXT, HELD, 9, False),  # it has applied it
    ],
)
def test_a_lead_elsewhere_says_that_its_shadow_is_empty(
    phase: str, about: PubId, lead: PubId, token: int, may: bool, mate: Shadows
) -> None:
    """With its word that it is ready for the newer publication, under the present token."""
    assert not mate.emptied(MATE)
    mate.lead_says(phase, about, lead, token)
    assert mate.emptied(MATE) is may


def test_nobody_waits_for_ever(mate: Shadows) -> None:
    """A rank that failed to apply is not asked to again."""
    mate.preparer._since = NEXT, time.monotonic() - APPLY_SECONDS
    assert mate.emptied(MATE)


def test_what_is_served_already_is_not_waited_for(mate: Shadows) -> None:
    """The usual case: nothing is asked of anybody."""
    mate.applies(MATE)
    assert mate.emptied(MATE)
