"""Layouts from clients that mean ill, or err: none is slow or large to check, none passes that has another form."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refitd.errors import InputError, LayoutError
from refitd.layout import Box, Layout, Piece, box, check, codec
from refitd.layout.names import Names
from refitd.layout_file import load_layout

I8 = "int8"
View = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset


def layout(views: list[View], storages: int = 1) -> Layout:
    """Tensor ``t<i>`` is view ``i``, in one of the storages."""
    tensors = {f"t{i:05}": (shape, I8) for i, (shape, _, _) in enumerate(views)}
    pieces = [
        Piece(f"t{i:05}", Box((0,) * len(shape), shape), f"s{i % storages}", offset, strides)
        for i, (shape, strides, offset) in enumerate(views)
    ]
    return Layout.from_pieces(tensors, {f"s{i}": (1 << 47, I8) for i in range(storages)}, pieces)


def columns(count: int, rows: int) -> list[View]:
    """Tensors of one column each, side by side."""
    return [((rows, 1), (count, 1), i) for i in range(count)]


# Overlaps.


def test_two_views_are_compared_in_a_bounded_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides that hardly differ interleave in 17 ways at each of eight levels; the limit is for all levels together,
    and views beyond it count as overlapping."""
    calls, meet = [0], box._meet

    def counted(*args: Any) -> bool:
        calls[0] += 1
        return meet(*args)

    monkeypatch.setattr(box, "_meet", counted)
    strides = [tuple((1 << 20) + 2 * (i + odd) for i in range(8)) for odd in (0, 1)]
    hostile = layout([((17,) * 8, strides[0], 0), ((17,) * 8, strides[1], 1)])
    with pytest.raises(LayoutError, match="no common element unless tied"):
        Layout.from_bytes(hostile.to_bytes()).check()
    assert 0 < calls[0] <= box.VIEW_CALLS


