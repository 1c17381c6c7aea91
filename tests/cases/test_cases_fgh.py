"""Groups F, G and H of the field cases: quantised weights and dtypes, pipeline stages, draft models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from case_values import filled, layouts_of, small, values_of

from refitd import reshard
from refitd.errors import LayoutError
from refitd.layout import Box, Layout, check_match
from refitd.layout.fronts.engine import engine, vllm
from refitd.layout.fronts.hf import hugging_face
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts, places, trainer_keys
from refitd.layout.models import Catalogue, Row, catalogue
from refitd.layout.models.deepseek import Sizes
from refitd.layout.models.deepseek import catalogue as deepseek
from refitd.layout.models.quant import check_blocks, quantised
from refitd.layout.side_check import check

HOSTS = Hosts(8, 8)


def test_f1_block_scales_are_delivered_as_tensors() -> None:
    """F1: an fp8 [256, 256] with scales [[1,2],[3,4]]: both arrive, cut over two ranks by rows."""
    model = quantised(small(Row("o", "w.weight", (256, 256), "rows")), ["o"])
    name = "model.layers.0.w.weight"
    sources = layouts_of(hugging_face(model, places(trainer_keys(1), "trainer", HOSTS)))
    side = engine(model, vllm(2), 1, HOSTS)
    check_blocks(side)
    engines = layouts_of(side)
    values = values_of(sources.values())
    values[f"{name}_scale_inv"] = np.array([[1, 2], [3, 4]], dtype=np.float32)
    got = reshard(list(sources.values()), list(engines.values()), [filled(s, values) for s in sources.values()])
    assert [shard[f"{name}_scale_inv"].tolist() for shard in got] == [[1, 2], [3, 4]]
    assert {str(shard[name].dtype) for shard in got} == {"torch.float8_e4m3fn"}


def test_f1_a_shard_edge_inside_a_block_of_the_scale_is_refused() -> None:
    """I_t = 192 of Qwen3-235B at TP8 cuts a block: tensor, rank, edge and block are named, twice."""
    model = quantised(small(Row("up", "up.weight", (1536, 256), "rows")), ["up"])
    with pytest.raises(LayoutError) as caught:
        engine(model, vllm(8), 1, HOSTS)
    assert str(caught.value).startswith(
        "tensor model.layers.{}.up.weight on TP rank 1: expected shard edges of dimension 0 at multiples of 128, "
        "the block of its scale, got edge 192 inside block 1 (128 to 256)"
    )
    loose = quantised(small(Row("down", "d.weight", (256, 1536), "columns")), ["down"], block=64)
    with pytest.raises(LayoutError) as found:
        check_blocks(engine(loose, vllm(8), 1, HOSTS), block=128)
    assert [v.field for v in found.value.violations] == ["tensor model.layers.0.d.weight of engine/r0/0"]
    assert found.value.violations[0].got == "edge 192 inside block 1 (128 to 256)"


def test_f1_scales_of_fused_parts_are_rounded_part_by_part() -> None:
    """DeepSeek-V3 at TP8: the scale of fused_qkv_a has 12 + 5 rows, that of an expert's w13 has 2 x 2."""
    roles = ["q_a", "kv_a", "expert_gate", "expert_up", "expert_down"]
    layout = engine(quantised(catalogue("deepseek-v3"), roles), vllm(8), 1, HOSTS).layout("engine/r0/5")
    prefix = "model.layers.5."
    assert layout.storages[f"{prefix}self_attn.fused_qkv_a_proj.weight_scale_inv"] == (17 * 56, "float32")
    experts = f"{prefix}mlp.experts.routed_experts."
    assert layout.storages[f"{experts}w13_weight_scale_inv"] == (256 * 4 * 56, "float32")
    assert layout.storages[f"{experts}w2_weight_scale_inv"] == (256 * 56 * 2, "float32")


def test_f3_the_router_s_bias_stays_fp32() -> None:
    """F3: 238 distinct fp32 values arrive bit-equal in every rank's router bias, which both sides have as fp32."""
    model = small(Row("router_bias", "mlp.gate.e_score_correction_bias", (238,), dtype="float32", buffer=True))
    sources = layouts_of(megatron(model, Parallel(tp=2), HOSTS))
    engines = layouts_of(engine(model, vllm(2), 2, HOSTS))
    bias = np.linspace(6.817, 7.063, 238, dtype=np.float32)
    assert len(set(bias.tolist())) == 238
    shards = [filled(s, {"model.layers.0.mlp.gate.e_score_correction_bias": bias}) for s in sources.values()]
    for shard in reshard(list(sources.values()), list(engines.values()), shards):
        assert shard["model.layers.0.mlp.gate.e_score_correction_bias"].numpy().tobytes() == bias.tobytes()
    real = catalogue("deepseek-v3").kind("router_bias").row
    assert (real.dtype, real.buffer) == ("float32", True)


def stage_model(layers: int) -> Catalogue:
    up = Row("up", "up.weight", (4, 3), "rows", "int32")
    return small(up, Row("norm1", "norm.weight", (5,), dtype="int32"), layers=layers)


