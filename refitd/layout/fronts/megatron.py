"""Megatron-Core as a side: tensor, pipeline, context, expert and data parallelism, fused and padded parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.layout.fronts import cuts, megatron_names
from refitd.layout.fronts.megatron_ranks import Parallel, stages
from refitd.layout.fronts.placer import Axis, Cut, Placer, cut_of, local_shape, volume
from refitd.layout.fronts.places import Hosts, places, trainer_keys
from refitd.layout.models import Catalogue, Kind
from refitd.layout.side import Side, SideBuilder

__all__ = ["Options", "Parallel", "megatron"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Options:
    """``vocab_multiple``: the vocabulary is padded to a multiple of this times TP (Megatron-LM: 128; Megatron-Bridge
    does not pad: 0). ``glu_interleave``: block size of ``moe_mlp_glu_interleave_size``, 0 for halves. ``sequential``:
    experts are SequentialMLP modules.
    """

    vocab_multiple: int = 128
    glu_interleave: int = 0
    sequential: bool = False


def megatron(
    catalogue: Catalogue,
    parallel: Parallel,
    hosts: Hosts,
    options: Options | None = None,
    run: str = "run",
    name: str = "trainer",
) -> Side:
    """The side of a Megatron trainer. With an MTP catalogue the last stage also holds the MTP layer and the embedding.

    Raises LayoutError when the parallel sizes do not fit the model.
    """
    parallel.check(catalogue.experts)
    return _Megatron(
        catalogue, parallel, options or Options(), places(trainer_keys(parallel.world, run), name, hosts)
    ).side()


class _Megatron:
    def __init__(
        self, catalogue: Catalogue, parallel: Parallel, options: Options, ranks: list[tuple[str, str, str]]
    ) -> None:
        self.catalogue, self.parallel, self.options = catalogue, parallel, options
        self.stages = stages(parallel, catalogue.layers)
        self.builder = SideBuilder(ranks, catalogue.names)
        self.placer = Placer(self.builder)
        p = parallel
        self.groups = np.array([self.builder.group(p.stage_ranks(pp)) for pp in range(p.pp)])
        self.axis = Axis(p.tp, np.arange(p.stage) % p.tp)
        self.expert_axis = Axis(p.expert_tp, np.arange(p.edp * p.expert_tp) % p.expert_tp)
        multiple = options.vocab_multiple * p.tp
        self.vocab = -(-catalogue.vocab // multiple) * multiple if multiple else catalogue.vocab
        self.expert_groups = np.empty((0, 0), dtype=np.int64)
        if catalogue.experts:
            rows = [[self.builder.group(p.expert_ranks(ep, pp)) for ep in range(p.ep)] for pp in range(p.pp)]
            self.expert_groups = np.array(rows, dtype=np.int64)

    def side(self) -> Side:
        """The finished side."""
        done: set[tuple[str, bool]] = set()
        for kind in self.catalogue.kinds:
            if (kind.role, kind.mtp) not in done:
                done |= self._place(kind)
        self.builder.tied |= self.catalogue.tied
        self._shared_ends()
        return self.builder.build()

    def _place(self, kind: Kind) -> set[tuple[str, bool]]:
        """Place a kind with those that share its storage; the roles that are done."""
        if kind.mtp and kind.role in ("embed", "head"):
            name, own = (self.catalogue.names[int(k.first)] for k in (kind, self.catalogue.kind(kind.role)))
            self.builder.tied[name] = own
            return {(kind.role, True)}
        roles = self._together(kind)
        kinds = [self.catalogue.kind(role, kind.mtp) for role in roles]
        if kind.row.experts:
            self._experts(kinds)
        else:
            self._dense(kinds)
        return {(role, kind.mtp) for role in roles}

    def _together(self, kind: Kind) -> tuple[str, ...]:
        if self.catalogue.heads and kind.role in ("q", "k", "v"):
            return ("q", "k", "v")
        for pair in megatron_names.FUSED:
            if kind.role in pair and all((role, kind.mtp) in self.catalogue.by_role for role in pair):
                return pair
        return (kind.role,)

    def _cuts(self, kinds: list[Kind], parts: int) -> list[Cut]:
        """Cuts of the kinds of one storage, with ``at`` counted from its first row."""
        heads = self.catalogue.heads
        if heads and kinds[0].role == "q":
            runs = cuts.interleaved(f"tensor {kinds[0].prefix}{kinds[0].row.name}", heads, parts)
            # A rank's share of the slab is even. Its rows of q, k or v need not be where it has a part of a group, so q
            # is given what is left: only the sum is used.
            rows = [kind.row.shape[0] // parts for kind in kinds[1:]]
            rows.insert(0, sum(kind.row.shape[0] for kind in kinds) // parts - sum(rows))
            return [Cut(("qkv", k.role, parts), 0, runs[k.role], n) for k, n in zip(kinds, rows, strict=True)]
        if self.options.glu_interleave and len(kinds) == 2 and kinds[0].row.experts:
            block, size = self.options.glu_interleave, kinds[0].row.shape[0]
            both = cuts.glu_blocks(f"tensor {kinds[0].prefix}{kinds[0].row.name}", size, parts, block)
            return [Cut(("glu", i, block, parts), 0, runs, size // parts) for i, runs in enumerate(both)]
        return [cut_of(kind, parts, self.vocab) for kind in kinds]

    def _bases(self, kinds: list[Kind], found: list[Cut]) -> tuple[list[int], int]:
        """Where each kind begins in its storage, and the storage's elements."""
        sizes = [volume(local_shape(kind, cut)) for kind, cut in zip(kinds, found, strict=True)]
        mixed = isinstance(found[0].key, tuple) and found[0].key[0] in ("qkv", "glu")
        return ([0] * len(kinds) if mixed else np.cumsum([0, *sizes[:-1]]).tolist()), sum(sizes)

    def _stages(self, kind: Kind) -> tuple[Ints, list[int]]:
        """Model-wide stage and local number of each layer of a kind."""
        last = self.stages.count - 1
        if kind.mtp:
            return np.full(max(1, len(kind.layers)), last), list(range(len(kind.layers))) or [0]
        if not kind.layers:
            return np.array([0 if kind.role == "embed" else last]), []
        layers = np.array(kind.layers)
        return self.stages.stage[layers], self.stages.local[layers].tolist()

    def _names(self, kind: Kind, stage: Ints, local: list[int]) -> list[str]:
        chunk = stage // self.parallel.pp
        prefixes = [f"model{v}." if self.parallel.vpp > 1 else "" for v in chunk.tolist()]
        return megatron_names.names(self.catalogue, kind, local, prefixes)

    def _dense(self, kinds: list[Kind]) -> None:
        stage, local = self._stages(kinds[0])
        groups = self.groups[stage % self.parallel.pp]
        names = self._names(kinds[0], stage, local)
        found = self._cuts(kinds, self.axis.parts)
        bases, numel = self._bases(kinds, found)
        dtype, slots = kinds[0].row.dtype, len(self.axis.coords)
        storage = self.placer.storages(names, groups.tolist(), slots, dtype, numel)
        for kind, cut, base in zip(kinds, found, bases, strict=True):
            strides = cuts.dense_strides(local_shape(kind, cut))
            self.builder.add(
                kind.ids.ravel(), self.placer.pattern(kind, self.axis, cut, strides), groups, storage, base
            )

    def _experts(self, kinds: list[Kind]) -> None:
        share = kinds[0].row.experts // self.parallel.ep
        stage, local = self._stages(kinds[0])
        pp = stage % self.parallel.pp
        found = self._cuts(kinds, self.expert_axis.parts)
        bases, numel = self._bases(kinds, found)
        expert = np.arange(kinds[0].row.experts)
        groups = self.expert_groups[pp][:, expert // share]
        layers = self._names(kinds[0], stage, local)
        names = [megatron_names.expert(n, i, self.options.sequential) for n in layers for i in range(share)]
        owners = np.repeat(self.groups[pp], share).tolist()
        table = self.placer.storages(names, owners, self.parallel.stage, kinds[0].row.dtype, numel)
        storage = table.reshape(len(layers), share)[:, expert % share].ravel()
        for kind, cut, base in zip(kinds, found, bases, strict=True):
            strides = cuts.dense_strides(local_shape(kind, cut))
            pattern = self.placer.pattern(kind, self.expert_axis, cut, strides)
            self.builder.add(kind.ids.ravel(), pattern, groups.ravel(), storage, base)

    def _shared_ends(self) -> None:
        """Copies of the embedding on the last stage: for an MTP layer, and for a head that is tied to it."""
        embed = self.catalogue.by_role.get(("embed", False))
        if self.parallel.pp == 1 or embed is None:
            return
        if any(kind.mtp for kind in self.catalogue.kinds):
            self._copy(embed, "embedding.word_embeddings.weight")
        if self.catalogue.names[embed.first] in self.catalogue.tied.values():
            self._copy(embed, "output_layer.weight")

    def _copy(self, embed: Kind, name: str) -> None:
        cut = cut_of(embed, self.axis.parts, self.vocab)
        shape = local_shape(embed, cut)
        prefix = f"model{self.parallel.vpp - 1}." if self.parallel.vpp > 1 else ""
        group = int(self.groups[-1])
        storage = self.placer.storages([prefix + name], [group], len(self.axis.coords), embed.row.dtype, volume(shape))
        pattern = self.placer.pattern(embed, self.axis, cut, cuts.dense_strides(shape))
        self.builder.add(embed.ids.ravel(), pattern, group, storage)
