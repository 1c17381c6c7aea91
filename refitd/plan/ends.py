"""The pieces of both sides under one numbering, as columns: what programs are made from, and proven against.

Pieces of the sources' forms come first, then those of the destinations' forms; so do forms, combos and tensors. The
end of a move is then a number alone, whichever side it is on.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Ints
from refitd.plan.classes import Classes, pad
from refitd.plan.forms import Form
from refitd.plan.lines import Lines
from refitd.plan.ranksets import ends, product, ragged, stable_order

_NONE = np.zeros(0, np.int64)


class Ends:
    """Columns over both sides.

    Of P pieces: ``part``, ``slot``, ``offset`` (P,), ``lo``, ``hi``, ``strides`` (P, D); form f has the pieces
    ``base[f]:base[f + 1]``. Of C combos: ``form`` (C,), and the ranks of their slots, ``ranks[first_slot[c]:]``. Of 2 W
    tensors (want w as its source has it is number w, as its destination has it W + w): ``combo``, and ``instance``,
    where its parts begin in ``storage`` and ``address`` (the storages' numbers on their side, and bases).
    """

    def __init__(self, classes: Classes, lines: Lines, ranks: int) -> None:
        sides = classes.source, classes.destination
        self.classes, self.lines, self.wants = classes, lines, len(classes.dst)
        self._ranks = ranks
        self._forms = [form for laid in sides for form in laid.forms]
        forms, dims = self._forms, max([classes.lo.shape[1], *(f.lo.shape[1] for f in self._forms)])
        none = np.zeros((0, dims), np.int64)
        self.base = ends([len(form.piece_lo) for form in forms])
        self.part = np.concatenate([_NONE, *(form.piece_part for form in forms)])
        self.slot = np.concatenate([_NONE, *(form.piece_slot for form in forms)])
        self.offset = np.concatenate([_NONE, *(form.piece_offset for form in forms)])
        self.lo = np.concatenate([none, *(pad(form.piece_lo, dims, 0) for form in forms)])
        self.hi = np.concatenate([none, *(pad(form.piece_hi, dims, 1) for form in forms)])
        self.strides = np.concatenate([none, *(pad(form.piece_strides, dims, 0) for form in forms)])
        self.form = np.concatenate([sides[0].form, len(sides[0].forms) + sides[1].form])
        slots = [ranks for laid in sides for ranks in laid.slots]
        self.first_slot, self.ranks = ends([len(ranks) for ranks in slots]), np.concatenate([_NONE, *slots])
        self.combo = np.concatenate([sides[0].combo[classes.src], len(sides[0].form) + sides[1].combo[classes.dst]])
        self.instance = np.concatenate([sides[0].first[classes.src], len(sides[0].rows) + sides[1].first[classes.dst]])
        self.storage, self.address = (
            np.concatenate([laid.side.instances[:, column][laid.rows] for laid in sides]) for column in (3, 4)
        )

    @cached_property
    def volume(self) -> Ints:
        """Elements of every piece."""
        return product(self.hi - self.lo)

    @cached_property
    def held(self) -> tuple[Ints, Ints, Ints]:
        """What each rank has: combo, piece and rank of every piece of every combo, as columns."""
        combo, place = ragged((self.base[1:] - self.base[:-1])[self.form])
        piece = self.base[self.form[combo]] + place
        return combo, piece, self.ranks[self.first_slot[combo] + self.slot[piece]]

    def source_atom(self, entry: Ints) -> Ints:
        """The atoms of the source side that these entries of lines lie in."""
        number, laid = self.lines.entry_class[entry], self.classes.source
        base: Ints = laid.atom[self.classes.src_combo[number]]
        return base + self.classes.src_atom[self.lines.entry_cell[entry]]

    def target_atom(self, entry: Ints) -> Ints:
        """The atoms of the destination side that these entries of lines lie in."""
        number, laid = self.lines.entry_class[entry], self.classes.destination
        base: Ints = laid.atom[self.classes.dst_combo[number]] + self.classes.source.atom[-1]
        return base + self.classes.dst_atom[self.lines.entry_cell[entry]]

    @cached_property
    def _codes(self) -> tuple[Ints, Ints]:
        """(atom, rank) as one number, sorted, and the piece of each."""
        forms: list[Form] = self._forms
        sizes, atoms = (np.array([len(getattr(f, name)) for f in forms], np.int64) for name in ("slot", "lo"))
        atom_of = [np.repeat(np.arange(len(f.lo)), f.first[1:] - f.first[:-1]) for f in forms]
        atom, slot, piece = (
            np.concatenate([_NONE, *columns])
            for columns in (atom_of, [f.slot for f in forms], [f.piece for f in forms])
        )
        combo, place = ragged(sizes[self.form])
        at = ends(sizes)[self.form[combo]] + place
        code = (ends(atoms[self.form])[combo] + atom[at]) * self._ranks + self.ranks[self.first_slot[combo] + slot[at]]
        order = stable_order(code)
        return code[order], (self.base[self.form[combo]] + piece[at])[order]

    def find(self, atom: Ints, rank: Ints) -> Ints:
        """The pieces that hold ``atom`` (of either side) on ``rank``. Raises ProofError where there is none."""
        codes, pieces = self._codes
        wanted = atom * self._ranks + rank
        at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        if (codes[at] != wanted).any():
            raise ProofError("a rank is to move what it has no piece of")
        return pieces[at]
