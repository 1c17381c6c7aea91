"""Prove a cut plan: what is cut is what is needed, and every byte of it comes once from a rank that has it.

(a) cells of a pair of forms fill every destination piece once; (b) segments fill parcels, and the parcels of each line
and domain fill the line; (c) every wanted tensor is in one class; (d) views are inside their storages and, on the
destination, apart (`views`); (e) senders hold what they send, receivers need it, and a relay's sender got it before.
"""

from __future__ import annotations

import numpy as np

from refitd.errors import ProofError
from refitd.layout.box import Bools, Ints
from refitd.plan.canon import Ranks
from refitd.plan.cells import apart
from refitd.plan.classes import Classes
from refitd.plan.cutting import Cutting
from refitd.plan.flows import NET
from refitd.plan.forms import Form
from refitd.plan.laid import Laid
from refitd.plan.lines import Lines
from refitd.plan.ranksets import SetTable, distinct, ragged
from refitd.plan.spans import grain_at
from refitd.plan.views import prove_views


def prove_content(classes: Classes, lines: Lines, sets: SetTable) -> None:
    """What does not depend on the cuts: (a), (c), (d), and the sets of (e)."""
    _prove_cells(classes)
    _prove_wants(classes)
    _prove_entries(classes, lines)
    for laid in (classes.source, classes.destination):
        _prove_sets(laid, sets)
        used = distinct(classes.src) if laid is classes.source else np.arange(len(laid.tensor))
        run, place = ragged(laid.first[used + 1] - laid.first[used])
        prove_views(laid.side, laid.rows[laid.first[used][run] + place], apart=laid is classes.destination)


def _fail(wrong: Bools, what: str) -> None:
    if wrong.any():
        raise ProofError(f"{int(wrong.sum())} {what}; the first is number {int(wrong.argmax())}")


def _prove_cells(classes: Classes) -> None:
    for number, (s, d) in enumerate(classes.forms):
        at = slice(int(classes.cell_first[number]), int(classes.cell_first[number + 1]))
        have, need = classes.source.forms[s], classes.destination.forms[d]
        dims = need.lo.shape[1]
        lo, hi, src, dst = classes.lo[at, :dims], classes.hi[at, :dims], classes.src_atom[at], classes.dst_atom[at]
        inside = (lo >= np.maximum(have.lo[src], need.lo[dst])) & (hi <= np.minimum(have.hi[src], need.hi[dst]))
        _fail(np.any(~inside | (lo >= hi), axis=1), "cells leave their atoms")
        filled = np.zeros(len(need.lo), np.int64)
        np.add.at(filled, dst, (hi - lo).prod(axis=1))
        _fail(filled != (need.hi - need.lo).prod(axis=1), "atoms are not filled once")
        if len(distinct(src * len(need.lo) + dst)) != len(src):
            raise ProofError("two cells join the same atoms")
    for laid in (classes.source, classes.destination):
        for form in laid.forms:
            _prove_form(form)


def _prove_form(form: Form) -> None:
    atom = np.repeat(np.arange(len(form.lo)), form.first[1:] - form.first[:-1])
    piece = form.piece
    inside = (form.lo[atom] >= form.piece_lo[piece]) & (form.hi[atom] <= form.piece_hi[piece])
    _fail(~inside.all(axis=1) | (form.piece_slot[piece] != form.slot), "atoms leave their pieces")
    filled = np.zeros(len(form.piece_lo), np.int64)
    np.add.at(filled, piece, (form.hi - form.lo).prod(axis=1)[atom])
    _fail(filled != (form.piece_hi - form.piece_lo).prod(axis=1), "pieces are not filled by their atoms")
    if not apart(form.lo, form.hi):
        raise ProofError("two atoms of a form overlap")


def _prove_wants(classes: Classes) -> None:
    count = np.bincount(classes.dst, minlength=len(classes.destination.tensor))
    _fail(count != 1, "wanted tensors are not in exactly one class")
    number = np.repeat(np.arange(len(classes.pair)), classes.sizes())
    _fail(classes.destination.combo[classes.dst] != classes.dst_combo[number], "wants are laid out unlike their class")
    _fail(classes.source.combo[classes.src] != classes.src_combo[number], "sources are laid out unlike their class")
    forms = np.array(classes.forms, np.int64).reshape(-1, 2)[classes.pair]
    _fail(classes.source.form[classes.src_combo] != forms[:, 0], "classes have another source form")
    _fail(classes.destination.form[classes.dst_combo] != forms[:, 1], "classes have another destination form")


