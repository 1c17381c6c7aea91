"""What must hold over all ranks of a side, and between the two sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, groupby

import numpy as np

from refitd.errors import InputError, LayoutError, MismatchError
from refitd.layout.box import Ints, Piece, missing, overlaps_itself
from refitd.layout.dtypes import ITEMSIZE, cast_allowed
from refitd.layout.layout import Fact, Layout

Side = Mapping[str, Layout]


def check_side(layouts: Side) -> None:
    """Raise LayoutError unless all ranks report the same shapes and dtypes, and every element has a holder."""
    bad = list(_disagreements(layouts)) or list(_uncovered(layouts))
    if bad:
        raise LayoutError(bad)


def check_match(sources: Side, destinations: Side) -> None:
    """Raise MismatchError with every difference that forbids a refit.

    Sources that disagree; a tensor that the destinations need and no source has; another shape; a cast that is not
    allowed; a destination storage that nothing fills and no ``keep`` names (but for padding of a tensor that other
    ranks fill); a destination view that overlaps itself; an
    element that one destination rank has twice under one name. Tensors that only the sources have are no error.
    """
    bad = [*_disagreements(sources), *_tensor_differences(sources, destinations), *_unfilled(destinations)]
    if bad:
        raise MismatchError(bad)


def facts_of(layouts: Side) -> dict[str, tuple[str, Fact]]:
    """Tensor or alias name -> (first rank in sorted order that knows it, its shape and dtype)."""
    known: dict[str, tuple[str, Fact]] = {}
    for key in sorted(layouts):
        for name, fact in _named(layouts[key]):
            known.setdefault(name, (key, fact))
    return known


def _named(layout: Layout) -> Iterator[tuple[str, Fact]]:
    yield from layout.tensors.items()
    for alias, name in layout.tied.items():
        if alias not in layout.tensors:
            yield alias, layout.tensors[name]


def source_name(tensor: str, destinations: Side, known: Mapping[str, object]) -> str | None:
    """The name under which the sources have a destination's tensor: its own, or that of one of its aliases."""
    if tensor in known:
        return tensor
    aliases = {a for layout in destinations.values() for a, name in layout.tied.items() if name == tensor}
    return min(aliases & known.keys(), default=None)


def wanted(layout: Layout) -> Iterator[Piece]:
    """Pieces of a destination that a refit fills: all but those in storages that ``keep`` names."""
    return (piece for piece in layout.pieces() if piece.storage not in layout.kept)


def _disagreements(layouts: Side) -> Iterator[InputError]:
    known = facts_of(layouts)
    for key in sorted(layouts):
        for name, fact in _named(layouts[key]):
            first, expected = known[name]
            if fact != expected:
                yield InputError(f"tensor {name}", f"{_text(expected)} as {first} reports", f"{_text(fact)} from {key}")
    yield from _other_ties(layouts)


def _other_ties(layouts: Side) -> Iterator[InputError]:
    """Aliases that two ranks tie to different tensors."""
    known: dict[str, tuple[str, str]] = {}
    for key in sorted(layouts):
        for alias, name in layouts[key].tied.items():
            first, expected = known.setdefault(alias, (key, name))
            if name != expected:
                yield InputError(f"tied {alias}", f"{expected} as {first} says", f"{name} from {key}")


def _text(fact: Fact) -> str:
    return f"shape {fact[0]} dtype {fact[1]}"


def _uncovered(layouts: Side) -> Iterator[InputError]:
    boxes = _boxes(layouts)
    seen: dict[tuple[object, ...], object] = {}
    for name, (first, (shape, _dtype)) in sorted(facts_of(layouts).items()):
        if 0 in shape:
            continue
        lo, hi = boxes.get(name, (np.zeros((0, len(shape) or 1), np.int64),) * 2)
        key = (shape, lo.shape, lo.tobytes(), hi.tobytes())
        if key not in seen:
            seen[key] = missing(shape, lo, hi)
        if (gap := seen[key]) is not None:
            expected = f"a holder for every element of shape {shape} as {first} reports"
            yield InputError(f"tensor {name}", expected, f"none for {gap}")


