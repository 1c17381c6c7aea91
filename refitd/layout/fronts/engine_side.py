"""An engine's side, kind by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refitd.errors import InputError, LayoutError
from refitd.layout.fronts import cuts, engine_names, expert_maps
from refitd.layout.fronts.engine_shape import Engine
from refitd.layout.fronts.expert_maps import ExpertMap
from refitd.layout.fronts.placer import Axis, Cut, Placer, cut_of, label, local_shape, scaled, volume, weight_of
from refitd.layout.models import Catalogue, Kind
from refitd.layout.side import Side, SideBuilder, StoragePattern

Ints = NDArray[np.int64]


class _Slots(NamedTuple):
    """Filled slots of an expert map: EP rank, place on it, expert; and the number of slots of each EP rank."""

    ep: Ints
    place: Ints
    expert: Ints
    counts: Ints


class EngineSide:
    """Builds the side of equal replicas."""

    def __init__(self, catalogue: Catalogue, shape: Engine, replicas: int, builder: SideBuilder) -> None:
        self.catalogue, self.shape, self.replicas, self.builder = catalogue, shape, replicas, builder
        self.placer = Placer(builder)
        self.vocab = -(-catalogue.vocab // shape.vocab_multiple) * shape.vocab_multiple
        self.stage_of = shape.stage_of(catalogue.layers)
        self.groups = np.array([builder.group(self._ranks(pp, range(shape.width))) for pp in range(shape.pp)])
        self._places = np.tile(np.arange(shape.width), replicas)
        self._axes: dict[int, Axis] = {}

    def _ranks(self, pp: int, within: Sequence[int]) -> list[int]:
        world = self.shape.world
        return [world * replica + self.shape.rank(pp, i) for replica in range(self.replicas) for i in within]

    def axis(self, parts: int) -> Axis:
        """The axis of a part that is cut over ``parts`` ranks."""
        if parts not in self._axes:
            self._axes[parts] = Axis(parts, self._places % parts)
        return self._axes[parts]

    def side(self, draft: bool) -> Side:
        """The finished side."""
        done: set[str] = set()
        for kind in self.catalogue.kinds:
            if kind.mtp is draft and kind.role not in done:
                kinds = [self.catalogue.kind(role, draft) for role in self._together(kind)]
                done |= {kind.role for kind in kinds}
                self._experts(kinds) if kind.row.experts else self._dense(kinds)
        self.builder.tied |= {} if draft else self.catalogue.tied
        return self.builder.build()

    def _together(self, kind: Kind) -> tuple[str, ...]:
        """The roles that share a storage with this one. Scales are fused as their weights are."""
        suffix = "_scale" if kind.row.scale else ""
        own = kind.role.removesuffix(suffix)
        for fused in engine_names.FUSED:
            roles = tuple(role + suffix for role in fused)
            if own in fused and all((role, kind.mtp) in self.catalogue.by_role for role in roles):
                return roles
        return (kind.role,)

    def _parts(self, role: str) -> int:
        if role in ("embed", "head"):
            return self.shape.vocab
        if role == "eh_proj":  # a plain Linear in both engines
            return 1
        if role.startswith("shared_"):
            return self.shape.shared
        return self.shape.dense if role.removesuffix("_scale") in ("gate", "up", "down") else self.shape.attention

    def _cut(self, kind: Kind, parts: int) -> Cut:
        heads = self.catalogue.heads
        if kind.row.cut != "kv" or heads is None:
            return cut_of(kind, parts, self.vocab)
        if kind.row.scale:
            return scaled(kind, self._cut(weight_of(kind), parts))
        runs = cuts.replicated_heads(label(kind), heads.kv, heads.kv_rows, parts)
        return Cut(("kv", parts), 0, runs, max(1, heads.kv // parts) * heads.kv_rows)

    def _stage(self, kind: Kind) -> Ints:
        last = len(self.groups) - 1
        if kind.mtp or not kind.layers:
            first = kind.role == "embed" and not kind.mtp
            return np.full(max(1, len(kind.layers)), 0 if first else last)
        found: Ints = self.stage_of[np.array(kind.layers)]
        return found

    def _names(self, kinds: list[Kind]) -> list[str]:
        template = engine_names.template(self.shape.flavour, kinds[0], len(kinds) > 1)
        return [template.format(layer) for layer in kinds[0].layers] or [template]

    def _dense(self, kinds: list[Kind]) -> None:
        axis = self.axis(self._parts(kinds[0].role))
        found = [self._cut(kind, axis.parts) for kind in kinds]
        shapes = [local_shape(kind, cut) for kind, cut in zip(kinds, found, strict=True)]
        groups = self.groups[self._stage(kinds[0])]
        numel = sum(map(volume, shapes))
        names, dtype = self._names(kinds), kinds[0].row.dtype
        storage = self.placer.storages(names, groups.tolist(), len(axis.coords), dtype, numel)
        base = 0
        for kind, cut, shape in zip(kinds, found, shapes, strict=True):
            pattern = self.placer.pattern(kind, axis, cut, cuts.dense_strides(shape))
            self.builder.add(kind.ids.ravel(), pattern, groups, storage, base)
            base += volume(shape)

    def _experts(self, kinds: list[Kind]) -> None:
        ordered = kinds[::-1] if self.shape.up_first else kinds
        found = [cut_of(kind, self.shape.expert_tp, self.vocab) for kind in ordered]
        shapes = [self._stored_shape(kind, cut) for kind, cut in zip(ordered, found, strict=True)]
        names, layers = self._names(kinds), np.arange(len(kinds[0].layers))
        maps = self._maps(kinds[0])
        for table, some in maps:
            slots = _slots(table)
            storage = self._expert_storage([names[i] for i in layers[some]], kinds[0], layers[some], slots, shapes)
            for kind, cut, base, strides in zip(ordered, found, *_stacked(shapes, self.shape.transposed), strict=True):
                pattern = self.placer.pattern(kind, self._expert_axis(), cut, strides)
                base_of = np.tile(slots.place * sum(map(volume, shapes)) + base, len(layers[some]))
                groups = self._expert_groups(self._stage(kind)[some], slots.ep)
                ids = kind.ids[layers[some]][:, slots.expert]
                self.builder.add(ids.ravel(), pattern, groups.ravel(), np.repeat(storage, len(slots.ep)), base_of)

    def _stored_shape(self, kind: Kind, cut: Cut) -> tuple[int, ...]:
        """Shape of one expert's share in storage; its inner size may be padded."""
        shape = list(local_shape(kind, cut))
        inner = 1 if kind.row.cut == "columns" else 0
        multiple = self.shape.expert_multiple
        shape[inner] = -(-shape[inner] // multiple) * multiple
        return tuple(shape)

    def _maps(self, kind: Kind) -> list[tuple[ExpertMap, slice]]:
        """Expert maps with the layers (indices of the kind's) that have them."""
        given = self.shape.experts
        if given is None:
            return [([list(range(kind.row.experts))], slice(None))]
        tables = expert_maps.by_layer(given)
        if len(tables) not in (1, len(kind.layers)):
            expected = f"one for all layers, or one for each of {len(kind.layers)}"
            raise LayoutError([InputError("expert maps", expected, str(len(tables)))])
        one = len(tables) == 1
        for i, table in enumerate(tables):
            layer = "every layer" if one else f"layer {kind.layers[i]}"
            expert_maps.check(layer, table, kind.row.experts, self.shape.ep)
        return [(table, slice(None) if one else slice(i, i + 1)) for i, table in enumerate(tables)]

    def _expert_storage(
        self, names: list[str], kind: Kind, layers: Ints, slots: _Slots, shapes: list[tuple[int, ...]]
    ) -> Ints:
        counts = slots.counts if self.shape.experts is not None else np.full(self.shape.ep, slots.counts[0])
        numel = counts[self._places // self.shape.expert_tp] * sum(map(volume, shapes))
        groups = self.groups[self._stage(kind)[layers]]
        return self.builder.storage(names, groups.tolist(), StoragePattern(kind.row.dtype, numel))

    def _expert_axis(self) -> Axis:
        parts = self.shape.expert_tp
        if self.shape.experts is None:
            return self.axis(parts)
        if -1 not in self._axes:
            self._axes[-1] = Axis(parts, np.tile(np.arange(parts), self.replicas))
        return self._axes[-1]

    def _expert_groups(self, stages: Ints, ep: Ints) -> Ints:
        """The group of each (layer, slot)."""
        if self.shape.experts is None:
            return np.repeat(self.groups[stages][:, None], len(ep), axis=1)
        parts = self.shape.expert_tp
        table = [
            [self.builder.group(self._ranks(pp, range(e * parts, (e + 1) * parts))) for e in range(self.shape.ep)]
            for pp in range(self.shape.pp)
        ]
        return np.array(table, dtype=np.int64)[stages][:, ep]


def _slots(table: ExpertMap) -> _Slots:
    counts = np.array([len(row) for row in table], dtype=np.int64)
    expert = np.array([expert for row in table for expert in row], dtype=np.int64)
    ep = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    index = np.arange(len(ep), dtype=np.int64) - (np.cumsum(counts) - counts)[ep]
    return _Slots(ep, index, expert, counts)


def _stacked(shapes: list[tuple[int, ...]], transposed: bool) -> tuple[list[int], list[tuple[int, ...]]]:
    """Base and strides of each of the parts that are stacked by rows in one expert's block [N, K] (or [K, N])."""
    rows = np.cumsum([0, *(shape[0] for shape in shapes)])
    total = int(rows[-1])
    if transposed:
        return rows[:-1].tolist(), [(1, total)] * len(shapes)
    return [int(row) * shapes[0][1] for row in rows[:-1]], [(shape[1], 1) for shape in shapes]