def test_g2_pipelines_of_different_depth() -> None:
    """G2: PP4 x TP2 to two engines of PP2 x TP2: each engine rank gets its bytes once, from the right stages."""
    model = stage_model(8)
    sources = layouts_of(megatron(model, Parallel(tp=2, pp=4), HOSTS))
    engines = layouts_of(engine(model, vllm(2, pp=2), 2, HOSTS))
    held = [sorted({int(name.split(".")[2]) for name in layout.tensors}) for layout in engines.values()]
    assert held == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert [sorted({int(n.split(".")[2]) for n in sources[f"trainer/run/{r}"].tensors}) for r in (0, 2, 4, 6)] == [
        [0, 1], [2, 3], [4, 5], [6, 7],
    ]  # fmt: skip
    values = values_of(sources.values())
    got = reshard(list(sources.values()), list(engines.values()), [filled(s, values) for s in sources.values()])
    for layout, shard in zip(engines.values(), got, strict=True):
        expected = filled(layout, values)
        assert {name: array.tolist() for name, array in expected.items()} == {n: t.tolist() for n, t in shard.items()}
        assert sum(p.box.volume for p in layout.pieces()) == sum(numel for numel, _ in layout.storages.values()) == 44


def test_virtual_and_uneven_stages() -> None:
    """VPP 2 on PP 2 with stages of 3, 1, 2, 2 layers: rank groups hold chunks 0 and 2, 1 and 3."""
    model = stage_model(8)
    side = layouts_of(megatron(model, Parallel(pp=2, vpp=2, stage_layers=(3, 1, 2, 2)), HOSTS))
    first, second = side.values()
    assert sorted(int(name.split(".")[2]) for name in first.tensors if "norm" in name) == [0, 1, 2, 4, 5]
    assert sorted(int(name.split(".")[2]) for name in second.tensors if "norm" in name) == [3, 6, 7]
    where = {piece.tensor: piece.storage for piece in first.pieces()}
    assert where["model.layers.5.norm.weight"].startswith("model1.decoder.layers.1.")
    assert where["model.layers.2.up.weight"] == "model0.decoder.layers.2.mlp.linear_fc1.weight"


TWO = deepseek("two", Sizes(layers=2, dense=1, hidden=8, heads=2, q_lora=4, kv_lora=4, nope=2, rope=2, v_dim=2,
                            dense_inner=4, experts=2, inner=4, vocab=64), mtp=True)  # fmt: skip


def test_h3_the_mtp_layer_goes_to_the_draft_and_to_nobody_else() -> None:
    """H3: PP2; model.layers.2.* is in the draft only; the embedding on both stages is one tensor with two owners."""
    side = megatron(TWO, Parallel(pp=2, etp=1), HOSTS, Options(vocab_multiple=0))
    check(side, TWO.names)
    sources = layouts_of(side)
    first, last = sources.values()
    own = {piece.tensor: piece.storage for piece in last.pieces()}
    for hf, name in {
        "enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight",
        "shared_head.norm.weight": "final_layernorm.weight",
        "self_attn.o_proj.weight": "mtp_model_layer.self_attention.linear_proj.weight",
    }.items():  # fmt: skip
        assert own[f"model.layers.2.{hf}"] == f"mtp.layers.0.{name}"
        assert f"model.layers.2.{hf}" not in first.tensors
    embed = "model.embed_tokens.weight"
    owners = [[p.box for p in layout.pieces() if p.tensor == embed] for layout in (first, last)]
    assert owners == [[Box((0, 0), (64, 8))]] * 2
    target, draft = (layouts_of(engine(TWO, vllm(2), 1, HOSTS, part=part)) for part in ("target", "draft"))
    layers = [
        {int(n.split(".")[2]) for n in part["engine/r0/0"].tensors if ".layers." in n} for part in (target, draft)
    ]
    assert layers == [{0, 1}, {2}]
    assert "model.layers.2.mtp_block.self_attn.o_proj.weight" in draft["engine/r0/0"].storages
    check_match(sources, target)
    check_match(sources, draft)


def test_h1_the_draft_is_updated_unless_it_is_frozen() -> None:
    """H1: the draft's bytes are the trainer's, embedding and head included; frozen (keep), nothing is written."""
    sources = layouts_of(megatron(TWO, Parallel(pp=2, etp=1), HOSTS, Options(vocab_multiple=0)))
    values = values_of(sources.values())
    shards = [filled(layout, values) for layout in sources.values()]
    (draft,) = layouts_of(engine(TWO, vllm(1), 1, HOSTS, part="draft")).values()
    (got,) = reshard(list(sources.values()), [draft], shards)
    values["model.layers.2.embed_tokens.weight"] = values["model.embed_tokens.weight"]
    values["model.layers.2.shared_head.head.weight"] = values["lm_head.weight"]
    for name, array in filled(draft, values, padding=0).items():
        assert got[name].view(torch.uint8).numpy().tobytes() == array.tobytes()
    frozen = Layout.from_pieces(draft.tensors, draft.storages, draft.pieces(), keep=["*"], tied=draft.tied)
    (same,) = reshard(list(sources.values()), [frozen], shards)
    assert all(not bool(tensor.float().any()) for tensor in same.values())
