"""Whatever contradicts itself in a layout, a side or a pair of sides: tensor, rank and both facts are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from refitd import InputError, Layout, LayoutError, MismatchError, PlanError, RefitdError, reshard
from refitd.layout import Box, Piece, check_match, check_side, side_from_layouts
from refitd.layout.fronts.megatron import Parallel, megatron
from refitd.layout.fronts.places import Hosts
from refitd.layout.models import Block, Row, build
from refitd.layout.models.quant import check_blocks
from refitd.layout.side_check import check as check_factored
from refitd.plan import Rank, make_plan, plan_sides, topology

F32, X = "float32", Piece("x", Box((0,), (2,)), "x", 0, (1,))


def lay(
    rows: tuple[int, int] = (0, 4), shape: tuple[int, int] = (4, 4), dtype: str = F32, stored: str = "",
    numel: int = -1, strides: tuple[int, ...] = (), more: Sequence[Piece] = (),
    facts: Mapping[str, tuple[tuple[int, ...], str]] | None = None, room: Mapping[str, int] | None = None,
    tied: Mapping[str, str] | None = None, keep: Sequence[str] = (),
) -> Layout:  # fmt: skip
    """Rows of ``w`` in storage ``w``, and whatever else is said."""
    box = Box((rows[0], 0), (rows[1], shape[1]))
    storages = {"w": (box.volume if numel < 0 else numel, stored or dtype)} | {
        n: (c, F32) for n, c in (room or {}).items()
    }
    pieces = [Piece("w", box, "w", 0, strides or (shape[1], 1)), *more]
    return Layout.from_pieces({"w": (shape, dtype), **(facts or {})}, storages, pieces, keep, dict(tied or {}))


TOP, LOW, WHOLE = lay((0, 2)), lay((2, 4)), lay()
VECTOR = {"facts": {"x": ((2,), F32)}}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        pytest.param(
            lay((0, 6)),
            "piece of w in w: box of engine/r0/3: expected inside shape (4, 4), got (0, 0) to (6, 4)",
            id="bounds of the tensor",
        ),
        pytest.param(
            lay(numel=9),
            "piece of w in w: view of engine/r0/3: expected inside 9 elements, got offset 0, extents "
            "(4, 4), strides (4, 1)",
            id="bounds of the storage",
        ),
        pytest.param(
            lay(stored="bfloat16"),
            "piece of w in w: dtype of engine/r0/3: expected float32, the tensor's, got bfloat16, the storage's",
            id="dtype",
        ),
        pytest.param(
            lay(dtype="float3"),
            "tensor w: dtype of engine/r0/3: expected a dtype that refitd knows, got float3",
            id="unknown dtype",
        ),
        pytest.param(
            lay(**VECTOR, more=[X._replace(storage="w", offset=3)]),
            "storage w: pieces of w and x of engine/r0/3: "
            "expected no common element unless tied, got (0, 0)-(4, 4) at 0 and (0,)-(2,) at 3",
            id="overlap",
        ),
        pytest.param(
            lay(facts={"head": ((2, 4), F32)}, tied={"head": "w"}),
            "tied head of engine/r0/3: expected the shape and dtype of w: ((4, 4), 'float32'), got ((2, 4), 'float32')",
            id="tied names",
        ),
    ],
)
def test_inside_one_layout(layout: Layout, message: str) -> None:
    """A layout against itself, told with the rank's key; and `reshard` refuses it before a byte moves."""
    with pytest.raises(LayoutError) as caught:
        layout.check("engine/r0/3")
    assert message in str(caught.value)
    source = {"w": torch.ones(16)}
    with pytest.raises(LayoutError) as refused:
        reshard([WHOLE], [layout], [source])
    assert message.replace("engine/r0/3", "engine/reshard/0") in str(refused.value)
    with pytest.raises(LayoutError) as refused:
        reshard([layout], [WHOLE], [source])
    assert message.replace("engine/r0/3", "trainer/reshard/0") in str(refused.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: lay(more=[X]), "piece of x in x: tensor: expected a known tensor, got x", id="unknown tensor"
        ),
        pytest.param(
            lambda: lay(**VECTOR, more=[X]),
            "piece of x in x: storage: expected a known storage, got x",
            id="unknown storage",
        ),
        pytest.param(
            lambda: lay(strides=(1,)),
            "piece of w in w: box and strides: expected 2 dimensions, got Box(lo=(0, 0), hi=(4, 4)) (1,)",
            id="dimensions",
        ),
        pytest.param(
            lambda: lay(tied={"head": "embed"}),
            "tied head: expected the canonical name of a known tensor, got embed",
            id="tied to nothing",
        ),
        pytest.param(
            lambda: lay(tied={"w": "w"}),
            "tied w: expected the canonical name of a known tensor, got w",
            id="tied to itself",
        ),
        pytest.param(
            lambda: lay(numel=1 << 60),
            "storage w: elements: expected an int from 0 to 2**48, got 1152921504606846976",
            id="size",
        ),
    ],
)
def test_records_that_make_no_layout(make: Callable[[], Layout], message: str) -> None:
    """Records that contradict each other are refused on their own rank when the layout is made: tensor, both facts."""
    with pytest.raises(LayoutError) as caught:
        make()
    assert message in str(caught.value)


