"""Classes: tensors that have one layout on the source side and one on the destination side, and what they overlap
in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.errors import InputError, MismatchError, PlanError
from refitd.layout.box import Ints
from refitd.layout.dtypes import cast_allowed
from refitd.layout.side import Side
from refitd.plan.canon import Ranks
from refitd.plan.cells import gap
from refitd.plan.forms import Cells, Form, overlap
from refitd.plan.kept import wanted
from refitd.plan.laid import DTYPES, Laid, lay
from refitd.plan.ranksets import RankSets, distinct, ends, stable_order


class Classes(NamedTuple):
    """C classes of the wants (tensors that the destination needs, W of them).

    Class c has the wants ``first[c]:first[c + 1]``, in the order of their destination addresses; ``src`` and ``dst``
    (W,) are their rows in the two `Laid`. ``src_combo``, ``dst_combo``, ``pair`` (C,): how they are laid out, and the
    pair of forms. Cells of pair p are ``cell_first[p]:cell_first[p + 1]`` of the columns of all pairs, ``lo``, ``hi``
    padded to the most dimensions; ``src_atom``, ``dst_atom`` count within the form.
    """

    source: Laid
    destination: Laid
    src: Ints
    dst: Ints
    first: Ints
    src_combo: Ints
    dst_combo: Ints
    pair: Ints
    forms: tuple[tuple[int, int], ...]
    cell_first: Ints
    src_atom: Ints
    dst_atom: Ints
    lo: Ints
    hi: Ints

    def sizes(self) -> Ints:
        """Tensors in each class."""
        return self.first[1:] - self.first[:-1]

    def dtypes(self) -> tuple[Ints, Ints]:
        """Source and destination dtype of each class, as indices of `DTYPES`."""
        forms = self.source.forms, self.destination.forms
        src = np.array([DTYPES.index(forms[0][s].dtype) for s, _ in self.forms], np.int64)
        dst = np.array([DTYPES.index(forms[1][d].dtype) for _, d in self.forms], np.int64)
        return src[self.pair], dst[self.pair]


def classify(source: Side, destination: Side, ranks: Ranks, sets: RankSets) -> Classes:
    """Join the sides. Raises MismatchError where they differ, PlanError where a needed region has no holder."""
    needs = lay(wanted(destination), ranks.destination, sets, None, writes=True)
    found = source_tensors(source, destination, needs.tensor)
    holds = lay(source, ranks.source, sets, distinct(found), writes=False)
    at = np.searchsorted(holds.tensor, found)
    at[at == len(holds.tensor)] = 0
    absent = holds.tensor[at] != found if len(holds.tensor) else np.ones(len(found), dtype=bool)
    if absent.any():
        raise MismatchError(_absent(destination, needs.tensor[absent], ranks, needs))
    code = holds.combo[at] * max(len(needs.form), 1) + needs.combo
    rows = needs.side.instances[needs.rows[needs.first[:-1]]]
    order = stable_order(rows[:, 4])
    order = order[stable_order(rows[order, 3])]
    order = order[stable_order(code[order])]
    code = code[order]
    fresh = np.append(True, code[1:] != code[:-1])[: len(code)]
    starts = np.flatnonzero(fresh)
    src_combo, dst_combo = np.divmod(code[starts], max(len(needs.form), 1))
    first = np.append(starts, len(code)).astype(np.int64)
    pairs, pair = np.unique(holds.form[src_combo] * (len(needs.forms) + 1) + needs.form[dst_combo], return_inverse=True)
    forms = tuple(divmod(p, len(needs.forms) + 1) for p in pairs.tolist())
    base = Classes(holds, needs, at[order], order, first, src_combo, dst_combo, pair.reshape(-1), forms, *_NO_CELLS)
    _require_matching(base, ranks)
    return _with_cells(base, ranks)


_NONE = np.zeros(0, np.int64)
_NO_CELLS = (np.zeros(1, np.int64), _NONE, _NONE, np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64))


def source_tensors(source: Side, destination: Side, tensors: Ints) -> Ints:
    """The source's tensor for each tensor of the destination, by number: its own name, an alias, or -1."""
    found = source.tensors.where(destination.tensors)
    held = np.zeros(len(source.tensors) + 1, dtype=bool)
    held[source.instances[:, 0]] = True
    found = np.where(held[found], found, -1)
    aliases: dict[str, list[str]] = {}
    for alias, name in sorted(destination.tied.items()):
        aliases.setdefault(name, []).append(alias)
    for number in tensors[found[tensors] < 0].tolist():
        name = destination.tensors[number]
        for candidate in (name, *aliases.get(name, ())):
            at = source.tensors.find(source.tied.get(candidate, candidate))
            if at >= 0 and held[at]:
                found[number] = at
                break
    return found[tensors]


