"""What must hold over a side, and between the sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refitd.errors import LayoutError, MismatchError
from refitd.layout import Box, Layout, Piece, check_match, check_side
from refitd.layout.tp import dense

F = "float32"


def one(shape: tuple[int, ...], box: Box, dtype: str = F, name: str = "w", **more: object) -> Layout:
    storages = {"s": (max(box.volume, 1), dtype)}
    return Layout.from_pieces({name: (shape, dtype)}, storages, [dense(name, box, "s")], **more)  # type: ignore[arg-type]


def test_ranks_that_report_different_global_shapes_are_named() -> None:
    """B3: 6 rows against 4 is an error naming the parameter, both ranks and both shapes; 5 on both is fine."""
    wrong = {"trainer/a/0": one((6,), Box((0,), (3,))), "trainer/a/1": one((4,), Box((2,), (4,)))}
    with pytest.raises(LayoutError) as caught:
        check_side(wrong)
    (violation,) = caught.value.violations
    assert (violation.field, violation.expected, violation.got) == (
        "tensor w",
        "shape (6,) dtype float32 as trainer/a/0 reports",
        "shape (4,) dtype float32 from trainer/a/1",
    )
    with pytest.raises(MismatchError, match="shape \\(4,\\) dtype float32 from trainer/a/1"):
        check_match(wrong, {"engine/r/0": one((6,), Box((0,), (6,)))})
    check_side({"trainer/a/0": one((5,), Box((0,), (3,))), "trainer/a/1": one((5,), Box((3,), (5,)))})


def test_ranks_that_report_different_dtypes_are_named() -> None:
    """Two dtypes of one parameter are an error too."""
    with pytest.raises(LayoutError, match="bfloat16 from trainer/a/1"):
        check_side({"trainer/a/0": one((2,), Box((0,), (2,))), "trainer/a/1": one((2,), Box((0,), (2,)), "bfloat16")})


def test_an_element_without_holder_is_named_with_its_region() -> None:
    """E3: of four experts held as 0 and 1 only, the region of 2 and 3 is reported."""
    with pytest.raises(LayoutError) as caught:
        check_side({"trainer/a/0": one((4, 2), Box((0, 0), (1, 2))), "trainer/a/1": one((4, 2), Box((1, 0), (2, 2)))})
    (violation,) = caught.value.violations
    assert violation.field == "tensor w"
    assert violation.got == f"none for {Box((2, 0), (4, 2))}"


def test_a_tensor_that_no_rank_holds_is_named_unless_it_is_empty() -> None:
    """A listed tensor without any piece has no holder; one without elements needs none."""
    with pytest.raises(LayoutError, match="tensor v: expected a holder"):
        check_side({"trainer/a/0": Layout.from_pieces({"v": ((), F)}, {}, [])})
    check_side({"trainer/a/0": Layout.from_tensors({"e": torch.zeros(0, 3), "s": torch.tensor(1.0)})})


def test_an_alias_on_one_rank_holds_for_the_side() -> None:
    """A head that is tied on the first stage and stands alone on the last has holders under both names."""
    tied = one((4,), Box((0,), (4,)), name="embed", tied={"head": "embed"})
    check_side({"trainer/a/0": tied, "trainer/a/1": one((4,), Box((0,), (2,)), name="head")})


def source() -> dict[str, Layout]:
    return {"trainer/a/0": Layout.from_tensors({"w": torch.zeros(4, 2), "extra": torch.zeros(3)})}


GOOD = Box((0, 0), (4, 2))


def made(storages: dict[str, tuple[int, str]], *pieces: Piece) -> Layout:
    return Layout.from_pieces({"w": ((4, 2), F)}, storages, pieces)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: one((4, 2), GOOD, name="v"), "tensor v: expected a source that has it, got none; engine/r/0 needs it"),
        (lambda: one((4, 3), Box((0, 0), (4, 3))), r"shape \(4, 2\) as trainer/a/0 reports, got shape \(4, 3\) on en"),
        (lambda: one((4, 2), GOOD, "float64"), "float32 of trainer/a/0 may be cast to, got float64 on engine/r/0"),
        (lambda: Layout.from_pieces({}, {"s": (3, F)}, []), "storage s of engine/r/0: expected a piece in it, or"),
        (lambda: made({"s": (9, F)}, Piece("w", GOOD, "s", 0, (0, 1))), "share no address"),
        (
            lambda: made({"s": (8, F), "t": (2, F)}, dense("w", GOOD, "s"), dense("w", Box((1, 0), (2, 2)), "t")),
            "each element once",
        ),
    ],
)
def test_differences_between_the_sides_are_refused(make: Callable[[], Layout], message: str) -> None:
    """Missing, misshapen, uncastable, unfilled and unwritable tensors are MismatchErrors that say where."""
    with pytest.raises(MismatchError, match=message):
        check_match(source(), {"engine/r/0": make()})


def test_allowed_differences() -> None:
    """Extra source tensors, padding, narrowing, kept storages, empty storages and tied names are fine."""
    facts = {"w": ((4, 2), "bfloat16"), "own": ((5,), F)}
    pieces = [dense("w", GOOD, "s"), dense("own", Box((0,), (5,)), "own")]
    storages = {"s": (20, "bfloat16"), "own": (5, F), "rope.cos": (7, F), "none": (0, F)}
    layout = Layout.from_pieces(facts, storages, pieces, keep=("rope.*", "own"), tied={"head": "w"})
    check_match(source(), {"engine/r/0": layout})


def test_all_differences_come_in_one_error() -> None:
    """Two faulty ranks give one error with both faults."""
    bad = {"engine/r/0": one((4, 2), GOOD, name="v"), "engine/r/1": Layout.from_pieces({}, {"s": (3, F)}, [])}
    with pytest.raises(MismatchError) as caught:
        check_match(source(), bad)
    assert len(caught.value.violations) == 2