def ranks(prefix: str, layouts: Sequence[Layout]) -> list[Rank]:
    return [Rank(f"{prefix}/{i}", f"{prefix}{i}", f"{prefix}{i}", layout) for i, layout in enumerate(layouts)]


def layouts_of(of: Sequence[Rank]) -> dict[str, Layout]:
    return {rank.key: rank.layout for rank in of}


def factored(of: Sequence[Rank]):
    return side_from_layouts(layouts_of(of), {rank.key: (rank.node, rank.domain) for rank in of})


OTHER = lay(facts={"v": ((4, 4), F32)}, room={"v": 16}, more=[Piece("v", Box((0, 0), (4, 4)), "v", 0, (4, 1))])
TIED = [Layout.from_pieces(OTHER.tensors, OTHER.storages, OTHER.pieces(), (), {"head": name}) for name in ("w", "v")]


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        pytest.param(
            [TOP, lay((2, 4), (4, 5))],
            "tensor w: expected shape (4, 4) dtype float32 as trainer/a/0 reports, got "
            "shape (4, 5) dtype float32 from trainer/a/1",
            id="shape",
        ),
        pytest.param(
            [TOP, lay((2, 4), dtype="bfloat16")],
            "tensor w: expected shape (4, 4) dtype float32 as trainer/a/0 "
            "reports, got shape (4, 4) dtype bfloat16 from trainer/a/1",
            id="dtype",
        ),
        pytest.param(TIED, "tied head: expected w as trainer/a/0 says, got v from trainer/a/1", id="tied names"),
        pytest.param(
            [TOP, lay((3, 4))],
            "tensor w: expected a holder for every element of shape (4, 4) as trainer/a/0 reports, "
            "got none for Box(lo=(2, 0), hi=(3, 4))",
            id="missing holder",
        ),
    ],
)
def test_between_ranks_of_a_side(layouts: list[Layout], message: str) -> None:
    """Ranks of one side against each other, layout by layout and factored: both ranks, or the box that nobody holds."""
    made = ranks("trainer/a", layouts)
    with pytest.raises(LayoutError) as caught:
        check_side(layouts_of(made))
    assert message in str(caught.value)
    with pytest.raises(LayoutError) as other:
        check_factored(factored(made))
    assert message in str(other.value)


_DTYPE = "piece of w in w of trainer/a/0: dtype"


def test_factored_bounds_and_dtypes() -> None:
    """Boxes beyond the tensor, views beyond the storage and a storage of another dtype, found by pattern."""
    for layout, message in (
        (lay((0, 6)), "piece of w in w of trainer/a/0: box: expected inside shape (4, 4), got (0, 0) to (6, 4)"),
        (lay(numel=9), "piece of w in w of trainer/a/0: view: expected inside 9 elements, got its last element at 15"),
        (lay(stored="bfloat16"), f"{_DTYPE}: expected float32, the tensor's, got bfloat16, the storage's"),
    ):
        with pytest.raises(LayoutError) as caught:
            check_factored(factored(ranks("trainer/a", [layout])))
        assert message in str(caught.value)


BETWEEN = [
    pytest.param(
        [lay(shape=(5, 4), rows=(0, 5))],
        "tensor w: expected shape (4, 4) as trainer/a/0 reports, got shape (5, 4) on engine/b/0",
        True,
        id="shape",
    ),
    pytest.param(
        [lay(dtype="float64")],
        "tensor w: expected a dtype that float32 of trainer/a/0 may be cast to, got float64 on engine/b/0",
        True,
        id="cast",
    ),
    pytest.param(
        [WHOLE, lay(**VECTOR, room={"x": 2}, more=[X])],
        "tensor x: expected a source that has it, got none; engine/b/1 needs it",
        True,
        id="extra tensor",
    ),
    pytest.param(
        [lay(room={"k": 2})],
        "storage k of engine/b/0: expected a piece in it, or a keep pattern that names it, got neither",
        False,
        id="keep",
    ),
    pytest.param(
        [lay(room={"k": 2}, keep=["kept"])],
        "storage k of engine/b/0: expected a piece in it, or a keep pattern that names it, got neither",
        False,
        id="keep of another name",
    ),
    pytest.param(
        [lay(strides=(0, 1))],
        "piece of w in w of engine/b/0: expected a view whose elements share no address, got strides (0, 1)",
        False,
        id="overlap in itself",
    ),
    pytest.param(
        [WHOLE, lay(room={"v": 8}, more=[Piece("w", Box((1, 0), (3, 4)), "v", 0, (4, 1))])],
        "tensor w of engine/b/1: expected each element once on a destination rank (a copy needs its own name), got ",
        True,
        id="twice",
    ),
]


