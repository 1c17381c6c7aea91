"""`Names`: very many names as templates and numbers. Models repeat themselves, so half a million names need no strings.

The first two dot-separated components of a name that are plain numbers are cut out of it: ``layers.3.experts.7.up`` is
number 3 and 7 of the template ``layers.``, ``.experts.``, ``.up``. That form is unique, so names are compared as
integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError
from refitd.layout import codec

Ints = NDArray[np.int64]
Template = tuple[str, ...]  # the literal parts around zero, one or two numbers

_BITS = 24
_MASK = (1 << _BITS) - 1
_TOP = (1 << _BITS) - 2  # the largest number that is cut out; greater ones stay in the text
_DIGITS = len(str(_TOP))
_CACHED = 512  # characters; longer names are no model's, and would stay in memory


class Names(Sequence[str]):
    """An immutable sequence of distinct names. ``templates``: literal parts; ``codes`` (N,): template and numbers.

    Whatever makes one raises InputError where there are more than `MAX_TEMPLATES` templates.
    """

    SHIFT = 2 * _BITS  # where the template's number stands in a code
    MAX_TEMPLATES = 1 << (63 - SHIFT)  # what is left of an int64 above it

    def __init__(self, templates: Sequence[Template], codes: Ints) -> None:
        _require_room(len(templates))
        self.templates, self.codes = tuple(templates), codes
        codes.flags.writeable = False

    @classmethod
    def from_blocks(cls, blocks: Iterable[tuple[str, Sequence[Ints]]]) -> Names:
        """From ``(text with a {} for each number, a column of ints for each)``; the blocks follow each other."""
        ids: dict[Template, int] = {}
        codes = [np.empty(0, dtype=np.int64)]
        for text, numbers in blocks:
            number = ids.setdefault(tuple(text.split("{}")), len(ids))
            _require_room(len(ids))
            codes.append(_code(number, *numbers) if numbers else np.array([_code(number)], dtype=np.int64))
        return cls(tuple(ids), np.concatenate(codes))

    @classmethod
    def from_strings(cls, names: Iterable[str]) -> Names:
        """From names one by one."""
        ids: dict[Template, int] = {}
        codes = []
        for name in names:
            template, numbers = _parse(name)
            codes.append(_code(ids.setdefault(template, len(ids)), *numbers))
        _require_room(len(ids))
        return cls(tuple(ids), np.array(codes, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def from_records(cls, templates: object, codes: Ints) -> Names:
        """From the ``templates`` and ``codes`` of names that came from elsewhere. Raises InputError on garbage."""
        if not isinstance(templates, list) or not all(map(_is_template, templates)):
            raise InputError("names, templates", "lists of one to three strings", repr(templates)[:80])
        codec.require_range("names, template", codes >> cls.SHIFT, len(templates))
        if len(np.unique(codes)) != len(codes):
            raise InputError("names, codes", "each name once", "one twice")
        parts = np.array([len(template) for template in templates], dtype=np.int64)[codes >> cls.SHIFT]
        first, second = (codes >> _BITS) & _MASK, codes & _MASK
        if ((first > 0) != (parts > 1)).any() or ((second > 0) != (parts > 2)).any():
            raise InputError("names, codes", "a number for each gap of a template", "others")
        return cls([tuple(template) for template in templates], codes.copy())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Names: ...
    def __getitem__(self, index: int | slice) -> str | Names:
        if isinstance(index, slice):
            return Names(self.templates, self.codes[index].copy())
        return _text(self.templates, int(self.codes[index]))

    def __iter__(self) -> Iterator[str]:
        templates = self.templates
        return (_text(templates, code) for code in self.codes.tolist())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) >= 0

    def joined(self, other: Names) -> tuple[Names, Ints, Ints]:
        """The names of both, each once and in one order whichever comes first; and where those of each are in it."""
        templates = sorted({*self.templates, *other.templates})
        _require_room(len(templates))
        ids = {template: i for i, template in enumerate(templates)}
        codes = []
        for names in (self, other):
            number = np.array([ids[template] for template in names.templates], dtype=np.int64)
            codes.append((number[names.codes >> self.SHIFT] << self.SHIFT) | (names.codes & ((1 << self.SHIFT) - 1)))
        every = np.unique(np.concatenate(codes))
        return Names(templates, every), *(np.searchsorted(every, own) for own in codes)

    def take(self, indices: Ints) -> list[str]:
        """The names at these indices."""
        templates = self.templates
        return [_text(templates, code) for code in self.codes[indices].tolist()]

    def find(self, name: str) -> int:
        """The index of a name, or -1."""
        template, numbers = _parse(name)
        number = self._template_ids.get(template, -1)
        if number < 0:
            return -1
        return int(self._search(np.array([_code(number, *numbers)], dtype=np.int64))[0])

    def where(self, others: Names) -> Ints:
        """For each of ``others`` (M,), its index here, or -1."""
        if others is self or (others.templates == self.templates and np.array_equal(others.codes, self.codes)):
            return np.arange(len(others), dtype=np.int64)
        ids = np.array([self._template_ids.get(template, -1) for template in others.templates], dtype=np.int64)
        if not len(others) or not len(self):
            return np.full(len(others), -1, dtype=np.int64)
        number = ids[others.codes >> (2 * _BITS)]
        found = self._search((number << (2 * _BITS)) | (others.codes & ((1 << 2 * _BITS) - 1)))
        return np.where(number < 0, -1, found)

    @cached_property
    def _template_ids(self) -> dict[Template, int]:
        return {template: i for i, template in enumerate(self.templates)}

    @cached_property
    def _order(self) -> Ints:
        return np.argsort(self.codes, kind="stable")

    def _search(self, codes: Ints) -> Ints:
        order = self._order
        ordered = self.codes[order]
        at = np.minimum(np.searchsorted(ordered, codes), len(ordered) - 1)
        return np.where(ordered[at] == codes, order[at], -1)


@overload
def _code(template: int, *numbers: Ints) -> Ints: ...
@overload
def _code(template: int, *numbers: int) -> int: ...
def _code(template: int, *numbers: Ints | int) -> Ints | int:
    code: Ints | int = template << (2 * _BITS)
    for place, number in enumerate(numbers):
        code = code + ((number + 1) << (_BITS * (1 - place)))
    return code


def _require_room(templates: int) -> None:
    """A greater number of a template would not fit into a code: numpy would wrap it into another name's."""
    if templates > Names.MAX_TEMPLATES:
        expected = f"at most {Names.MAX_TEMPLATES} names that differ in more than dotted numbers"
        raise InputError("names, templates", expected, f"{templates} or more")