def _prove_entries(classes: Classes, lines: Lines) -> None:
    """Every cell of every class is one entry, in the line of those who hold and need it."""
    cells = classes.cell_first[1:] - classes.cell_first[:-1]
    entry_class, place = ragged(cells[classes.pair])
    total = int(classes.cell_first[-1]) + 1
    expected = entry_class * total + classes.cell_first[classes.pair[entry_class]] + place
    found = np.sort(lines.entry_class * total + lines.entry_cell)
    if len(found) != len(expected) or (found != expected).any():
        raise ProofError("the entries of the lines are not the cells of the classes")
    line = lines.entry_line()
    sides = (
        (classes.source, classes.src_combo, classes.src_atom, lines.holders),
        (classes.destination, classes.dst_combo, classes.dst_atom, lines.needers),
    )
    for laid, combo, atom, column in sides:
        number = laid.holders[laid.atom[combo[lines.entry_class]] + atom[lines.entry_cell]]
        _fail(number != column[line], "entries are in a line of other ranks")


def _prove_sets(laid: Laid, sets: SetTable) -> None:
    """The set of each atom is the ranks at the slots of its pieces."""
    top = int(sets.member.max(initial=0)) + 1
    known = []
    for combo, form in enumerate(laid.form.tolist()):
        slots = laid.forms[form]
        atom = np.repeat(np.arange(len(slots.lo)), slots.first[1:] - slots.first[:-1]) + laid.atom[combo]
        known.append(atom * top + laid.slots[combo][slots.slot])
    expected = distinct(np.concatenate([np.zeros(0, np.int64), *known]))
    atom, place = ragged(sets.size()[laid.holders])
    found = atom * top + sets.member[sets.first[laid.holders][atom] + place]
    if len(found) != len(expected) or (found != expected).any():
        raise ProofError("a set of ranks differs from the slots that it stands for")


def prove_cuts(lines: Lines, cutting: Cutting, sets: SetTable, ranks: Ranks, due: Ints, lost: Ints) -> None:
    """(b) and (e). ``due`` (parcels' lines and needers, see `_prove_parcels`): bytes of each line that each needer must
    get; ``lost``: ranks that may take no part."""
    _prove_tiles(cutting)
    _prove_parcels(lines, cutting, sets, ranks, due)
    _prove_ends(lines, cutting, sets, ranks, lost)


def _prove_tiles(cutting: Cutting) -> None:
    parcel, start, stop, _, _ = cutting.segments
    nbytes = cutting.spans.nbytes()[cutting.parcels.span]
    fresh = np.append(True, parcel[1:] != parcel[:-1])[: len(parcel)]
    if (parcel[fresh] != np.arange(len(nbytes))).any() if fresh.sum() == len(nbytes) else True:
        raise ProofError("the segments are not those of every parcel in order")
    before = np.append(0, stop[:-1])[: len(stop)]
    _fail(start != np.where(fresh, 0, before), "segments do not follow the one before")
    last = np.append(fresh[1:], True)[: len(fresh)]
    _fail((start >= stop) | (last & (stop != nbytes[parcel])), "segments do not end where they should")


def _prove_parcels(lines: Lines, cutting: Cutting, sets: SetTable, ranks: Ranks, due: Ints) -> None:
    """The parcels of a line bring every needer what is ``due`` of the line, over windows that do not overlap."""
    flows, span, relay = cutting.parcels.flows, cutting.parcels.span, cutting.parcels.relay
    nbytes = cutting.spans.nbytes()[span]
    got = np.zeros(len(lines.holders), np.int64)
    np.add.at(got, flows.line, nbytes * sets.size()[flows.needers])
    _fail(got != due, "lines are not brought to all who need them")
    used = np.zeros(len(sets.first) - 1, dtype=bool)
    used[flows.needers] = True
    owner = sets.owner()
    home = ranks.domain[sets.member[sets.first[:-1]]]
    _fail(used[owner] & (ranks.domain[sets.member] != home[owner]), "needers are in another domain than their flow")
    _prove_windows(lines, cutting)
    network = np.flatnonzero((flows.link == NET) & (relay == 0))  # so no two flows of a line go to one domain
    line, where = flows.line[network], home[flows.needers[network]]
    step = (line[1:] == line[:-1]) & (where[1:] <= where[:-1])
    _fail(step, "flows of a line are not in the order of their domains")


def _prove_windows(lines: Lines, cutting: Cutting) -> None:
    """Windows lie in their entries and in the line of their parcel; of one flow they follow each other."""
    spans, parcels = cutting.spans, cutting.parcels
    stop = spans.grain + spans.length
    _fail((spans.grain < 0) | (spans.length < 0) | (stop > lines.grains[spans.entry]), "windows leave their entry")
    sizes = spans.length * lines.grain_bytes()[spans.entry]
    _fail(spans.offset[1:] - spans.offset[:-1] != sizes, "windows have other bytes than their grains")
    run, _ = ragged(spans.first[1:] - spans.first[:-1])
    carried = np.full(len(spans.first) - 1, -1, np.int64)
    carried[parcels.span] = parcels.flows.line
    line = lines.entry_line()[spans.entry]
    _fail((carried[run] >= 0) & (line != carried[run]), "windows are of another line than their parcel")
    _prove_relays(lines, cutting, np.flatnonzero(parcels.relay == 1))
    _prove_landed(lines, cutting)


