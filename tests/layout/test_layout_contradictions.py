"""Contradictions of any kind, at random places: each error names the tensor, the rank and both facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.errors import LayoutError, MismatchError
from refitd.layout import Box, Layout, Piece, check_match, check_side, side_from_layouts
from refitd.layout.side_check import check as check_factored
from refitd.plan import Rank, make_plan

NAMES = ["model.layers.3.mlp.experts.12.up.weight", "lm_head.weight", "norm"]
DTYPES = ["float32", "bfloat16", "float16", "float64", "int64"]
CASTS = [("bfloat16", "float16"), ("float16", "bfloat16"), ("float32", "float64"), ("int64", "float32"),
         ("float32", "int64"), ("bfloat16", "float8_e4m3fn")]  # fmt: skip


class World(NamedTuple):
    """A tensor of ``shape`` whose rows are cut at ``edges`` over the ranks ``keys``; number ``bad`` contradicts."""

    name: str
    shape: tuple[int, int]
    dtype: str
    edges: list[int]
    bad: int

    def keys(self, prefix: str = "trainer/run") -> list[str]:
        return [f"{prefix}/{i}" for i in range(len(self.edges) - 1)]

    def rank(self, i: int, **other: object) -> Layout:
        """Rank ``i``, with other facts than it should have."""
        lo, hi = other.get("rows", (self.edges[i], self.edges[i + 1]))
        shape = other.get("shape", self.shape)
        box = Box((lo, 0), (hi, shape[1]))
        dtype = other.get("dtype", self.dtype)
        storages = {"flat": (other.get("numel", box.volume + 3), other.get("stored", dtype))}
        pieces = [Piece(self.name, box, "flat", 0, (shape[1], 1)), *other.get("more", ())]
        facts = {self.name: (shape, dtype), **other.get("facts", {})}
        return Layout.from_pieces(facts, {**storages, **other.get("room", {})}, pieces, (), other.get("tied", {}))

    def side(self, prefix: str = "trainer/run", **other: object) -> dict[str, Layout]:
        """All ranks, of which number ``bad`` has ``other`` facts."""
        return {key: self.rank(i, **(other if i == self.bad else {})) for i, key in enumerate(self.keys(prefix))}

    def culprit(self, prefix: str = "trainer/run") -> str:
        return self.keys(prefix)[self.bad]

    def other(self) -> str:
        """The rank that the culprit is compared with: the first, or the second where the culprit is the first."""
        return self.keys()[0 if self.bad else 1]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count, width = draw(st.integers(2, 5)), draw(st.integers(1, 7))
    edges = [0]
    for _ in range(count):
        edges.append(edges[-1] + draw(st.integers(1, 4)))
    name, dtype = draw(st.sampled_from(NAMES)), draw(st.sampled_from(DTYPES))
    return World(name, (edges[-1], width), dtype, edges, draw(st.integers(0, count - 1)))


def told(error: type[Exception], facts: list[object], *ways: Callable[[], object]) -> None:
    """Each way raises ``error`` with all ``facts`` in one sentence."""
    for way in ways:
        with pytest.raises(error) as caught:
            way()
        assert any(all(str(fact) in str(v) for fact in facts) for v in caught.value.violations), str(caught.value)


def factored(side: dict[str, Layout]) -> None:
    check_factored(side_from_layouts(side, dict.fromkeys(side, ("n", "d"))))


def ranks(side: dict[str, Layout]) -> list[Rank]:
    return [Rank(key, key, key, layout) for key, layout in side.items()]


def both(error: type[Exception], side: dict[str, Layout], facts: list[object]) -> None:
    told(error, facts, lambda: check_side(side), lambda: factored(side))


def between(world: World, target: dict[str, Layout], facts: list[object], **source: object) -> None:
    have = world.side(**source)
    told(
        MismatchError, [world.name, *facts],
        lambda: check_match(have, target), lambda: make_plan(ranks(have), ranks(target)),
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(worlds(), st.data())
def test_ranks_that_disagree(world: World, data: st.DataObject) -> None:
    """On a shape, a dtype or what a name is tied to: both ranks and what each says."""
    (rows, width), name = world.shape, world.name
    wider = (rows, width + data.draw(st.integers(1, 3)))
    both(LayoutError, world.side(shape=wider), [name, world.culprit(), world.other(), world.shape, wider])
    dtype = data.draw(st.sampled_from([d for d in DTYPES if d != world.dtype]))
    both(LayoutError, world.side(dtype=dtype), [name, world.culprit(), world.other(), world.dtype, dtype])
    more = {"facts": {"u": (world.shape, world.dtype)}}
    tied = {
        key: world.rank(i, tied={"alias": "u" if i == world.bad else name}, **more)
        for i, key in enumerate(world.keys())
    }
    told(LayoutError, ["alias", name, "u", world.culprit(), world.other()], lambda: check_side(tied))


@settings(max_examples=20, deadline=None)
@given(worlds(), st.data())
def test_a_rank_against_itself(world: World, data: st.DataObject) -> None:
    """Boxes outside the tensor, views outside the storage, another dtype in memory, overlapping pieces, ties that do
    not fit: the rank, the tensor and both facts."""
    i, key, (rows, width) = world.bad, world.culprit(), world.shape
    lo, hi = world.edges[i], world.edges[i + 1]

    def alone(layout: Layout, facts: list[object]) -> None:
        told(LayoutError, [world.name, key, *facts], lambda: layout.check(key))

    beyond = rows + data.draw(st.integers(1, 5))
    alone(world.rank(i, rows=(lo, beyond)), [world.shape, f"({lo}, 0) to ({beyond}, {width})"])
    short = (hi - lo) * width - data.draw(st.integers(1, width))
    alone(world.rank(i, numel=short), [f"inside {short} elements", f"extents {(hi - lo, width)}"])
    stored = data.draw(st.sampled_from([d for d in DTYPES if d != world.dtype]))
    alone(world.rank(i, stored=stored), [world.dtype, stored])
    at = data.draw(st.integers(0, (hi - lo) * width - 1))
    facts, piece = {"facts": {"x": ((2,), world.dtype)}}, Piece("x", Box((0,), (2,)), "flat", at, (1,))
    alone(world.rank(i, more=[piece], **facts), ["x", f"({lo}, 0)-({hi}, {width}) at 0", f"(0,)-(2,) at {at}"])
    alone(world.rank(i, tied={"x": world.name}, **facts), ["x", (2,), world.shape])


@settings(max_examples=20, deadline=None)
@given(worlds(), st.data())
def test_an_element_that_nobody_holds(world: World, data: st.DataObject) -> None:
    """The tensor, the rank that says how large it is, its shape, and a part that is missing."""
    lo, hi = world.edges[world.bad], world.edges[world.bad + 1]
    gap = data.draw(st.integers(lo, hi - 1))
    side = world.side(rows=(lo, gap)) if gap > lo else world.side(rows=(lo + 1, hi))
    missing = (gap, hi) if gap > lo else (lo, lo + 1)
    first = world.keys()[0]
    both(
        LayoutError,
        side,
        [world.name, first, world.shape, f"none for {Box((missing[0], 0), (missing[1], world.shape[1]))}"],
    )


@settings(max_examples=20, deadline=None)
@given(worlds(), st.data())
def test_sides_that_do_not_fit(world: World, data: st.DataObject) -> None:
    """Another shape, a cast that is refused, a tensor that no source has, an element twice, a storage that nothing
    fills: the tensor, the destination rank, and what each side says."""
    prefix, (rows, width) = "engine/r0", world.shape
    key, first = world.culprit(prefix), world.keys()[0]
    lo, hi = world.edges[world.bad], world.edges[world.bad + 1]
    taller = World(world.name, (rows + 1, width), world.dtype, [*world.edges[:-1], rows + 1], 0)
    between(world, taller.side(prefix), [first, world.shape, f"{prefix}/0", taller.shape])
    have, want = data.draw(st.sampled_from(CASTS))
    source = world._replace(dtype=have)
    between(source, source.side(prefix, dtype=want), [first, have, key, want])
    room, box = {"room": {"x": (2, world.dtype)}}, Box((0,), (2,))
    facts, piece = {"facts": {"x": ((2,), world.dtype)}}, Piece("x", box, "x", 0, (1,))
    target = world.side(prefix, more=[piece], **facts, **room)
    told(MismatchError, ["tensor x", "none", f"{key} needs it"], lambda: check_match(world.side(), target))
    row = data.draw(st.integers(lo, hi - 1))
    again = Piece(world.name, Box((row, 0), (row + 1, width)), "again", 0, (width, 1))
    twice = world.side(prefix, more=[again], room={"again": (width, world.dtype)})
    between(world, twice, [key, again.box, "again", "flat"])
    told(MismatchError, ["storage x", key, "neither"], lambda: check_match(world.side(), world.side(prefix, **room)))


@settings(max_examples=20, deadline=None)
@given(worlds())
def test_a_tie_to_nothing_is_refused_where_the_layout_is_made(world: World) -> None:
    """On its own rank, before it has a key: the alias and the name that it does not know."""
    told(LayoutError, ["tied alias", "a known tensor", "nothing"], lambda: world.rank(0, tied={"alias": "nothing"}))
