"""The factored side: layouts out of it, it out of layouts, and its checks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.errors import InputError, LayoutError
from refitd.layout import Box, Layout, Piece, Side, side_from_layouts
from refitd.layout.presets import preset
from refitd.layout.side import Pattern, SideBuilder, StoragePattern
from refitd.layout.side_check import check
from refitd.layout.tp import dense

F, GAP = "int32", Box((2, 0), (3, 3))
RANKS = [(f"trainer/a/{i}", f"n{i}", "d") for i in range(2)]


def places(keys: list[str]) -> dict[str, tuple[str, str]]:
    return {key: (f"node {key}", f"domain {key}") for key in keys}


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Layout]:
    """Ranks with pieces of a few tensors: several pieces, empty storages, aliases, keep patterns, unheld tensors."""
    facts = {"w.0.a": ((4, 3), F), "w.1.a": ((4, 3), F), "w.2.a": ((4, 3), F), "s": ((), F), "v": ((6,), "int16")}
    found: dict[str, Layout] = {}
    for rank in range(draw(st.integers(1, 4))):
        known = draw(st.lists(st.sampled_from(sorted(facts)), unique=True))
        pieces, storages = [], {}
        for name in known:
            shape, dtype = facts[name]
            storage = draw(st.sampled_from([name, f"fused.{dtype}"]))
            for _ in range(draw(st.integers(0, 2))):
                lo = tuple(draw(st.integers(0, n - 1)) for n in shape)
                hi = tuple(draw(st.integers(low + 1, n)) for low, n in zip(lo, shape, strict=True))
                pieces.append(dense(name, Box(lo, hi), storage, draw(st.integers(0, 3))))
            storages[storage] = (draw(st.sampled_from([0, 30])), dtype)
        tied = {"alias": known[0]} if "w.0.a" in known[:1] and draw(st.booleans()) else {}
        keep = draw(st.sampled_from([(), ("s",), ("fused*",)]))
        same = draw(st.sampled_from([None, *found.values()]))
        mine = {name: facts[name] for name in known}
        found[f"trainer/a/{rank}"] = same or Layout.from_pieces(mine, storages, pieces, keep, tied)
    return found


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_a_side_gives_every_layout_back(given_layouts: dict[str, Layout]) -> None:
    """`side_from_layouts` and `Side.layout` are inverses for layouts of every kind, and again on the result."""
    side = side_from_layouts(given_layouts, places(list(given_layouts)))
    assert {key: side.layout(key) for key in side.ranks} == given_layouts
    assert side.nodes == tuple(f"node {key}" for key in given_layouts)
    again = side_from_layouts({key: side.layout(key) for key in side.ranks}, places(list(given_layouts)))
    assert {key: again.layout(key) for key in again.ranks} == given_layouts
    assert all(len(side.patterns[row[1]].slot) for row in side.instances.tolist())


@pytest.mark.parametrize("which", [0, 1])
def test_a_preset_s_side_survives_its_own_layouts(which: int) -> None:
    """Layouts of a preset factor to as few patterns as the front end made, and give equal layouts."""
    side = preset("tiny")[which]
    own = {key: side.layout(key) for key in side.ranks}
    where = dict(zip(side.ranks, zip(side.nodes, side.domains, strict=True), strict=True))
    again = side_from_layouts(own, where)
    assert {key: again.layout(key) for key in side.ranks} == own
    assert (again.nodes, again.domains) == (side.nodes, side.domains)
    assert len(again.patterns) <= len(side.patterns)
    for layout in own.values():
        assert Layout.from_pieces(layout.tensors, layout.storages, layout.pieces(), layout.keep, layout.tied) == layout


def test_unknown_ranks_and_missing_places_are_refused() -> None:
    """A key that the side does not have, and a rank without node and domain."""
    side = preset("tiny")[0]
    with pytest.raises(InputError, match="rank: expected one of the side's 4 ranks, got trainer/run/9"):
        side.layout("trainer/run/9")
    with pytest.raises(InputError, match="places: expected a node and domain for every rank, got none for x"):
        side_from_layouts({"x": Layout.from_pieces({}, {}, [])}, {})


def rows_of(shape: tuple[int, ...], *cuts: tuple[int, int], dtype: str = F, slots: int | None = None) -> Pattern:
    """Slot i has rows cuts[i], dense."""
    boxes = np.array([[[lo, *(0,) * (len(shape) - 1)], [hi, *shape[1:]]] for lo, hi in cuts])
    n = len(cuts)
    strides = np.tile([shape[1], 1], (n, 1))
    return Pattern(shape, dtype, slots or n, boxes, np.arange(n), np.arange(n), np.zeros(n, dtype=np.int64), strides)


def side_of(*instances: tuple[str, Pattern, list[int]], numel: int = 12) -> Side:
    builder = SideBuilder(RANKS)
    for name, pattern, ranks in instances:
        group = builder.group(ranks)
        storage = builder.storage([name], group, StoragePattern(F, np.full(len(ranks), numel)))
        builder.add([name], pattern, group, storage)
    return builder.build()


def test_a_good_side_passes_with_instances_that_complete_each_other() -> None:
    """Two instances of one tensor on different ranks cover it together."""
    check(side_of(("w", rows_of((4, 3), (0, 2)), [0]), ("w", rows_of((4, 3), (2, 4)), [1])))


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (
            side_of(("w", rows_of((4, 3), (0, 2), (3, 4)), [0, 1])),
            f"tensor w: expected a holder for every element of shape (4, 3) as trainer/a/0 reports, got none for {GAP}",
        ),
        (
            side_of(("w", rows_of((4, 3), (0, 4)), [0]), ("w", rows_of((5, 3), (0, 5)), [1]), numel=20),
            "tensor w: expected shape (4, 3) dtype int32 as trainer/a/0 reports, got shape (5, 3) dtype int32",
        ),
        (
            side_of(("w", rows_of((4, 3), (0, 4), (0, 4)), [1, 0]), numel=11),
            "piece of w in w of trainer/a/1: view: expected inside 11 elements, got its last element at 11",
        ),
        (
            side_of(("w", rows_of((4, 3), (0, 4), dtype="int16"), [1])),
            "piece of w in w of trainer/a/1: dtype: expected int16, the tensor's, got int32, the storage's",
        ),
        (
            side_of(("w", rows_of((4, 3), (0, 5)), [1]), numel=20),
            "piece of w in w of trainer/a/1: box: expected inside shape (4, 3), got (0, 0) to (5, 3)",
        ),
    ],
)
def test_contradictions_name_tensor_rank_and_both_facts(side: Side, message: str) -> None:
    """Holes, two shapes, views outside the storage, foreign dtypes, boxes outside the tensor."""
    with pytest.raises(LayoutError) as caught:
        check(side)
    assert message in str(caught.value)


def test_one_rank_with_two_facts_is_refused() -> None:
    """A rank whose instances give a tensor two shapes, or a storage two sizes, has no layout."""
    side = side_of(("w", rows_of((4, 3), (0, 4)), [0]), ("w", rows_of((5, 3), (0, 5)), [0, 1]))
    with pytest.raises(
        LayoutError, match=r"tensor w of trainer/a/0: expected one fact: shape \(4, 3\) dtype int32, got"
    ):
        side.layout("trainer/a/0")
    builder = SideBuilder(RANKS)
    for ranks, numel in (([0], 3), ([0, 1], 4)):
        builder.storage(["s"], builder.group(ranks), StoragePattern(F, np.full(len(ranks), numel)))
    with pytest.raises(LayoutError, match="storage s of trainer/a/0: expected one storage: 3 of int32, got 4 of int32"):
        builder.build().layout("trainer/a/0")


def test_layout_errors_of_a_rank_name_it_when_asked() -> None:
    """`Layout.check` with the rank's key names tensor, rank and both facts."""
    bad = Layout.from_pieces({"w": ((2,), F)}, {"s": (1, F)}, [Piece("w", whole((2,)), "s", 0, (1,))])
    with pytest.raises(LayoutError) as caught:
        bad.check("engine/r0/3")
    assert str(caught.value) == (
        "piece of w in s: view of engine/r0/3: expected inside 1 elements, got offset 0, extents (2,), strides (1,)"
    )
