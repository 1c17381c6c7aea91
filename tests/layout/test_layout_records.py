"""Layouts as records, bytes and files; what one layout may not say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.errors import InputError, LayoutError
from refitd.layout import Box, Layout, Piece
from refitd.layout.box import difference, views_overlap
from refitd.layout.tp import column_parallel, dense, fused, row_parallel
from refitd.layout_file import load_layout, save_layout

F = "float32"
FACTS = {"w": ((4, 3), F), "b": ((4,), F)}


def layout(keep: tuple[str, ...] = ("rope*",)) -> Layout:
    pieces = [dense("w", Box((0, 0), (4, 3)), "f"), dense("b", Box((0,), (4,)), "f", 12)]
    return Layout.from_pieces(FACTS, {"f": (18, F), "rope": (5, F)}, pieces, keep, {"head": "w"})


def test_columns_hold_what_was_put_in() -> None:
    """Pieces come back sorted, with patterns and instances as documented."""
    made = layout()
    made.check()
    assert made.pieces() == (
        Piece("b", Box((0,), (4,)), "f", 12, (1,)),
        Piece("w", Box((0, 0), (4, 3)), "f", 0, (3, 1)),
    )
    assert made.instances.tolist() == [[0, 0, 12, 0], [1, 0, 0, 1]]
    assert made.patterns.tolist() == [[[0, 0], [4, 1], [1, 0]], [[0, 0], [4, 3], [3, 1]]]
    assert (made.facts, dict(made.tied), made.kept) == ((FACTS["b"], FACTS["w"]), {"head": "w"}, frozenset({"rope"}))


def test_the_digest_is_of_the_geometry_alone() -> None:
    """Order of records does not matter, any change of geometry does, and the digest is 32 hex digits."""
    pieces = list(layout().pieces())[::-1]
    same = Layout.from_pieces(
        dict(reversed(FACTS.items())), {"rope": (5, F), "f": (18, F)}, pieces, ["rope*"], {"head": "w"}
    )
    assert same == layout()
    assert same.digest == layout().digest
    assert len(bytes.fromhex(same.digest)) == 16
    others = [layout(()), Layout.from_pieces(FACTS, {"f": (19, F), "rope": (5, F)}, pieces, ["rope*"], {"head": "w"})]
    assert len({other.digest for other in others} | {same.digest}) == 3


def test_bytes_and_json_give_the_layout_back() -> None:
    """Both forms are lossless."""
    assert Layout.from_bytes(layout().to_bytes()) == layout()
    assert Layout.from_json(json.loads(json.dumps(layout().to_json()))) == layout()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_a_layout(data: st.DataObject) -> None:
    """Changed or cut bytes raise LayoutError, or give a layout whose check runs to its end."""
    raw = bytearray(layout().to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.sampled_from([len(raw)] * 3 + [len(raw) - 8, 5, 0]))]
    try:
        made = Layout.from_bytes(bytes(raw))
    except LayoutError:
        return
    try:
        made.check()
    except LayoutError:
        return
    assert Layout.from_bytes(made.to_bytes()) == made


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw: bytes) -> None:
    """No random bytes are a layout."""
    with pytest.raises(LayoutError):
        Layout.from_bytes(raw)


def test_sizes_in_bytes_are_never_trusted() -> None:
    """A header that claims a huge column is refused without allocating it."""
    raw = layout().to_bytes().replace(b'"instances":[2,4]', b'"instances":[9999999999,4]')
    length = (int.from_bytes(raw[4:8], "little") + 9).to_bytes(4, "little")
    with pytest.raises(LayoutError, match="layout column instances: expected 319999999968 bytes"):
        Layout.from_bytes(raw[:4] + length + raw[8:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": 3}, "pieces: expected a list, got int"),
        ({"extra": 1}, "layout: expected the keys"),
        ({"refitd_layout": 2}, "layout refitd_layout: expected 1, got 2"),
        ({"tensors": {"w": {"shape": [4, "3"], "dtype": F}}}, "tensors w shape: expected a list of ints"),
        ({"storages": {"f": {"elements": True, "dtype": F}}}, "storages f elements: expected an int, got True"),
        ({"keep": [1]}, "keep: expected a string"),
        ({"tied": ["w"]}, "tied: expected an object"),
        ({"tied": {"head": "nothing"}}, "tied head: expected the canonical name of a known tensor"),
        ({"pieces": [{"tensor": "w"}]}, "pieces\\[0\\]: expected the keys"),
    ],
)
def test_wrong_fields_of_a_document_are_named(change: dict, message: str) -> None:
    """Each wrong field of a layout file gives an error that names it."""
    with pytest.raises(LayoutError, match=message):
        Layout.from_json({**layout().to_json(), **change})


def test_layout_files(tmp_path: Path) -> None:
    """Files survive a round trip; missing, broken and wrong ones are typed errors."""
    path = tmp_path / "rank0.json"
    save_layout(layout(), path)
    assert load_layout(path) == layout()
    with pytest.raises(InputError, match="No such file"):
        load_layout(tmp_path / "none.json")
    path.write_text("{")
    with pytest.raises(InputError, match="JSON in UTF-8"):
        load_layout(path)
    path.write_text(json.dumps({**layout().to_json(), "storages": {"f": {"elements": 2, "dtype": F}}}))
    with pytest.raises(LayoutError, match="inside 2 elements"):
        load_layout(path)


def test_the_example_of_the_documentation_is_a_good_layout_file() -> None:
    """The JSON example in docs/layout.md loads, checks, and has the pieces that the text describes."""
    text = (Path(__file__).parents[2] / "docs" / "layout.md").read_text()
    example = json.loads(text.split("```json\n")[1].split("```")[0])
    made = Layout.from_json(example)
    made.check()
    assert [p.tensor for p in made.pieces()] == ["model.embed", "model.k", "model.q", "model.v"]


def test_all_violations_come_in_one_error() -> None:
    """Unknown dtypes, a box outside, a view outside and a foreign dtype are listed together."""
    facts = {"w": ((4, 3), F), "x": ((2,), "bf16"), "h": ((2,), "bfloat16")}
    pieces = [
        Piece("w", Box((0, 0), (5, 3)), "w", 0, (3, 1)),
        Piece("w", Box((0, 0), (4, 3)), "s", 1, (3, 1)),
        Piece("h", Box((0,), (2,)), "w", 20, (1,)),
    ]
    made = Layout.from_pieces(facts, {"w": (30, F), "s": (12, F)}, pieces)
    with pytest.raises(LayoutError) as caught:
        made.check()
    assert [v.field for v in caught.value.violations] == [
        "tensor x: dtype", "piece of h in w: dtype", "piece of w in s: view", "piece of w in w: box",
    ]  # fmt: skip
    assert "inside shape (4, 3), got (0, 0) to (5, 3)" in str(caught.value)


def test_records_that_cannot_be_represented_are_all_listed() -> None:
    """Unknown names, other ranks and negative numbers are reported together."""
    pieces = [
        Piece("none", Box((0,), (1,)), "f", 0, (1,)),
        Piece("b", Box((0,), (1,)), "none", 0, (1,)),
        Piece("b", Box((0, 0), (1, 1)), "f", 0, (1, 1)),
        Piece("b", Box((0,), (1,)), "f", -1, (1,)),
    ]
    with pytest.raises(LayoutError) as caught:
        Layout.from_pieces({**FACTS, "h": ((-1,), F)}, {"f": (18, F), "g": (-2, F)}, pieces)
    assert len(caught.value.violations) == 6


@pytest.mark.parametrize(
    ("pieces", "good"),
    [
        ([dense("b", Box((0,), (4,)), "f"), dense("w", Box((0, 0), (1, 3)), "f", 4)], True),
        ([dense("b", Box((0,), (4,)), "f"), dense("w", Box((0, 0), (1, 3)), "f", 3)], False),
        ([Piece("b", Box((0,), (4,)), "f", 3, (4,)), Piece("w", Box((0, 0), (4, 3)), "f", 0, (4, 1))], True),
        ([Piece("b", Box((0,), (4,)), "f", 2, (4,)), Piece("w", Box((0, 0), (4, 3)), "f", 0, (4, 1))], False),
        ([dense("b", Box((0,), (2,)), "f"), dense("b", Box((1,), (3,)), "f", 1)], False),
        ([dense("b", Box((0,), (2,)), "f"), dense("b", Box((0,), (2,)), "f")], True),
        ([dense("w", Box((0, 0), (4, 3)), "f"), dense("head", Box((0, 0), (4, 3)), "f")], True),
    ],
)  # fmt: skip
def test_overlaps_inside_a_storage(pieces: list[Piece], good: bool) -> None:
    """Pieces may interleave but not share an element, unless they say the same or are tied."""
    made = Layout.from_pieces(FACTS, {"f": (30, F)}, pieces, tied={"head": "w"})
    if good:
        made.check()
    else:
        with pytest.raises(LayoutError, match="no common element unless tied"):
            made.check()


@st.composite
def nested_views(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    dims, step = [], draw(st.integers(1, 3))
    for extent in draw(st.lists(st.integers(2, 4), max_size=3)):
        dims.append((step, extent))
        step = step * extent + draw(st.integers(0, 3))
    return draw(st.integers(0, 30)), dims[::-1]


@settings(max_examples=300, deadline=None)
@given(nested_views(), nested_views())
def test_view_overlap_equals_enumeration(a: tuple, b: tuple) -> None:
    """The overlap of two strided views is decided as by listing all their addresses."""

    def addresses(offset: int, dims: list[tuple[int, int]]) -> set[int]:
        result = {offset}
        for stride, extent in dims:
            result = {at + stride * i for at in result for i in range(extent)}
        return result

    assert views_overlap(*a, *b) == bool(addresses(*a) & addresses(*b))


def test_difference_of_boxes() -> None:
    """A box without the middle of it is disjoint and has the right volume."""
    rest = difference(Box((0, 0), (4, 4)), [Box((1, 1), (3, 3)), Box((0, 0), (1, 4))])
    assert sum(box.volume for box in rest) == 16 - 4 - 4
    assert all(a is b or a.intersect(b) is None for a in rest for b in rest)


def test_tensor_parallel_boxes() -> None:
    """Column cuts rows, row cuts columns, uneven shares round up, fused parts lie one after the other."""
    assert column_parallel((5, 2), 1, 2) == Box((3, 0), (5, 2))
    assert row_parallel((2, 5), 0, 2) == Box((0, 0), (2, 3))
    assert column_parallel((4,), 3, 3) == Box((4,), (4,))
    parts = fused("qkv", ("q", Box((0, 0), (2, 3))), ("k", Box((1, 0), (2, 3))))
    assert [(p.tensor, p.offset, p.strides) for p in parts] == [("q", 0, (3, 1)), ("k", 6, (3, 1))]


def test_layout_imports_without_torch() -> None:
    """The room needs numpy only: torch is loaded by the torch front end."""
    code = "import sys, refitd.layout, refitd.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