@pytest.mark.parametrize(
    "views",
    [
        columns(4000, 4000),
        [((10, 10), (900, 1), 9000 * i + 10 * j) for i in range(60) for j in range(90)],  # rows and columns
        [((40, 30), (3000, 100), i) for i in range(100)],  # experts along the last axis of three
        [((6, 2, 8), (1000, 64, 1), 8 * i + 128 * j) for i in range(8) for j in range(7)],  # rows that are padded
        [((n + 1,), (n,), n - 1) for n in [4000]] + [((4000, 1), (4000, 1), i) for i in range(3999)],
    ],
    ids=["columns", "grid", "last axis", "padded", "other strides"],
)  # fmt: skip
def test_views_of_real_tensors_that_interleave_are_not_compared_in_pairs(
    views: list[View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many, they are told apart by sorting: no budget is needed, and an overlap is still found."""
    made = layout(views)
    monkeypatch.setattr(check, "STEPS", 0)
    monkeypatch.setattr(check, "CALLS", 0)
    made.check()
    monkeypatch.undo()
    with pytest.raises(LayoutError, match="no common element unless tied"):
        layout([*views, ((), (), views[7][2])]).check()


def test_one_odd_view_among_columns_costs_one_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides that do not divide those of the others: compared one by one, but not the others with each other."""
    most = columns(4000, 3000)[:3990]
    made = layout([*most, ((5,), (4001,), 3990)])  # in the padding
    monkeypatch.setattr(check, "CALLS", 8 * 3990)
    made.check()
    monkeypatch.setattr(check, "CALLS", 100)
    with pytest.raises(
        LayoutError, match="interleave too much to be told apart"
    ):  # the looks that it had found nothing
        made.check()
    monkeypatch.undo()
    with pytest.raises(LayoutError, match=r"storage s0: pieces of t0\d+ and t03990"):
        layout([*most, ((2, 7), (4001, 3), 4000)]).check()


@pytest.mark.parametrize("what", ["STEPS", "CALLS"])
def test_what_cannot_be_told_apart_in_time_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the storage, a piece and how many there are; each budget has its own kind of layout."""
    cells = [(0, 0, 1, 39), (0, 39, 39, 1), (39, 1, 1, 39), (1, 0, 39, 1), *((i, i, 1, 1) for i in range(1, 39))]
    pinwheel: list[View] = [((2, h, w), (1600, 40, 1), 40 * y + x) for y, x, h, w in cells]  # no plane parts it
    uneven: list[View] = [((50,), (2 * (700 + 13 * i),), 2 * i + i % 2 * 1001) for i in range(1, 40)]
    made = layout(pinwheel if what == "STEPS" else uneven)
    if what == "STEPS":
        made.check()
    monkeypatch.setattr(check, what, 5)
    with pytest.raises(LayoutError, match=r"storage s0: the piece of t0\d+ at \d+ and others.*interleave too much"):
        made.check()


@st.composite
def crowds(draw: st.DrawFn) -> list[View]:
    """Views along a few common strides, some of which do not divide each other; many are apart."""
    chain = [draw(st.integers(1, 3))]
    for _ in range(draw(st.integers(1, 3))):
        chain.append(chain[-1] * draw(st.integers(2, 5)) + draw(st.sampled_from([0, 0, 0, 1, 2])))
    views: list[View] = []
    taken: set[int] = set()
    for _ in range(draw(st.integers(2, 25))):
        strides = draw(st.lists(st.sampled_from([*chain, draw(st.integers(0, 7))]), max_size=3))
        view = tuple(draw(st.integers(1, 5)) for _ in strides), tuple(strides), draw(st.integers(0, 3 * chain[-1]))
        own = addresses(view)
        if draw(st.integers(0, 9)) == 0 or not own & taken:
            views.append(view)
            taken |= own
    return views


def addresses(view: View) -> set[int]:
    shape, strides, offset = view
    result = {offset}
    for stride, extent in zip(strides, shape, strict=True):
        result = {at + stride * i for at in result for i in range(extent)}
    return result


@settings(max_examples=300, deadline=None)
@given(crowds(), st.sampled_from([1, 2, 5]), st.sampled_from([1, 2]))
@example([((2, 3), (4, 1), 3), ((2,), (4,), 2), ((3,), (1,), 10)], 1, 1)  # the first wraps around its stride
def test_overlaps_equal_enumeration(views: list[View], few: int, storages: int) -> None:
    """The pairs that are named are those that share an address, by whichever way they are compared."""
    wanted = {
        (f"t{i:05}", f"t{j:05}")
        for j in range(len(views)) for i in range(j)
        if i % storages == j % storages and addresses(views[i]) & addresses(views[j])
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_FEW", few)
        patch.setattr(check, "_LIMIT", 1000)
        found = check.violations(layout(views, storages))
    names = [violation.field.split(": pieces of ")[1].split(" and ") for violation in found]
    assert {tuple(sorted(pair)) for pair in names} == wanted
    assert len(names) == len(wanted)


# Sizes.


def test_long_texts_are_not_multiplied() -> None:
    """One long dtype, one long name: neither is given to each storage, tensor or violation."""
    long = "d" * 100_000
    storages = {f"{i:04}": (1, I8) for i in range(2000)}
    facts = {"t": ((1,), long)} | {f"a{i:04}": ((1,), I8) for i in range(2000)}
    typed = Layout.from_pieces(
        facts, storages, [Piece("t", Box((0,), (1,)), "0000", 0, (1,))], (), {f"a{i:04}": "t" for i in range(2000)}
    )
    pieces = [Piece(long, Box((0,), (1,)), "s", i, (1,)) for i in range(10, 2010)]
    named = Layout.from_pieces({long: ((1,), I8)}, {"s": (1, I8)}, pieces)
    for made in (typed, named):
        data = made.to_bytes()
        tracemalloc.start()
        with pytest.raises(LayoutError) as caught:
            Layout.from_bytes(data).check()
        assert len(str(caught.value)) > 2000
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
        tracemalloc.stop()


# One form.

FACTS = {"a": ((2,), I8), "v": ((2, 2), I8), "w": ((2,), I8)}


def parts() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    pieces = [
        Piece("v", Box((0, 0), (2, 2)), "s", 0, (2, 1)),
        Piece("w", Box((0,), (1,)), "s", 4, (1,)),
        Piece("w", Box((1,), (2,)), "s", 5, (1,)),
    ]
    made = Layout.from_pieces(FACTS, {"s": (8, I8), "z": (1, I8)}, pieces, ["a", "b"], {"a": "w", "b": "w"})
    header, arrays = codec.decode("layout", made.to_bytes())
    return {k: v for k, v in header.items() if k not in ("kind", "columns")}, {k: a.copy() for k, a in arrays.items()}


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def swapped(key: str) -> Change:
    return lambda header, _: header[key].reverse()


def doubled(key: str) -> Change:
    return lambda header, _: header[key].insert(1, header[key][0])


def rows(key: str, order: list[int]) -> Change:
    return lambda _, arrays: arrays.update({key: arrays[key][order]})


def put(key: str, at: tuple[int, ...], value: int) -> Change:
    return lambda _, arrays: arrays[key].__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (swapped("tensors"), "layout tensors: expected names in strictly ascending order"),
        (doubled("tensors"), "layout tensors: expected names in strictly ascending order"),
        (swapped("storages"), "layout storages: expected names in strictly ascending order"),
        (doubled("storages"), "layout storages: expected names in strictly ascending order"),
        (swapped("keep"), "layout keep: expected names in strictly ascending order"),
        (doubled("keep"), "layout keep: expected names in strictly ascending order"),
        (swapped("tied"), "layout tied: expected names in strictly ascending order"),
        (doubled("tied"), "layout tied: expected names in strictly ascending order"),
        (rows("instances", [1, 0, 2]), "layout instances: expected pieces in strictly ascending order"),
        (rows("instances", [0, 2, 1]), "layout instances: expected pieces in strictly ascending order"),
        (rows("instances", [0, 1, 1, 2]), "layout instances: expected pieces in strictly ascending order"),
        (rows("instances", [0, 1]), "layout patterns: expected all used"),
        (put("instances", (1, 0), 0), "layout instances: expected pieces under the canonical name"),
        (put("patterns", (0, 2), 0), "layout patterns: expected boxes that hold something"),
        (put("patterns", (1, 1), 1), "layout patterns: expected lo 0, hi 1, stride 0 beyond"),
        (lambda header, _: header["facts"].append([[3], I8]), "layout facts: expected all used"),
        (lambda header, _: header.update(extra=1), "layout header: expected the spelling that to_bytes writes"),
        (lambda header, _: header.update(keep=header.pop("keep")), "layout header: expected the spelling"),
    ],
)  # fmt: skip
def test_only_the_form_that_is_written_is_read(change: Change, field: str) -> None:
    """Any other order, numbering or spelling of the same layout has other bytes, and is refused."""
    header, arrays = parts()
    Layout.from_bytes(codec.encode("layout", header, arrays)).check()
    change(header, arrays)
    with pytest.raises(LayoutError, match=field):
        Layout.from_bytes(codec.encode("layout", header, arrays))


def test_patterns_are_numbered_as_they_come_and_each_once() -> None:
    """Another numbering of the same patterns and facts, or one pattern twice, is refused."""
    header, arrays = parts()
    order = np.array([0, 2, 1])
    arrays["patterns"], arrays["instances"][:, 3] = arrays["patterns"][order], order
    with pytest.raises(LayoutError, match="numbered in the order of their first use"):
        Layout.from_bytes(codec.encode("layout", header, arrays))
    header, arrays = parts()
    arrays["patterns"][2] = arrays["patterns"][1]
    with pytest.raises(LayoutError, match="patterns and facts: expected each once"):
        Layout.from_bytes(codec.encode("layout", header, arrays))


def test_instances_out_of_order_do_not_hide_an_element_held_twice() -> None:
    """Pieces of w, v, w: a later check groups the pieces of a tensor, and saw each w alone."""
    pieces = [Piece("v", Box((0,), (2,)), "s", 0, (1,)), *(Piece("w", Box((0,), (2,)), "s", at, (1,)) for at in (2, 4))]
    made = Layout.from_pieces({"v": ((2,), I8), "w": ((2,), I8)}, {"s": (8, I8)}, pieces)
    header, arrays = codec.decode("layout", made.to_bytes())
    header = {key: value for key, value in header.items() if key not in ("kind", "columns")}
    hidden = {**arrays, "instances": arrays["instances"][[1, 0, 2]]}
    with pytest.raises(LayoutError, match="layout instances: expected pieces in strictly ascending order"):
        Layout.from_bytes(codec.encode("layout", header, hidden))


# Names.


@pytest.mark.parametrize("bad", ["d\ud800", "d\0", "\udfffé"])
@pytest.mark.parametrize("place", ["tensor name", "storage name", "tied alias", "keep pattern", "tensor dtype"])
def test_names_that_cannot_be_written_are_refused_where_a_layout_is_made(bad: str, place: str) -> None:
    """Lone surrogates and NUL, from records, JSON and bytes: the place is named, the error can be written."""
    name, stored, alias, keep, dtype = (
        bad if place == p else good
        for p, good in (("tensor name", "w"), ("storage name", "s"), ("tied alias", "a"), ("keep pattern", "k"),
                        ("tensor dtype", I8))
    )  # fmt: skip
    tensors, storages, tied = {name: ((2,), dtype)}, {stored: (2, I8)}, {alias: name}
    document = {
        "refitd_layout": 1, "tensors": {name: {"shape": [2], "dtype": dtype}},
        "storages": {stored: {"elements": 2, "dtype": I8}}, "pieces": [], "keep": [keep], "tied": tied,
    }  # fmt: skip
    header = {
        "tensors": [[name, [2], dtype]], "storages": [[stored, 2, I8]], "keep": [keep], "tied": [[alias, name]],
        "facts": [],
    }  # fmt: skip
    none = np.zeros((0, 4), np.int64)
    data = codec.encode("layout", header, {"fact": none[:, 0], "patterns": none[:, :3], "instances": none})
    ways: list[Callable[[], object]] = [
        lambda: Layout.from_pieces(tensors, storages, [], [keep], tied),
        lambda: Layout.from_json(json.loads(json.dumps(document))),
        lambda: Layout.from_bytes(data),
    ]
    for way in ways:
        with pytest.raises(LayoutError, match=f"{place}: expected text without NUL and lone surrogates") as caught:
            way()
        str(caught.value).encode()


def test_long_runs_of_digits_are_text() -> None:
    """A component of 5,000 digits is no number that is cut out of a name, nor one that int() refuses."""
    names = ["w." + "7" * 5000, "7" * 5000 + ".3.x", "w.16777214", "w.16777215"]
    made = Names.from_strings(names)
    assert list(made) == names
    assert [made.find(name) for name in names] == [0, 1, 2, 3]
    assert made.templates == ((names[0],), ("7" * 5000 + ".", ".x"), ("w.", ""), ("w.16777215",))


def test_names_of_many_components_are_read_once_through() -> None:
    """A name of 300,000 components, with its numbers at the end."""
    name = "a" + "." * 300_000 + ".5.b.6.7"
    assert Names.from_strings([name]).templates == (("a" + "." * 300_001, ".b.", ".7"),)


def test_more_templates_than_a_code_has_room_for_are_refused() -> None:
    """Exactly the limit works; one more is refused wherever names are made or joined, and by the check of a layout."""
    most = Names.MAX_TEMPLATES
    full = Names.from_strings(f"w_{i}" for i in range(most))
    assert full[most - 1] == f"w_{most - 1}"
    assert full.find(f"w_{most - 1}") == most - 1
    assert int(full.codes.min()) >= 0
    more = [f"w_{i}" for i in range(most + 1)]
    ways: list[Callable[[], object]] = [
        lambda: Names.from_strings(more),
        lambda: Names.from_blocks((text, ()) for text in more),
        lambda: full.joined(Names.from_strings(["x"])),
        lambda: Names.from_records([[text] for text in more], np.zeros(1, np.int64)),
        Layout.from_pieces(dict.fromkeys(more, ((1,), I8)), {}, []).check,
    ]
    for way in ways:
        with pytest.raises(InputError, match=f"expected at most {most} (names )?that differ in more than dotted"):
            way()
    Layout.from_pieces({f"w.{i}": ((1,), I8) for i in range(most + 1)}, {}, []).check()


# JSON.


def test_a_key_twice_in_a_layout_file_is_refused(tmp_path: Path) -> None:
    """Two shapes for one tensor: JSON readers would take either. So in the header of the bytes."""
    path = tmp_path / "rank0.json"
    one, other = (json.dumps({"shape": [size], "dtype": "int8"}) for size in (1, 2))
    path.write_text(f'{{"refitd_layout": 1, "tensors": {{"w": {one}, "w": {other}}}, "storages": {{}}, "pieces": []}}')
    with pytest.raises(InputError, match="each key once, got the key 'w' twice in one object"):
        load_layout(path)
    raw = layout([((1,), (1,), 0)]).to_bytes()
    twice = raw.replace(b'"keep":[]', b'"keep":[],"keep":[]')
    length = (int.from_bytes(raw[4:8], "little") + 10).to_bytes(4, "little")
    with pytest.raises(LayoutError, match="the key 'keep' twice in one object"):
        Layout.from_bytes(twice[:4] + length + twice[8:])


@pytest.mark.parametrize("version", [True, 1.0, "1", None, 2])
def test_the_version_is_an_int(version: object) -> None:
    """True and 1.0 equal 1 in Python, and are no version."""
    document = {"refitd_layout": version, "tensors": {}, "storages": {}, "pieces": []}
    with pytest.raises(LayoutError, match=f"layout refitd_layout: expected 1, got {version!r}"):
        Layout.from_json(document)
