"""How each tensor of a side is laid out: combinations of (pattern, group), few of them for very many tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.errors import InputError, MismatchError
from refitd.layout.box import Ints
from refitd.layout.dtypes import ITEMSIZE
from refitd.layout.side import Side
from refitd.plan.forms import Form, make_form
from refitd.plan.ranksets import RankSets, distinct, ends, stable_order


class Laid(NamedTuple):
    """Tensors of a side (by dtype, where a side has a tensor in several), T of them, by tensor number.

    ``combo`` (T,) says how tensor t is laid out; its instances are ``rows[first[t]:first[t + 1]]`` (numbers of rows of
    ``side.instances``), in the order of the form's parts. Combos: ``forms[form[c]]`` over the ranks ``slots[c]`` (by
    the form's slots, as numbers of the plan). Atom a of combo c is number ``atom[c] + a`` of all atoms; ``holders`` has
    the number of its set of ranks.
    """

    side: Side
    tensor: Ints
    dtype: Ints
    combo: Ints
    first: Ints
    rows: Ints
    forms: tuple[Form, ...]
    form: Ints
    slots: tuple[Ints, ...]
    atom: Ints
    holders: Ints


DTYPES = tuple(ITEMSIZE)


def lay(side: Side, numbers: Ints, sets: RankSets, used: Ints | None, writes: bool) -> Laid:
    """Group the instances of ``side`` by tensor. ``numbers``: rank numbers by side index; ``used``: tensors that
    matter.

    ``writes``: the side receives; it may then have a tensor in several dtypes, and no rank may have an element twice.
    Raises MismatchError where instances of a tensor disagree.
    """
    table, mine = side.instances, np.arange(len(side.instances))
    if used is not None:
        wanted = np.zeros(len(side.tensors), dtype=bool)
        wanted[used] = True
        mine = mine[wanted[table[:, 0]]]
    _require_dtypes(side)
    dtype_of = np.array([DTYPES.index(pattern.dtype) for pattern in side.patterns], np.int64)
    groups = len(side.groups) + 1
    code = table[mine, 1] * groups + table[mine, 2]
    key = table[mine, 0] * len(DTYPES) + (dtype_of[table[mine, 1]] if writes else 0)
    order = stable_order(key * (len(side.patterns) * groups + 1) + code)
    rows, key, code = mine[order], key[order], code[order]
    fresh = np.append(True, key[1:] != key[:-1])[: len(key)]
    first = np.append(np.flatnonzero(fresh), len(key)).astype(np.int64)
    combo, keys = _combos(code, first)
    tensor, dtype = key[first[:-1]] // len(DTYPES), dtype_of[table[rows[first[:-1]], 1]]
    parts = [[divmod(part, groups) for part in combination] for combination in keys]
    _require_agreement(side, parts, combo, tensor)
    known: dict[tuple[int, ...], int] = {}
    form = np.array([known.setdefault(tuple(p for p, _ in part), len(known)) for part in parts], np.int64)
    forms = tuple(make_form([side.patterns[p] for p in numbers_]) for numbers_ in known)
    spread = [numbers[np.array(group, np.int64)] for group in side.groups]
    slots = tuple(spread[p[0][1]] if len(p) == 1 else np.concatenate([spread[g] for _, g in p]) for p in parts)
    sample = np.zeros(len(keys), np.int64)
    sample[combo[::-1]] = tensor[::-1]  # the first tensor of each combination
    holders = [
        _holders(forms[f], ranks, sets, writes, side, numbers, at)
        for f, ranks, at in zip(form.tolist(), slots, sample.tolist(), strict=True)
    ]
    atom = ends(np.array([len(forms[f].lo) for f in form.tolist()], np.int64))
    joined = np.concatenate([np.zeros(0, np.int64), *holders])
    return Laid(side, tensor, dtype, combo, first, rows, forms, form, slots, atom, joined)


def _combos(code: Ints, first: Ints) -> tuple[Ints, list[tuple[int, ...]]]:
    """The combination of each tensor, and the (pattern, group) codes of each combination."""
    counts = first[1:] - first[:-1]
    combo = np.zeros(len(counts), np.int64)
    keys: list[tuple[int, ...]] = []
    for count in distinct(counts).tolist():
        at = np.flatnonzero(counts == count)
        table = code[first[at][:, None] + np.arange(count)]
        if count == 1:
            unique, inverse = np.unique(table[:, 0], return_inverse=True)
            unique = unique[:, None]
        else:
            unique, inverse = np.unique(table, axis=0, return_inverse=True)
        combo[at] = inverse.reshape(-1) + len(keys)
        keys += [tuple(row) for row in unique.tolist()]
    return combo, keys


def _require_dtypes(side: Side) -> None:
    unknown = np.array([pattern.dtype not in ITEMSIZE for pattern in side.patterns], dtype=bool)
    bad = []
    for tensor, pattern, group in side.instances[unknown[side.instances[:, 1]], :3].tolist() if unknown.any() else ():
        got = f"{side.patterns[pattern].dtype} on {side.ranks[side.groups[group][0]]}"
        bad.append(InputError(f"tensor {side.tensors[tensor]}: dtype", "a dtype that refitd knows", got))
    if bad:
        raise MismatchError(bad)


def _require_agreement(side: Side, parts: list[list[tuple[int, int]]], combo: Ints, tensor: Ints) -> None:
    bad: list[InputError] = []
    for number, part in enumerate(parts):
        facts = sorted({(side.patterns[p].shape, side.patterns[p].dtype) for p, _ in part})
        if len(facts) > 1:
            texts = [f"shape {shape} dtype {dtype}" for shape, dtype in facts]
            names = side.tensors.take(tensor[combo == number])
            bad += [InputError(f"tensor {name}", f"{texts[0]} on every rank", texts[1]) for name in names]
    if bad:
        raise MismatchError(bad)


def _holders(form: Form, ranks: Ints, sets: RankSets, writes: bool, side: Side, numbers: Ints, tensor: int) -> Ints:
    members = ranks[form.slot]
    found = sets.add_runs(members, form.first)
    if writes and len(members):
        codes = np.sort(np.repeat(np.arange(len(form.lo)), form.first[1:] - form.first[:-1]) * (1 << 32) + members)
        twice = codes[1:][codes[1:] == codes[:-1]]
        if len(twice):
            atom, member = divmod(int(twice[0]), 1 << 32)
            field = f"tensor {side.tensors[tensor]} of {side.ranks[int(np.flatnonzero(numbers == member)[0])]}"
            got = f"{form.lo[atom].tolist()} to {form.hi[atom].tolist()} twice"
            raise MismatchError(
                [InputError(field, "each element once on a destination rank (a copy needs its own name)", got)]
            )
    return found