@pytest.mark.parametrize(("wanted", "message", "planned"), BETWEEN)
def test_between_the_sides(wanted: list[Layout], message: str, planned: bool) -> None:
    """Source against destination: `check_match`, `make_plan` and (``planned``) `plan_sides` tell the same."""
    sources, members = ranks("trainer/a", [TOP, LOW]), ranks("engine/b", wanted)
    ways: list[Callable[[], object]] = [
        lambda: check_match(layouts_of(sources), layouts_of(members)),
        lambda: make_plan(sources, members),
    ]
    if planned:
        ways.append(lambda: plan_sides(factored(sources), factored(members), topology("h100-nvl8")))
    for way in ways:
        with pytest.raises(MismatchError) as caught:
            way()
        assert message in str(caught.value)


def test_a_kept_storage_is_no_contradiction() -> None:
    """The same storage with a keep pattern that names it is left alone."""
    (got,) = reshard([WHOLE], [lay(room={"k": 2}, keep=["k*"])], [{"w": torch.arange(1.0, 17)}])
    assert got["w"].tolist() == list(range(1, 17))
    assert got["k"].tolist() == [0, 0]


def test_sources_that_tie_a_name_to_two_tensors_are_refused() -> None:
    """One source says that head is w, another that it is v: no plan may pick rows of both."""
    target = Layout.from_tensors({"head": torch.zeros(4, 4)})
    with pytest.raises(MismatchError, match="tied head: expected w as s/0 says, got v from s/1"):
        make_plan(ranks("s", TIED), ranks("d", [target]))


def test_a_missing_holder_names_the_rank_that_needs_it() -> None:
    """Row 2 is nobody's: both planners name the tensor, the box and the first destination that needs it."""
    sources, members = ranks("trainer/a", [TOP, lay((3, 4))]), ranks("engine/b", [TOP, LOW])
    for way in (
        lambda: make_plan(sources, members),
        lambda: plan_sides(factored(sources), factored(members), topology("h100-nvl8")),
    ):
        with pytest.raises(PlanError) as caught:
            way()
        assert str(caught.value) == "tensor w: no source holds [2, 0] to [3, 4], which engine/b/1 needs"


def test_a_dtype_that_nobody_knows_is_no_key_error() -> None:
    """Both sides agree on a dtype that does not exist: an error of refitd's that says whose it is."""
    sources, members = (ranks(prefix, [lay(dtype="float3")]) for prefix in ("s", "d"))
    for way, key in (
        (lambda: make_plan(sources, members), "s/0"),
        (lambda: plan_sides(factored(sources), factored(members), topology("h100-nvl8")), "d/0"),
    ):
        with pytest.raises(MismatchError) as caught:
            way()
        assert str(caught.value) == f"tensor w: dtype: expected a dtype that refitd knows, got float3 on {key}"


def test_plans_of_unchecked_sides_name_the_view_that_leaves_its_storage() -> None:
    """`plan_sides` alone, on a side that nobody checked: tensor, storage, rank, and both ends."""
    for sources, members, key in (
        ([TOP, lay((2, 4), numel=7)], [WHOLE], "trainer/a/1: elements 0 to 7 of 7"),
        ([TOP, LOW], [WHOLE, lay(numel=9)], "engine/b/1: elements 0 to 15 of 9"),
    ):
        with pytest.raises(PlanError) as caught:
            plan_sides(
                factored(ranks("trainer/a", sources)), factored(ranks("engine/b", members)), topology("h100-nvl8")
            )
        assert str(caught.value) == f"tensor w or one like it leaves storage w of {key}"


@pytest.mark.parametrize(("cut", "dim", "edge"), [("rows", 0, 192), ("columns", 1, 192)])
def test_a_shard_edge_inside_a_block_of_the_scale(cut: str, dim: int, edge: int) -> None:
    """fp8 of 384 x 384 with blocks of 128 over two ranks: tensor, rank, edge and block."""
    rows = [
        Row("o", "o.weight", (384, 384), cut, "float8_e4m3fn"),
        Row("o_scale", "o.weight_scale_inv", (3, 3), "full", F32),
    ]
    model = build("small", 1, 0, [Block("model.layers.{}.", range(1), rows)])
    with pytest.raises(LayoutError) as caught:
        check_blocks(megatron(model, Parallel(tp=2), Hosts(8, 8)))
    assert str(caught.value) == (
        f"tensor model.layers.0.o.weight of trainer/run/0: expected shard edges of dimension {dim} at multiples of "
        f"128, the block of its scale, got edge {edge} inside block 1 (128 to 256)"
    )


def test_all_contradictions_are_told_at_once() -> None:
    """Two faults in one layout and three between the sides: each has its own sentence, in one error."""
    both = lay((0, 6), numel=9)
    with pytest.raises(LayoutError) as caught:
        both.check("r")
    assert len(caught.value.violations) == 2
    wrong = lay(dtype="float64", **VECTOR, room={"x": 2, "k": 1}, more=[X])
    with pytest.raises(MismatchError) as found:
        make_plan(ranks("s", [WHOLE]), ranks("d", [wrong]))
    assert [v.field for v in found.value.violations] == ["tensor w", "tensor x", "storage k of d/0"]
    assert all(isinstance(v, InputError) for v in found.value.violations)
    assert issubclass(MismatchError, RefitdError)
