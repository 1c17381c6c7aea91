"""Whether ranks hold what others need, as a plan of them would find it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from side_helpers import World, worlds

from refitd.errors import MismatchError, PlanError
from refitd.layout import Layout
from refitd.plan import Rank, covered, large, make_plan
from refitd.testing import split_layout

PIECES = {"region by region": large.PIECES, "by sides": 0}


def ranks(side: str, *layouts: Layout) -> list[Rank]:
    return [Rank(f"{side}/{i}", f"n{i}", f"n{i}", layout) for i, layout in enumerate(layouts)]


def planned(sources: list[Rank], members: list[Rank]) -> bool:
    try:
        make_plan(sources, members)
    except PlanError:
        return False
    except MismatchError as error:
        if {violation.expected for violation in error.violations} != {"a source that has it"}:
            raise
        return False
    return True


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@settings(max_examples=60, deadline=None)
@given(world=worlds(), data=st.data())
def test_it_is_what_a_plan_would_find(pieces: int, world: World, data: st.DataObject) -> None:
    """With any of the sources left out."""
    _shapes, _dtype, sources, members = world
    left = data.draw(st.lists(st.sampled_from(sources), min_size=1, unique_by=lambda rank: rank.key))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("refitd.plan.large.PIECES", pieces)
        assert covered(left, members) is planned(left, members)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_pipeline_stages_are_all_needed(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knows its own tensors only: without one of them the others hold less, and contradict nobody."""
    monkeypatch.setattr("refitd.plan.large.PIECES", pieces)
    first, second = ({name: ((8, 4), "float32")} for name in ("a", "b"))
    stages = ranks("s", split_layout(first, 0, 2), split_layout(first, 1, 2), split_layout(second, 0, 1))
    whole = ranks("d", split_layout(first | second, 0, 1))
    assert covered(stages, whole)
    assert not any(covered([rank for rank in stages if rank is not lost], whole) for lost in stages)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_sides_that_differ_are_told_apart_from_those_that_hold_too_little(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other holder would mend them."""
    monkeypatch.setattr("refitd.plan.large.PIECES", pieces)
    source, member = split_layout({"w": ((4, 6), "float32")}, 0, 1), split_layout({"w": ((6, 4), "float32")}, 0, 1)
    with pytest.raises(MismatchError, match=r"tensor w: expected shape \(4, 6\)"):
        covered(ranks("s", source), ranks("d", member))


def test_a_tensor_may_have_another_name_on_each_side() -> None:
    """An embedding that is tied to the head is held under either name."""
    head, both = split_layout({"head": ((8, 4), "float32")}, 0, 1), {"embedding": ((8, 4), "float32")}
    plain = split_layout(both, 0, 1)
    tied = Layout.from_pieces(plain.tensors, plain.storages, plain.pieces(), (), {"head": "embedding"})
    assert covered(ranks("s", tied), ranks("d", head))
    assert covered(ranks("s", head), ranks("d", tied))
    assert not covered(ranks("s", plain), ranks("d", head))