def _is_template(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 3 and all(isinstance(part, str) for part in value)


def template_set(names: Iterable[str]) -> set[Template]:
    """The distinct templates of names: those that `Names` would have."""
    return {_parse(name)[0] for name in names}


def _parse(name: str) -> tuple[Template, tuple[int, ...]]:
    return _known(name) if len(name) <= _CACHED else _cut(name)


def _cut(name: str) -> tuple[Template, tuple[int, ...]]:
    parts: list[str] = []
    numbers: list[int] = []
    literal = at = 0  # where the literal part and the component begin
    for component in name.split("."):
        if _plain(component):
            parts.append(name[literal:at])
            numbers.append(int(component))
            literal = at + len(component)
            if len(numbers) == 2:
                break
        at += len(component) + 1
    return (*parts, name[literal:]), tuple(numbers)


_known = lru_cache(maxsize=1 << 16)(_cut)  # the same names come again with every rank and every plan


def _plain(component: str) -> bool:
    """Whether a component is a number that is cut out. Long runs of digits are text, and never converted."""
    short = len(component) <= _DIGITS and component.isdecimal() and component.isascii()
    return short and (component[0] != "0" or component == "0") and int(component) <= _TOP


def _text(templates: tuple[Template, ...], code: int) -> str:
    parts = templates[code >> (2 * _BITS)]
    if len(parts) == 1:
        return parts[0]
    first = ((code >> _BITS) & ((1 << _BITS) - 1)) - 1
    if len(parts) == 2:
        return f"{parts[0]}{first}{parts[1]}"
    return f"{parts[0]}{first}{parts[1]}{(code & ((1 << _BITS) - 1)) - 1}{parts[2]}"
