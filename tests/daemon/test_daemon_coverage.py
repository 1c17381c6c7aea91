"""What a leader knows of who holds what, and how seldom it has to find it out."""

from __future__ import annotations

import pytest

from refitd.daemon import coverage
from refitd.daemon.coverage import Coverage
from refitd.layout import Layout
from refitd.plan import Rank, covered
from refitd.testing import split_layout

SPEC = {"w": ((8, 4), "int64")}
KNOWN = {
    "a": split_layout(SPEC, 0, 2), "b": split_layout(SPEC, 1, 2), "all": split_layout(SPEC, 0, 1),
    "third": split_layout(SPEC, 0, 3), "other": split_layout({"w": ((4, 8), "int64")}, 0, 1),
    "stage": split_layout({"x": ((8, 4), "int64")}, 0, 1),
}  # fmt: skip
NEED = frozenset("ab")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many ranks of each side, of each time."""
    seen: list[tuple[int, int]] = []

    def counted(sources: list[Rank], members: list[Rank]) -> bool:
        seen.append((len(sources), len(members)))
        return covered(sources, members)

    monkeypatch.setattr(coverage, "covered", counted)
    return seen


def holds(known: Coverage, *have: str, need: frozenset[str] = NEED) -> bool:
    return known.holds(frozenset(have), need)


def test_the_same_layouts_hold_the_same(computed: list[tuple[int, int]]) -> None:
    """Nothing has to be known of them, or of others beside them."""
    known = Coverage(dict[str, Layout]().get)
    assert holds(known, "a", "b")
    assert holds(known, "a", "b", "elsewhere")
    assert not known.holds(frozenset("ab"), frozenset()), "a replica of which no rank is known"
    assert computed == []


def test_more_hold_no_less_and_fewer_no_more(computed: list[tuple[int, int]]) -> None:
    """One answer serves whatever has more, or less."""
    known = Coverage(KNOWN.get)
    assert holds(known, "all")
    assert holds(known, "all", "third")
    assert computed == [(1, 2)]
    assert not holds(known, "a", "third")
    assert not holds(known, "a")
    assert not holds(known, "third")
    assert computed == [(1, 2), (2, 2)]
    assert holds(known, "a", "b", need=frozenset({"third"}))
    assert computed == [(1, 2), (2, 2), (2, 1)], "of each that needs something"


def test_other_stages_do_not_hold_it(computed: list[tuple[int, int]]) -> None:
    """They know no such tensor: no contradiction, and no reason to read from them alone."""
    known = Coverage(KNOWN.get)
    assert not holds(known, "stage")
    assert holds(known, "stage", "all")
    assert len(computed) == 2


def test_who_differs_counts_for_itself_alone(computed: list[tuple[int, int]]) -> None:
    """Its lane says what is wrong; nothing follows for others."""
    known = Coverage(KNOWN.get)
    assert holds(known, "other")
    assert holds(known, "other")
    assert computed == [(1, 2)]
    assert not holds(known, "stage", "a")
    assert len(computed) == 2


def test_a_layout_that_is_not_here_is_waited_for(computed: list[tuple[int, int]]) -> None:
    """It may come: the answer is not kept."""
    layouts = dict(KNOWN)
    late = layouts.pop("all")
    known = Coverage(layouts.get)
    assert not holds(known, "all")
    assert computed == []
    assert not holds(known, "all", "third")
    assert computed == [(1, 2)], "one that nobody needs holds nobody up"
    layouts["all"] = late
    assert holds(known, "all")
    assert holds(known, "all", "third", "elsewhere")
