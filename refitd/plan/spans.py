"""Spans: runs of grains of the entries of a line, in the order in which a domain receives them, as one run of bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refitd.layout.box import Ints
from refitd.plan.lines import Lines
from refitd.plan.ranksets import ends, ragged

WHOLE = 1000  # a window is a part of the order of reception, in thousandths


class Spans(NamedTuple):
    """Span s has the rows ``first[s]:first[s + 1]``: ``length`` grains of ``entry`` from place ``grain`` of the order
    on.

    ``offset`` (rows + 1,): where each row begins in the bytes of all spans together. The order starts at another grain
    in each domain, so a span is a number of grains and bytes that is the same in all of them.
    """

    first: Ints
    entry: Ints
    grain: Ints
    length: Ints
    offset: Ints

    def nbytes(self) -> Ints:
        """Bytes of each span."""
        return self.offset[self.first[1:]] - self.offset[self.first[:-1]]


def make_spans(lines: Lines, first: Ints, entry: Ints, grain: Ints, count: Ints) -> Spans:
    """Spans of these rows."""
    return Spans(first, entry, grain, count, ends(count * lines.grain_bytes()[entry]))


def window(lines: Lines, start: Ints | int, stop: Ints | int) -> Spans:
    """A span for every line: the window ``start`` to ``stop`` (thousandths; one for all lines, or one each)."""
    line = lines.entry_line()
    low, high = (np.broadcast_to(np.asarray(edge, np.int64), lines.holders.shape)[line] for edge in (start, stop))
    grain = grain_at(lines.grains, low)
    count = np.maximum(grain_at(lines.grains, high) - grain, 0)
    return make_spans(lines, lines.first, np.arange(len(line)), grain, count)


def grain_at(grains: Ints, edge: Ints | int) -> Ints:
    """The first grain of the order that is not before ``edge`` thousandths of it."""
    return -(-grains * edge // WHOLE)


def join(spans: Spans, more: Spans) -> Spans:
    """The spans of both, ``more`` after ``spans``."""
    return Spans(
        np.concatenate([spans.first, more.first[1:] + spans.first[-1]]),
        np.concatenate([spans.entry, more.entry]),
        np.concatenate([spans.grain, more.grain]),
        np.concatenate([spans.length, more.length]),
        np.concatenate([spans.offset, more.offset[1:] + spans.offset[-1]]),
    )


def pick(spans: Spans, at: Ints) -> Spans:
    """Copies of these spans, in this order."""
    run, place = ragged(spans.first[at + 1] - spans.first[at])
    rows = spans.first[at][run] + place
    first = ends(spans.first[at + 1] - spans.first[at])
    sizes = spans.offset[rows + 1] - spans.offset[rows]
    return Spans(first, spans.entry[rows], spans.grain[rows], spans.length[rows], ends(sizes))


def snap(lines: Lines, spans: Spans, span: Ints, at: Ints) -> Ints:
    """The greatest places not after byte ``at`` of each ``span`` where a cut is allowed (see `Lines.unit`)."""
    whole = spans.offset[spans.first[span]] + at
    row = np.searchsorted(spans.offset, whole, side="right") - 1
    row = np.minimum(row, len(spans.entry) - 1)
    within = whole - spans.offset[row]
    entry = spans.entry[row]
    rest = within % lines.grain_bytes()[entry]
    return at - rest % lines.unit[entry]
