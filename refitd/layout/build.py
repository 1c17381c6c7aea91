"""Records and bytes to the columns of a `Layout`, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from refitd.errors import InputError, LayoutError
from refitd.layout import codec
from refitd.layout.box import Ints, Piece

if TYPE_CHECKING:
    from refitd.layout.layout import Layout

_KIND = "layout"
MAX_DIMS = 8
_HEADER: dict[str, tuple[type, ...]] = {
    "tensors": (str, list, str), "storages": (str, int, str), "tied": (str, str), "facts": (list, str),
}  # fmt: skip
_Fact = tuple[tuple[int, ...], str]


class Parts(NamedTuple):
    """The fields of a `Layout`, structurally sound (indices in range, numbers in [0, 2**48])."""

    tensors: dict[str, _Fact]
    storages: dict[str, tuple[int, str]]
    keep: tuple[str, ...]
    tied: dict[str, str]
    facts: tuple[_Fact, ...]
    pattern_fact: Ints
    patterns: Ints
    instances: Ints


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> frozenset[str]:
    """Names that match at least one fnmatch pattern."""
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def from_records(
    tensors: Mapping[str, tuple[Iterable[int], str]],
    storages: Mapping[str, tuple[int, str]],
    pieces: Iterable[Piece],
    keep: tuple[str, ...],
    tied: dict[str, str],
) -> Parts:
    """Parts of a layout. Raises LayoutError with every record that cannot be represented."""
    bad = _bad_names(tensors, storages, keep, tied)
    if bad:  # they could not be sorted, or written into the errors that follow
        raise LayoutError(bad)
    facts = {name: (tuple(shape), dtype) for name, (shape, dtype) in sorted(tensors.items())}
    rows = [piece._replace(tensor=tied.get(piece.tensor, piece.tensor)) for piece in pieces]
    bad += _bad_facts(facts, dict(storages), tied)
    bad += [error for piece in rows for error in _bad_piece(piece, facts, storages)]
    if bad:
        raise LayoutError(bad)
    stored = {name: (numel, dtype) for name, (numel, dtype) in sorted(storages.items())}
    ordered = sorted({piece for piece in rows if piece.box.volume})
    return _columns(facts, stored, ordered, tuple(sorted(set(keep))), dict(sorted(tied.items())))


def _bad_names(
    tensors: Mapping[str, Any], storages: Mapping[str, Any], keep: Iterable[str], tied: Mapping[str, str]
) -> list[InputError]:
    """Names that cannot be written: tensors, storages, aliases, ``keep`` patterns, and dtypes, which errors quote."""
    named: list[tuple[str, Iterable[object]]] = [
        ("tensor name", tensors), ("tensor dtype", [row[1] for row in tensors.values()]),
        ("storage name", storages), ("storage dtype", [row[1] for row in storages.values()]),
        ("keep pattern", keep), ("tied alias", tied), ("tied name", tied.values()),
    ]  # fmt: skip
    found = [codec.name_fault(kind, name) for kind, names in named for name in names]
    return [fault for fault in found if fault is not None]


def _bad_facts(facts: dict[str, Any], storages: dict[str, Any], tied: dict[str, str]) -> list[InputError]:
    bad = []
    for name, (shape, _dtype) in facts.items():
        if len(shape) > MAX_DIMS or not all(codec.is_int(n) for n in shape) or _volume(shape) > codec.MAX_INT:
            bad.append(
                InputError(f"tensor {name}: shape", f"up to {MAX_DIMS} sizes, fewer than 2**48 elements", str(shape))
            )
    for name, (numel, _dtype) in storages.items():
        if not codec.is_int(numel):
            bad.append(InputError(f"storage {name}: elements", "an int from 0 to 2**48", repr(numel)[:40]))
    for alias, name in tied.items():
        if name not in facts or name in tied:
            bad.append(InputError(f"tied {alias}", "the canonical name of a known tensor", name))
    return bad


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume


def _bad_piece(piece: Piece, facts: dict[str, _Fact], storages: Mapping[str, Any]) -> list[InputError]:
    fault = _piece_fault(piece, facts, storages)
    if fault is None:
        return []
    what, expected, got = fault
    return [InputError(f"piece of {piece.tensor} in {piece.storage}: {what}", expected, got)]


def _piece_fault(piece: Piece, facts: dict[str, _Fact], storages: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The part that is wrong, what was expected, and what came."""
    if piece.tensor not in facts:
        return "tensor", "a known tensor", piece.tensor
    if piece.storage not in storages:
        return "storage", "a known storage", piece.storage
    dims = len(facts[piece.tensor][0])
    if not len(piece.box.lo) == len(piece.box.hi) == len(piece.strides) == dims:
        return "box and strides", f"{dims} dimensions", f"{piece.box} {piece.strides}"
    numbers = (*piece.box.lo, *piece.box.hi, *piece.strides, piece.offset)
    if not all(codec.is_int(n) for n in numbers):
        return "box, offset, strides", "ints from 0 to 2**48", str(numbers)[:80]
    return None


