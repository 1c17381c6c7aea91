"""Names as templates and numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refitd.layout.names import Names

component = st.one_of(
    st.sampled_from(["layers", "e", "", "{}", "07", "-1", "x1", "٣"]),
    st.integers(0, 3).map(str),
    st.sampled_from(["16777214", "16777215", "99999999999"]),
)
name = st.lists(component, min_size=1, max_size=6).map(".".join)


@given(st.lists(name, max_size=12, unique=True), st.lists(name, max_size=12, unique=True))
def test_names_are_what_went_in_and_are_found_by_value(own: list[str], others: list[str]) -> None:
    """Round trip, look-up of one and of many, for names with any mix of numbers, braces and empty components."""
    names, more = Names.from_strings(own), Names.from_strings(others)
    assert list(names) == own
    assert [names[i] for i in range(len(names))] == own
    assert names.take(np.arange(len(own))) == own
    expected = [own.index(n) if n in own else -1 for n in others]
    assert [names.find(n) for n in others] == expected
    assert names.where(more).tolist() == expected
    assert names.where(names).tolist() == list(range(len(own)))
    assert [n in names for n in others] == [n in own for n in others]


def test_blocks_equal_their_strings() -> None:
    """Blocks of templates are the same names as the strings they stand for, so both kinds join."""
    blocks = Names.from_blocks(
        [("a.{}.e.{}.w", (np.array([0, 0, 1]), np.array([5, 6, 5]))), ("head", ()), ("b.{}", (np.array([2]),))]
    )
    strings = ["a.0.e.5.w", "a.0.e.6.w", "a.1.e.5.w", "head", "b.2"]
    assert list(blocks) == strings
    assert Names.from_strings(strings[::-1]).where(blocks).tolist() == [4, 3, 2, 1, 0]
    assert list(blocks[1:4]) == strings[1:4]
