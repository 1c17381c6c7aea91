"""Sets of ranks under numbers, as columns. A set of one rank has that rank's number."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from refitd.layout.box import Bools, Ints


class SetTable(NamedTuple):
    """Members of set s, sorted: ``member[first[s]:first[s + 1]]``."""

    first: Ints
    member: Ints

    def size(self) -> Ints:
        """Members of each set."""
        return self.first[1:] - self.first[:-1]

    def of(self, number: int) -> Ints:
        """Members of one set."""
        return self.member[self.first[number] : self.first[number + 1]]

    def owner(self) -> Ints:
        """The set that each entry of ``member`` belongs to."""
        return np.repeat(np.arange(len(self.first) - 1), self.size())

    def contains(self, numbers: Ints, ranks: Ints) -> Bools:
        """Whether rank k is in set k, by columns."""
        found: Bools = self.member[self.first[numbers]] == ranks
        several = np.flatnonzero(~found & (self.size()[numbers] > 1))
        if len(several):
            top = int(max(self.member.max(), ranks.max())) + 1
            codes = self.owner() * top + self.member  # sorted: sets in order, members sorted in each
            wanted = numbers[several] * top + ranks[several]
            found[several] = codes[np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)] == wanted
        return found

    def hold(self, numbers: Ints, ranks: Ints) -> bool:
        """Whether rank k is in set k for all k. Looks at each pair once."""
        if not len(numbers):
            return True
        top = int(ranks.max()) + 1
        return bool(self.contains(*np.divmod(distinct(numbers * top + ranks), top)).all())


class RankSets:
    """Interns sets; numbers follow the order in which sets of more than one rank were first seen."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._numbers: dict[bytes, int] = {}
        self._members: list[Ints] = []
        self._table: SetTable | None = None

    def add(self, members: Ints) -> int:
        """The number of a set; ``members`` (n >= 1,) int64, sorted and distinct."""
        if len(members) == 1:
            return int(members[0])
        number = self._numbers.setdefault(members.tobytes(), self._ranks + len(self._members))
        if number == self._ranks + len(self._members):
            self._members.append(members)
            self._table = None
        return number

    def add_runs(self, ranks: Ints, first: Ints) -> Ints:
        """Numbers of the sets ``ranks[first[k]:first[k + 1]]``, (n,); ranks may repeat and are in any order."""
        if len(ranks) == len(first) - 1:
            return ranks.astype(np.int64)
        edges = first.tolist()
        return np.array([self.add(distinct(ranks[a:b])) for a, b in pairwise(edges)], dtype=np.int64)

    def table(self) -> SetTable:
        """All sets so far as columns."""
        if self._table is None:
            sizes = np.array([1] * self._ranks + [len(m) for m in self._members], np.int64)
            member = np.concatenate([np.arange(self._ranks, dtype=np.int64), *self._members])
            self._table = SetTable(ends(sizes), member)
        return self._table


def ends(counts: Ints | Iterable[int]) -> Ints:
    """Offsets (n + 1,) of runs with these lengths."""
    sizes = np.asarray(counts, dtype=np.int64)
    result = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=result[1:])
    return result


def distinct(values: Ints) -> Ints:
    """The distinct values, sorted. (NumPy's own hashes first, which is slower here.)"""
    values = np.sort(values)
    fresh: Bools = np.append(True, values[1:] != values[:-1])[: len(values)]
    return values[fresh]


def stable_order(code: Ints) -> Ints:
    """The stable order of non-negative codes. Sorts values that carry their place, which NumPy does much faster."""
    bits = max(len(code) - 1, 1).bit_length()
    if len(code) and int(code.max()) < 1 << (62 - bits):
        return np.sort((code << bits) | np.arange(len(code))) & ((1 << bits) - 1)
    return np.argsort(code, kind="stable")


def product(table: Ints) -> Ints:
    """The product of each row, column by column: much faster than along short rows."""
    result = np.ones(len(table), np.int64)
    for column in table.T:
        result = result * column
    return result


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """For runs of these lengths, of each element: the run's number, and its place in the run."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - np.repeat(ends(counts)[:-1], counts)