def _columns(
    tensors: dict[str, _Fact],
    storages: dict[str, tuple[int, str]],
    pieces: list[Piece],
    keep: tuple[str, ...],
    tied: dict[str, str],
) -> Parts:
    tensor_index = {name: i for i, name in enumerate(tensors)}
    storage_index = {name: i for i, name in enumerate(storages)}
    facts: dict[_Fact, int] = {}
    patterns: dict[tuple[Any, ...], int] = {}
    instances = []
    for piece in pieces:
        fact = facts.setdefault(tensors[piece.tensor], len(facts))
        pattern = patterns.setdefault((fact, *piece.box, piece.strides), len(patterns))
        instances.append((tensor_index[piece.tensor], storage_index[piece.storage], piece.offset, pattern))
    dims = max([1, *(len(shape) for shape, _ in facts)])
    table = np.array([_padded(key[1:], dims) for key in patterns], dtype=np.int64).reshape(len(patterns), 3, dims)
    fact_column = np.array([key[0] for key in patterns], dtype=np.int64)
    rows = np.array(instances, dtype=np.int64).reshape(len(instances), 4)
    return Parts(tensors, storages, keep, tied, tuple(facts), fact_column, table, rows)


def _padded(pattern: tuple[tuple[int, ...], ...], dims: int) -> tuple[tuple[int, ...], ...]:
    spare = dims - len(pattern[0])
    lo, hi, strides = pattern
    return (*lo, *(0,) * spare), (*hi, *(1,) * spare), (*strides, *(0,) * spare)


def to_bytes(layout: Layout | Parts) -> bytes:
    """The bytes of a layout."""
    header = {
        "tensors": [[name, list(shape), dtype] for name, (shape, dtype) in layout.tensors.items()],
        "storages": [[name, numel, dtype] for name, (numel, dtype) in layout.storages.items()],
        "keep": list(layout.keep),
        "tied": [list(item) for item in layout.tied.items()],
        "facts": [[list(shape), dtype] for shape, dtype in layout.facts],
    }
    patterns = layout.patterns.reshape(len(layout.patterns), 3 * layout.patterns.shape[2])
    arrays = {"fact": layout.pattern_fact, "patterns": patterns, "instances": layout.instances}
    return codec.encode(_KIND, header, arrays)


def from_bytes(data: bytes) -> Parts:
    """Parts from bytes. Raises InputError on anything that `to_bytes` would not have written.

    Equal geometry has equal bytes, and checks count on sorted names and pieces: no other order, number or spelling of
    the same is read.
    """
    header, arrays = codec.decode(_KIND, data)
    parts = _parts(header, arrays)
    _require_facts(parts)
    _require_order(parts)
    if to_bytes(parts) != data:  # spaces, other keys, columns in another order
        raise InputError("layout header", "the spelling that to_bytes writes", "another one of the same geometry")
    return parts


def _parts(header: dict[str, Any], arrays: dict[str, Ints]) -> Parts:
    rows = {key: _rows(header, key, types) for key, types in _HEADER.items()}
    keep = codec.strings("layout keep", header.get("keep"))
    for key in ("tensors", "storages", "tied"):
        _require_ascending(f"layout {key}", [row[0] for row in rows[key]])
    _require_ascending("layout keep", keep)
    tensors = {name: (tuple(shape), dtype) for name, shape, dtype in rows["tensors"]}
    storages = {name: (numel, dtype) for name, numel, dtype in rows["storages"]}
    tied = dict(rows["tied"])
    facts = tuple((tuple(shape), dtype) for shape, dtype in rows["facts"])
    bad = _bad_names(tensors, storages, keep, tied)
    bad += _bad_facts(tensors, storages, tied) + _bad_facts({f"fact {i}": f for i, f in enumerate(facts)}, {}, {})
    if bad:
        raise LayoutError(bad)
    fact, table, instances = _arrays(arrays, facts)
    codec.require_range("layout instances, tensor", instances[:, 0], len(tensors))
    codec.require_range("layout instances, storage", instances[:, 1], len(storages))
    codec.require_range("layout instances, pattern", instances[:, 3], len(table))
    return Parts(tensors, storages, keep, tied, facts, fact, table, instances)