def _prove_relays(lines: Lines, cutting: Cutting, late: Ints) -> None:
    """What goes by relay begins where what comes from holders ends, and ends with the entry; and the first parts of all
    domains together are the whole line, so that every chain of relays begins at holders."""
    spans, parcels = cutting.spans, cutting.parcels
    used = distinct(parcels.span[late])
    run, place = ragged(spans.first[used + 1] - spans.first[used])
    row = spans.first[used][run] + place
    entry = spans.entry[row]
    _fail(spans.entry[entry] != entry, "direct windows are not in the order of entries")
    before = spans.grain[entry] + spans.length[entry]
    _fail(spans.grain[row] != before, "relayed windows do not follow direct ones")
    _fail(spans.grain[row] + spans.length[row] != lines.grains[entry], "relayed windows end before their entry")
    flows = parcels.flows.take(late)
    of = np.zeros(len(lines.holders), np.int64)
    of[flows.line] = flows.of
    widest = -(-lines.grains[entry] // np.maximum(of[lines.entry_line()[entry]], 1))
    _fail((spans.grain[entry] == 0) & (spans.length[entry] < widest), "chains of relays have no beginning")
    _fail((flows.place - parcels.origin[late]) % flows.of != 1 % flows.of, "relays do not come from the domain before")


def _prove_landed(lines: Lines, cutting: Cutting) -> None:
    """Copies that had landed are read where they are, and no part of them twice."""
    spans, parcels = cutting.spans, cutting.parcels
    late = np.flatnonzero(parcels.relay == 2)
    if not len(late):
        return
    span, flows = parcels.span[late], parcels.flows.take(late)
    run, place = ragged(spans.first[span + 1] - spans.first[span])
    row = spans.first[span][run] + place
    entry, grain, count = spans.entry[row], spans.grain[row], spans.length[row]
    order = np.lexsort((grain, entry, flows.needers[run]))
    same = (entry[order][1:] == entry[order][:-1]) & (flows.needers[run[order]][1:] == flows.needers[run[order]][:-1])
    stop = (grain + count)[order]
    _fail(same & (grain[order][1:] < stop[:-1]), "landed copies are read twice")
    grains = lines.grains[entry]
    turn = grains * flows.place[run] // flows.of[run] - grains * parcels.origin[late][run] // flows.of[run]
    at = (grain + turn) % grains  # where it is in the order of the domain that has it
    landed = grain_at(grains, cutting.start)
    _fail((count > 0) & (at + count > landed), "parts are read that had not landed")


def _prove_ends(lines: Lines, cutting: Cutting, sets: SetTable, ranks: Ranks, lost: Ints) -> None:
    parcel, _, _, src, dst = cutting.segments
    flows, relay = cutting.parcels.flows, cutting.parcels.relay
    _require(sets.hold(flows.needers[parcel], dst), "a segment goes to a rank that is not of its flow")
    _require(sets.hold(flows.holders[parcel], src), "a segment comes from a rank that is not of its flow")
    _require(
        _inside(sets, flows.needers, lines.needers[flows.line]), "a flow brings a line to a rank that needs it not"
    )
    direct = relay == 0
    held = np.where(direct, lines.holders[flows.line], lines.needers[flows.line])
    _require(_inside(sets, flows.holders, held), "a flow comes from a rank that never has the line")
    home = ranks.domain[sets.member[sets.first[:-1]]]
    across = home[flows.needers[parcel]] != ranks.domain[src]
    _fail(across != (flows.link[parcel] == NET), "segments cross the network inside a domain, or leave it without")
    if len(lost):
        _fail(np.isin(src, lost) | np.isin(dst, lost), "segments use a rank that is lost")


def _require(right: bool, what: str) -> None:
    if not right:
        raise ProofError(what)


def _inside(sets: SetTable, parts: Ints, wholes: Ints) -> bool:
    """Whether every set of ``parts`` is inside the set of ``wholes`` beside it; each pair is looked at once."""
    if not len(parts):
        return True
    top = int(wholes.max()) + 1
    part, whole = np.divmod(distinct(parts * top + wholes), top)
    row, place = ragged(sets.size()[part])
    return sets.hold(whole[row], sets.member[sets.first[part][row] + place])
