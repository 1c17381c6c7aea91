"""What the planner is timed on. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from refitd.layout.fronts.engine import engine, vllm
from refitd.layout.fronts.flat import FSDP1_WITHOUT_ORIG_PARAMS
from refitd.layout.fronts.flat_side import flat_side
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts, engine_keys, places, trainer_keys
from refitd.layout.models import catalogue, deepseek
from refitd.layout.presets import PRESETS
from refitd.layout.side import Pattern, Side, SideBuilder, StoragePattern
from refitd.plan import Topology, topology
from refitd.planning.cases import Sides, preset_case

H100 = Hosts(8, 8)
ROW_TO_COLUMN_RANKS = 256
_HIDDEN = 8192


class Case(NamedTuple):
    """Sides to plan between, made anew by each call of ``make``; ``whole``: also time programs and a loss."""

    make: Callable[[], Sides]
    topology: Topology
    whole: bool = False


class Growth(NamedTuple):
    """A DeepSeek-like model on as many trainers as engine ranks."""

    layers: int = 64
    experts: int = 256
    ranks: int = 256

    def sides(self) -> Sides:
        """PP16 EP16 (fewer stages below 256 ranks) to TP32."""
        sizes = deepseek.Sizes(layers=self.layers, experts=self.experts)
        model = deepseek.catalogue("growth", sizes)
        stages = min(16, self.ranks // 16)
        trainer = Parallel(tp=1, pp=stages, ep=16, dp=self.ranks // stages, etp=1)
        source = megatron(model, trainer, H100, Options())
        return source, engine(model, vllm(tp=32), self.ranks // 32, H100)


GROWTH: dict[str, tuple[Growth, ...]] = {
    "tensors": tuple(Growth(layers=layers) for layers in (16, 32, 64, 128, 256)),
    "ranks": tuple(Growth(ranks=ranks) for ranks in (64, 128, 256, 512, 1024, 2048)),
    "experts": tuple(Growth(experts=experts) for experts in (64, 128, 256, 512, 1024)),
}


def find_case(name: str) -> Case:
    """A preset, ``row_to_column``, ``flat_to_engines``, or ``growth:LAYERS:EXPERTS:RANKS``."""
    if name in PRESETS:
        return Case(lambda: preset_case(name)[0], preset_case(name)[1], whole=True)
    if name == "row_to_column":
        return Case(row_to_column, topology("h100-nvl8"))
    if name == "flat_to_engines":
        return Case(flat_to_engines, topology("h100-nvl8"))
    growth = Growth(*(int(number) for number in name.removeprefix("growth:").split(":")))
    return Case(growth.sides, topology("h100-nvl8"))


def row_to_column() -> Sides:
    """One parameter of 8,192 x 8,192 in bfloat16: 256 row shards to 256 column shards."""
    ranks = ROW_TO_COLUMN_RANKS
    source = _one_parameter(places(trainer_keys(ranks), "trainer", H100), 0)
    return source, _one_parameter(places(engine_keys(1, ranks), "engine", H100), 1)


def _one_parameter(ranks: list[tuple[str, str, str]], axis: int) -> Side:
    count, share = len(ranks), _HIDDEN // len(ranks)
    edges = np.arange(count + 1, dtype=np.int64) * share
    boxes = np.zeros((count, 2, 2), np.int64)
    boxes[:, 1] = _HIDDEN
    boxes[:, 0, axis], boxes[:, 1, axis] = edges[:-1], edges[1:]
    number = np.arange(count, dtype=np.int64)
    strides = np.tile(np.array([share if axis else _HIDDEN, 1], np.int64), (count, 1))
    pattern = Pattern((_HIDDEN, _HIDDEN), "bfloat16", count, boxes, number, number, np.zeros(count, np.int64), strides)
    builder = SideBuilder(ranks)
    group = builder.group(range(count))
    stored = builder.storage(["w"], group, StoragePattern("bfloat16", np.full(count, share * _HIDDEN, np.int64)))
    builder.add(["w"], pattern, group, stored)
    return builder.build()


def flat_to_engines() -> Sides:
    """DeepSeek-V3 in flat buffers cut over 256 ranks (nothing is shared), to TP32 DP8 engines."""
    source = flat_side(catalogue("deepseek-v3"), places(trainer_keys(256), "trainer", H100), FSDP1_WITHOUT_ORIG_PARAMS)
    return source, preset_case("deepseek-v3-h100")[0][1]