def _require_ascending(field: str, names: Sequence[str]) -> None:
    """Names of a table stand in strictly ascending order (of code points), so each once."""
    for one, other in pairwise(names):
        if one >= other:
            raise InputError(field, "names in strictly ascending order", f"{one[:80]!r} before {other[:80]!r}")


def _require_order(parts: Parts) -> None:
    """Pieces sorted, each once; patterns and facts numbered as they come in them; none of an alias, none empty."""
    tensor, storage, base, pattern = parts.instances.T
    lo, hi, strides = np.moveaxis(parts.patterns, 1, 0)
    if (lo >= hi).any():
        raise InputError("layout patterns", "boxes that hold something", "an empty one")
    aliases = np.array([name in parts.tied for name in parts.tensors], dtype=bool)
    if len(tensor) and aliases[tensor].any():
        raise InputError("layout instances", "pieces under the canonical name of a tensor", "a piece of an alias")
    columns = [tensor, *lo[pattern].T, *hi[pattern].T, storage, base, *strides[pattern].T]
    if not _ascending(np.stack(columns, axis=1)):
        raise InputError("layout instances", "pieces in strictly ascending order", "another order, or one twice")
    _require_numbering("layout patterns", pattern, len(parts.patterns))
    _require_numbering("layout facts", parts.pattern_fact, len(parts.facts))
    flat = parts.patterns.reshape(len(lo), 3 * lo.shape[1])
    rows = {(fact, row.tobytes()) for fact, row in zip(parts.pattern_fact.tolist(), flat, strict=True)}
    if len(rows) < len(flat) or len(set(parts.facts)) < len(parts.facts):
        raise InputError("layout patterns and facts", "each once", "one twice")


def _ascending(table: Ints) -> bool:
    """Whether each row (N, C) is greater than the one before it, compared from the first column on."""
    step = table[1:] - table[:-1]
    first = (step != 0).argmax(axis=1)
    return bool((step[np.arange(len(step)), first] > 0).all())


def _require_numbering(field: str, numbers: Ints, count: int) -> None:
    """All of ``count`` are used, and numbered in the order in which they come first."""
    seen = np.maximum.accumulate(np.append(-1, numbers))
    if (numbers > seen[:-1] + 1).any() or seen[-1] != count - 1:
        raise InputError(field, "all used, and numbered in the order of their first use", "other numbers")


def _rows(header: dict[str, Any], key: str, types: tuple[type, ...]) -> list[Any]:
    rows = header.get(key)
    good = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == len(types) and all(map(isinstance, row, types)) for row in rows
    )
    if not good or not isinstance(rows, list):
        raise InputError(f"layout {key}", f"rows of {', '.join(t.__name__ for t in types)}", repr(rows)[:80])
    return rows


def _arrays(arrays: dict[str, Ints], facts: tuple[_Fact, ...]) -> tuple[Ints, Ints, Ints]:
    dims = max([1, *(len(shape) for shape, _ in facts)])
    widths = {"fact": (), "patterns": (3 * dims,), "instances": (4,)}
    for name, width in widths.items():
        array = arrays.get(name)
        if array is None or array.shape[1:] != width:
            raise InputError(f"layout {name}", f"rows of shape {width}", "none" if array is None else str(array.shape))
        codec.require_range(f"layout {name}", array, codec.MAX_INT + 1)
    codec.require_range("layout fact", arrays["fact"], len(facts))
    if len(arrays["fact"]) != len(arrays["patterns"]):
        raise InputError("layout fact", f"{len(arrays['patterns'])} rows", str(len(arrays["fact"])))
    table = arrays["patterns"].reshape(-1, 3, dims)
    used = np.array([len(shape) for shape, _ in facts], dtype=np.int64)[arrays["fact"]]
    spare = np.arange(dims) >= used[:, None]
    if (np.moveaxis(table, 1, 2)[spare] != np.array([0, 1, 0])).any():
        raise InputError("layout patterns", "lo 0, hi 1, stride 0 beyond the tensor's dimensions", "other numbers")
    return arrays["fact"], table, arrays["instances"]


def _require_facts(parts: Parts) -> None:
    index = {value: i for i, value in enumerate(parts.facts)}
    own = np.array([index.get(value, -1) for value in parts.tensors.values()], dtype=np.int64)
    tensor, pattern = parts.instances[:, 0], parts.instances[:, 3]
    if len(tensor) and (own[tensor] != parts.pattern_fact[pattern]).any():
        raise InputError("layout instances", "patterns of the tensor's own shape and dtype", "another tensor's pattern")
