"""`Layout`: one rank's geometry, as columns of patterns and instances."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from refitd.errors import InputError, LayoutError
from refitd.layout import build, check, document
from refitd.layout.box import Box, Ints, Piece

if TYPE_CHECKING:
    import torch

Fact = tuple[tuple[int, ...], str]  # global shape, dtype
Storage = tuple[int, str]  # number of elements, dtype


class Columns(NamedTuple):
    """Pieces as columns: tensor, storage, base (N,), lo, hi, strides (N, D); absent dims have lo 0, hi 1, stride 0."""

    tensor: Ints
    storage: Ints
    base: Ints
    lo: Ints
    hi: Ints
    strides: Ints


class Layout:
    """What one rank holds: pieces of logical tensors in storages. Immutable; geometry only, no memory.

    ``tensors``: name -> (global shape, dtype); ``storages``: name -> (elements, dtype); ``keep``: fnmatch patterns of
    storages that the trainer does not own; ``tied``: alias -> canonical tensor name. ``patterns`` (P, 3, D) has lo, hi
    and strides, ``pattern_fact`` (P,) the index of its (shape, dtype) in ``facts``, ``instances`` (N, 4) tensor,
    storage, base offset, pattern. Names are numbered in sorted order and pieces sorted: equal geometry, equal bytes.
    """

    def __init__(self, parts: build.Parts) -> None:
        self.tensors: Mapping[str, Fact] = MappingProxyType(dict(parts.tensors))
        self.storages: Mapping[str, Storage] = MappingProxyType(dict(parts.storages))
        self.keep = parts.keep
        self.tied: Mapping[str, str] = MappingProxyType(dict(parts.tied))
        self.facts, self.pattern_fact, self.patterns = parts.facts, parts.pattern_fact, parts.patterns
        self.instances = parts.instances
        for array in (self.pattern_fact, self.patterns, self.instances):
            array.flags.writeable = False

    @classmethod
    def from_pieces(
        cls,
        tensors: Mapping[str, tuple[Iterable[int], str]],
        storages: Mapping[str, Storage],
        pieces: Iterable[Piece],
        keep: Iterable[str] = (),
        tied: Mapping[str, str] | None = None,
    ) -> Layout:
        """Build from plain records. Empty boxes hold nothing and are left out; pieces of an alias go to its canonical
        name. Raises LayoutError with every record that cannot be represented; `check` judges the geometry.
        """
        return cls(build.from_records(tensors, storages, pieces, tuple(keep), dict(tied or {})))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], keep: Iterable[str] = ()) -> Layout:
        """From plain tensors and DTensors, one storage each, which starts at the (local) tensor's first element.

        Two names over the very same view are tied to the first. Raises LayoutError naming every tensor that cannot be
        laid out: `Partial` placements, unknown dtypes, tensors that are not strided.
        """
        from refitd.layout import torch_front

        return cls.from_pieces(*torch_front.records(tensors, keep))

    @classmethod
    def from_module(cls, module: torch.nn.Module, keep: Iterable[str] = ()) -> Layout:
        """From a module's parameters and persistent buffers (its state dict, without copies)."""
        from refitd.layout import torch_front

        return cls.from_tensors(torch_front.state_tensors(module), keep)

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Names by tensor index."""
        return tuple(self.tensors)

    @cached_property
    def storage_names(self) -> tuple[str, ...]:
        """Names by storage index."""
        return tuple(self.storages)

    @cached_property
    def columns(self) -> Columns:
        """All pieces as columns, in the order of `instances`."""
        tensor, storage, base, pattern = self.instances.T
        return Columns(tensor, storage, base, *np.moveaxis(self.patterns[pattern], 1, 0))

    @cached_property
    def kept(self) -> frozenset[str]:
        """Storages that match a ``keep`` pattern."""
        return build.matching(self.storages, self.keep)

    def canonical(self, tensor: str) -> str:
        """The name under which this rank plans ``tensor``."""
        return self.tied.get(tensor, tensor)

    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, sorted by tensor and box."""
        return self._pieces

    @cached_property
    def _pieces(self) -> tuple[Piece, ...]:
        names, storages = self.tensor_names, self.storage_names
        result = []
        for (t, s, base, p), (lo, hi, strides) in zip(
            self.instances.tolist(), self.patterns[self.instances[:, 3]].tolist(), strict=True
        ):
            dims = len(self.facts[int(self.pattern_fact[p])][0])
            box = Box(tuple(lo[:dims]), tuple(hi[:dims]))
            result.append(Piece(names[t], box, storages[s], base, tuple(strides[:dims])))
        return tuple(result)

    def check(self, rank: str = "") -> None:
        """Raise one LayoutError with every violation inside this rank; ``rank``: its key, to be named in each."""
        violations = check.violations(self)
        if violations:
            where = f" of {rank}" if rank else ""
            raise LayoutError([InputError(f"{v.field}{where}", v.expected, v.got) for v in violations])

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the whole geometry."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """Compact bytes; `from_bytes` reads them."""
        return build.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Read `to_bytes`. Raises LayoutError on garbage; sizes are never trusted."""
        try:
            return cls(build.from_bytes(data))
        except LayoutError:
            raise
        except InputError as error:
            raise LayoutError([error]) from None

    def to_json(self) -> dict[str, Any]:
        """The layout file's document (docs/layout.md)."""
        return document.to_json(self)

    @classmethod
    def from_json(cls, value: object) -> Layout:
        """From a layout file's document. Raises LayoutError naming each field that is wrong."""
        return cls.from_pieces(*document.records(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({len(self.tensors)} tensors, {len(self.storages)} storages, {len(self.instances)} pieces)"