def _boxes(layouts: Side) -> dict[str, tuple[Ints, Ints]]:
    """Unique boxes held of each tensor or alias: lo and hi (B, D)."""
    rows: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for layout in layouts.values():
        for piece in layout.pieces():
            rows.setdefault(piece.tensor, set()).add(piece.box)
        for alias, name in layout.tied.items():
            rows.setdefault(alias, set()).update(piece.box for piece in layout.pieces() if piece.tensor == name)
    return {name: _arrays(sorted(boxes)) for name, boxes in rows.items() if boxes}


def _arrays(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[Ints, Ints]:
    if not boxes[0][0]:
        return np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64)
    return np.array([lo for lo, _ in boxes], np.int64), np.array([hi for _, hi in boxes], np.int64)


def _tensor_differences(sources: Side, destinations: Side) -> Iterator[InputError]:
    known = facts_of(sources)
    for (name, (shape, dtype)), key in _needed(destinations).items():
        found = source_name(name, destinations, known)
        if found is None:
            yield InputError(f"tensor {name}", "a source that has it", f"none; {key} needs it")
            continue
        first, (source_shape, source_dtype) = known[found]
        if source_dtype not in ITEMSIZE:
            yield InputError(f"tensor {name}: dtype", "a dtype that refitd knows", f"{source_dtype} on {first}")
        elif source_shape != shape:
            yield InputError(f"tensor {name}", f"shape {source_shape} as {first} reports", f"shape {shape} on {key}")
        elif not cast_allowed(source_dtype, dtype):
            expected = f"a dtype that {source_dtype} of {first} may be cast to"
            yield InputError(f"tensor {name}", expected, f"{dtype} on {key}")


def _needed(destinations: Side) -> dict[tuple[str, Fact], str]:
    """(tensor, fact) with at least one piece to fill -> the first rank that says so, in sorted order."""
    needed: dict[tuple[str, Fact], str] = {}
    for key in sorted(destinations):
        layout = destinations[key]
        for piece in wanted(layout):
            needed.setdefault((piece.tensor, layout.tensors[piece.tensor]), key)
    return dict(sorted(needed.items()))


def _unfilled(destinations: Side) -> Iterator[InputError]:
    """Storages without a piece. One that other ranks fill is good where its rank knows all tensors in it: its part of
    them is padding."""
    tensors: dict[str, set[str]] = {}
    filled: dict[str, set[str]] = {key: set() for key in destinations}
    for key, layout in destinations.items():
        for piece in wanted(layout):
            filled[key].add(piece.storage)
            tensors.setdefault(piece.storage, set()).add(piece.tensor)
    for key in sorted(destinations):
        layout = destinations[key]
        for name, (numel, _dtype) in layout.storages.items():
            padding = name in tensors and tensors[name] <= layout.tensors.keys()
            if numel and name not in filled[key] and name not in layout.kept and not padding:
                yield InputError(
                    f"storage {name} of {key}", "a piece in it, or a keep pattern that names it", "neither"
                )
        yield from _unwritable(key, layout)


def _unwritable(key: str, layout: Layout) -> Iterator[InputError]:
    for name, group in groupby(wanted(layout), key=lambda piece: piece.tensor):
        pieces = list(group)
        for piece in pieces:
            if overlaps_itself(piece.box, piece.strides):
                field = f"piece of {name} in {piece.storage} of {key}"
                yield InputError(field, "a view whose elements share no address", f"strides {piece.strides}")
        for a, b in combinations(pieces, 2):
            if (twice := a.box.intersect(b.box)) is not None:
                field = f"tensor {name} of {key}"
                got = f"{twice} in {a.storage} and {b.storage}"
                yield InputError(field, "each element once on a destination rank (a copy needs its own name)", got)
