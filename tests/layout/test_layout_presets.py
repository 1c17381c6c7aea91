"""Catalogues and presets against the published numbers, and the coverage of every preset's sides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from refitd.errors import InputError, LayoutError
from refitd.layout import Side, check_match, check_side
from refitd.layout.fronts.places import Hosts, places
from refitd.layout.models import catalogue
from refitd.layout.presets import PRESETS, preset
from refitd.layout.side_check import check

# Parameters without buffers; elements of fp32 buffers; tensors in the checkpoint, where it was counted.
TOTALS = {
    ("qwen3-32b", False): (32_762_123_264, 0, 707),
    ("qwen3-235b", False): (235_093_634_560, 0, 36_945),
    ("deepseek-v3", False): (671_026_404_352, 14_848, 45_395),
    ("deepseek-v3", True): (684_489_830_400, 14_848 + 256, None),
    ("kimi-k2", False): (1_026_408_209_408, 23_040, None),
    ("nemotron-ultra", False): (549_308_968_960, 24_576, None),
    ("nemotron-ultra", True): (560_524_578_816, 24_576 + 512, None),
    ("qwen3.8-2.4t", False): (2_419_804_697_984, 0, None),
    ("qwen3.8-2.4t", True): (2_446_182_725_504, 0, None),
    ("kimi-k3", False): (2_779_484_476_000, 0, None),
}
BF16_BYTES = {
    "qwen3-32b": 65.52, "qwen3-235b": 470.19, "deepseek-v3": 1342.05, "nemotron-ultra": 1098.62,
    "qwen3.8-2.4t": 4839.61, "kimi-k3": 5558.97, "kimi-k2": 2052.82,
}  # fmt: skip


@pytest.mark.parametrize(("model", "mtp"), TOTALS)
def test_totals_are_the_published_ones(model: str, mtp: bool) -> None:
    """Parameters, buffers and tensor counts, to the last one."""
    own = catalogue(model, mtp)
    params, buffers, tensors = TOTALS[model, mtp]
    assert (own.params, own.buffer_elements) == (params, buffers)
    assert tensors in (own.tensors, None)
    assert len(own.names) == own.tensors == len(set(own.names.codes.tolist()))
    if not mtp:
        assert round(2 * params / 1e9, 2) == BF16_BYTES[model]


def test_the_router_bias_of_kimi_k3_is_fp32_and_counted_as_a_parameter() -> None:
    """Its checkpoint has 92 x 896 fp32 values, which the published total includes."""
    kind = catalogue("kimi-k3").kind("router_bias")
    assert (kind.count * kind.numel, kind.row.dtype) == (82_432, "float32")


def elements(side: Side) -> dict[int, int]:
    """Tensor -> elements of its unique boxes, counted by brute force over the instances."""
    boxes: dict[int, set[bytes]] = {}
    volume: dict[bytes, int] = {}
    of_pattern = []
    for pattern in side.patterns:
        used = pattern.boxes[np.unique(pattern.box)]
        keys = [box.tobytes() for box in used]
        volume |= {key: math.prod((box[1] - box[0]).tolist()) for key, box in zip(keys, used, strict=True)}
        of_pattern.append(keys)
    for tensor, pattern in side.instances[:, :2].tolist():
        boxes.setdefault(tensor, set()).update(of_pattern[pattern])
    return {tensor: sum(volume[key] for key in keys) for tensor, keys in boxes.items()}


@pytest.mark.parametrize("name", [n for n in PRESETS if not n.endswith("2048")])
@pytest.mark.parametrize("which", [0, 1])
def test_both_sides_hold_every_element_once(name: str, which: int) -> None:
    """Unique boxes of every tensor add up to its volume, and all tensors to the model's total."""
    side, own = preset(name)[which], PRESETS[name].catalogue
    found = elements(side)
    expected = np.repeat([kind.numel for kind in own.kinds], [kind.count for kind in own.kinds])
    assert [found[i] for i in range(own.tensors)] == expected.tolist()
    assert sum(found.values()) == own.params + own.buffer_elements
    check(side, own.names)


SHAPES = {  # source ranks, destination ranks, replicas, nodes and domains of the source
    "qwen3-235b-h100": (128, 128, 16, 16, 16), "deepseek-v3-h100": (256, 256, 8, 32, 32),
    "deepseek-v3-gb200": (256, 256, 8, 64, 4), "nemotron-ultra-v3-gb200": (64, 64, 8, 16, 1),
    "qwen3.8-2.4t-gb200": (1024, 1024, 16, 256, 16), "kimi-k3-gb200": (1024, 1024, 16, 256, 16),
    "qwen3.8-2.4t-gb200-2048": (2048, 2048, 32, 512, 32), "kimi-k3-gb200-2048": (2048, 2048, 32, 512, 32),
    "qwen3-32b-h100": (32, 32, 8, 4, 4), "tiny": (4, 4, 2, 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_nodes_and_domains(name: str) -> None:
    """Numbers of ranks, replicas, nodes and domains; sides share the catalogue's names; no node is on both sides."""
    source, destination = preset(name)
    replicas = {key.split("/")[1] for key in destination.ranks}
    assert (
        len(source.ranks), len(destination.ranks), len(replicas), len(set(source.nodes)), len(set(source.domains)),
    ) == SHAPES[name]  # fmt: skip
    assert source.tensors is destination.tensors
    assert not set(source.nodes) & set(destination.nodes)
    assert len(set(source.ranks) | set(destination.ranks)) == len(source.ranks) + len(destination.ranks)


def test_the_tiny_preset_is_a_match_by_the_flat_rules_too() -> None:
    """Layouts of the tiny preset pass the checks of single ranks, of each side, and between the sides."""
    sides = [{key: side.layout(key) for key in side.ranks} for side in preset("tiny")]
    for side in sides:
        for key, layout in side.items():
            layout.check(key)
        check_side(side)
    check_match(*sides)


def test_engines_hold_as_many_tensors_as_were_counted() -> None:
    """vLLM has 849 tensors of Qwen3-235B on each rank; DeepSeek-V3 has 58 x 2 fused expert tensors."""
    assert len(preset("qwen3-235b-h100")[1].layout("engine/r3/5").storages) == 849
    names = preset("deepseek-v3-h100")[1].layout("engine/r0/31").storages
    assert sum("routed_experts" in name for name in names) == 116


def test_unknown_names_are_refused() -> None:
    """Presets and models that do not exist, roles that a model lacks, hosts that do not fit."""
    with pytest.raises(InputError, match="preset: expected one of qwen3-235b-h100, "):
        preset("qwen")
    with pytest.raises(InputError, match="model: expected one of qwen3-32b, "):
        catalogue("qwen")
    with pytest.raises(InputError, match="role of qwen3-32b: expected one of"):
        catalogue("qwen3-32b").kind("router")
    with pytest.raises(
        InputError, match=r"hosts: expected a node of at least one rank and a domain of whole nodes, got \(4, 6\)"
    ):
        places(["a"], "x", Hosts(4, 6))
    assert issubclass(LayoutError, InputError)