def _absent(destination: Side, tensors: Ints, ranks: Ranks, needs: Laid) -> list[InputError]:
    combos = dict(zip(needs.tensor.tolist(), needs.combo.tolist(), strict=True))
    keys = [ranks.keys[int(needs.slots[combos[t]].min())] for t in tensors.tolist()]
    names = destination.tensors.take(tensors)
    return [
        InputError(f"tensor {name}", "a source that has it", f"none; {key} needs it")
        for name, key in sorted(zip(names, keys, strict=True))
    ]


def _require_matching(classes: Classes, ranks: Ranks) -> None:
    bad: list[InputError] = []
    for number, (s, d) in enumerate(classes.forms):
        have, need = classes.source.forms[s], classes.destination.forms[d]
        if have.shape != need.shape:
            expected, got = f"shape {have.shape} as {{0}} reports", f"shape {need.shape} on {{1}}"
        elif not cast_allowed(have.dtype, need.dtype):
            expected, got = f"a dtype that {have.dtype} of {{0}} may be cast to", f"{need.dtype} on {{1}}"
        else:
            continue
        for found in np.flatnonzero(classes.pair == number).tolist():
            keys = _a_rank_each(classes, found, ranks)
            names = _names(classes, found)
            bad += [InputError(f"tensor {name}", expected.format(*keys), got.format(*keys)) for name in names]
    if bad:
        raise MismatchError(sorted(bad, key=lambda error: error.field))


def _a_rank_each(classes: Classes, number: int, ranks: Ranks) -> tuple[str, str]:
    """The first source and the first destination of a class."""
    source, destination = classes.source, classes.destination
    slots = source.slots[int(classes.src_combo[number])], destination.slots[int(classes.dst_combo[number])]
    return ranks.keys[int(slots[0].min())], ranks.keys[int(slots[1].min())]


def _names(classes: Classes, number: int) -> list[str]:
    wants = classes.dst[int(classes.first[number]) : int(classes.first[number + 1])]
    return classes.destination.side.tensors.take(classes.destination.tensor[wants])


def _with_cells(classes: Classes, ranks: Ranks) -> Classes:
    blocks: list[Cells] = []
    for number, (s, d) in enumerate(classes.forms):
        have, need = classes.source.forms[s], classes.destination.forms[d]
        cells = overlap(have, need)
        filled = np.zeros(len(need.lo), np.int64)
        np.add.at(filled, cells.dst, cells.volume())
        short = np.flatnonzero(filled != (need.hi - need.lo).prod(axis=1))
        if len(short):
            raise PlanError(_orphan(classes, number, have, need, int(short[0]), ranks))
        blocks.append(cells)
    dims = max([1, *(block.lo.shape[1] for block in blocks)])
    empty = np.zeros((0, dims), np.int64)
    return classes._replace(
        cell_first=ends(np.array([len(block.src) for block in blocks], np.int64)),
        src_atom=np.concatenate([_NONE, *(block.src for block in blocks)]),
        dst_atom=np.concatenate([_NONE, *(block.dst for block in blocks)]),
        lo=np.concatenate([empty, *(pad(block.lo, dims, 0) for block in blocks)]),
        hi=np.concatenate([empty, *(pad(block.hi, dims, 1) for block in blocks)]),
    )


def pad(table: Ints, dims: int, fill: int) -> Ints:
    """The columns of ``table`` (N, d) and more of ``fill``, up to ``dims``."""
    spare = np.full((len(table), dims - table.shape[1]), fill, np.int64)
    return np.concatenate([table, spare], axis=1) if spare.shape[1] else table


def _orphan(classes: Classes, pair: int, have: Form, need: Form, atom: int, ranks: Ranks) -> str:
    hole = gap(need.lo[atom], need.hi[atom], have.lo, have.hi)
    number = int(np.flatnonzero(classes.pair == pair)[0])
    want = int(classes.dst[classes.first[number]])
    name = classes.destination.side.tensors[int(classes.destination.tensor[want])]
    key = ranks.keys[int(classes.destination.slots[int(classes.dst_combo[number])][need.slot[need.first[atom]]])]
    return f"tensor {name}: no source holds {list(hole.lo)} to {list(hole.hi)}, which {key} needs"
