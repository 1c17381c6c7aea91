"""Front ends against the documented names and shapes of each framework."""

from __future__ import annotations

import numpy as np
import pytest

from refitd.errors import InputError, LayoutError
from refitd.layout import Box, Layout, Side
from refitd.layout.fronts.engine import Engine, engine, sglang, vllm
from refitd.layout.fronts.expert_maps import linear
from refitd.layout.fronts.hf import AUTOMODEL, FUSED, hugging_face, unfuse
from refitd.layout.fronts.megatron import Options, Parallel, megatron
from refitd.layout.fronts.places import Hosts, places, trainer_keys
from refitd.layout.models import catalogue
from refitd.layout.tp import dense

HOSTS = Hosts(8, 8)
BF16 = "bfloat16"


def sizes(side: Side, key: str, *names: str) -> list[int]:
    """Elements of these storages on a rank."""
    stored = side.layout(key).storages
    return [stored[name][0] for name in names]


def test_megatron_names_and_sizes_of_qwen3_moe() -> None:
    """TP4 PP8 EP16 on the second stage: fused qkv [9216/4, 4096], experts [3072, 4096] for eight local ones."""
    sizes_ = Parallel(tp=4, pp=8, ep=16, dp=4, etp=1, stage_layers=(11, *(12,) * 6, 11))
    side = megatron(catalogue("qwen3-235b"), sizes_, HOSTS)
    layer = "decoder.layers.11."
    attention, mlp = f"{layer}self_attention.", f"{layer}mlp."
    assert sizes(
        side, "trainer/run/16", f"{attention}linear_qkv.weight", f"{attention}linear_qkv.layer_norm_weight",
        f"{attention}linear_proj.weight", f"{attention}q_layernorm.weight", f"{layer}pre_mlp_layernorm.weight",
        f"{mlp}router.weight", f"{mlp}experts.linear_fc1.weight7", f"{mlp}experts.linear_fc2.weight7",
    ) == [2304 * 4096, 4096, 4096 * 2048, 128, 4096, 128 * 4096, 3072 * 4096, 4096 * 1536]  # fmt: skip
    layout = side.layout("trainer/run/21")  # stage 1, EP rank 5: experts 40 to 47
    (fc2,) = [p for p in layout.pieces() if p.storage == f"{mlp}experts.linear_fc2.weight2"]
    assert fc2.tensor == "model.layers.22.mlp.experts.42.down_proj.weight"
    assert f"{mlp}experts.linear_fc1.weight8" not in layout.storages
    first, last = side.layout("trainer/run/0").storages, side.layout("trainer/run/127").storages
    assert first["embedding.word_embeddings.weight"] == last["output_layer.weight"] == (152064 // 4 * 4096, BF16)
    assert "decoder.final_layernorm.weight" in last
    assert "output_layer.weight" not in first


def test_megatron_names_and_sizes_of_deepseek() -> None:
    """TP2: A projections whole on each rank, B ones cut by heads; dense and MoE layers name norms apart."""
    side = megatron(catalogue("deepseek-v3"), Parallel(tp=2, ep=2, etp=1), HOSTS)
    a = "decoder.layers.3.self_attention."
    assert sizes(
        side, "trainer/run/1", f"{a}linear_q_down_proj.weight", f"{a}linear_kv_down_proj.weight",
        f"{a}linear_q_up_proj.weight", f"{a}linear_q_up_proj.layer_norm_weight", f"{a}linear_kv_up_proj.weight",
        "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.3.pre_mlp_layernorm.weight", "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.linear_fc1.weight127",
    ) == [1536 * 7168, 576 * 7168, 12288 * 1536, 1536, 16384 * 512, 18432 * 7168, 7168, 7168, 2048 * 7168,
          4096 * 7168]  # fmt: skip
    assert side.layout("trainer/run/0").storages["decoder.layers.3.mlp.router.expert_bias"] == (256, "float32")


@pytest.mark.parametrize(
    ("tp", "rows"), [(1, 9216), (4, 2304), (8, 1280), (16, 768), (32, 512)]
)  # fmt: skip
def test_vllm_qkv_rows_of_qwen3(tp: int, rows: int) -> None:
    """(64/t + 2 max(1, 4/t)) heads of 128 rows; the last rank has the last kv head."""
    layout = engine(catalogue("qwen3-235b"), vllm(tp), 1, HOSTS).layout(f"engine/r0/{tp - 1}")
    assert layout.storages["model.layers.7.self_attn.qkv_proj.weight"] == (rows * 4096, BF16)
    (k,) = [p for p in layout.pieces() if p.tensor == "model.layers.7.self_attn.k_proj.weight"]
    assert k.box.hi[0] == 512


def test_vllm_under_ep_has_whole_experts_and_sharded_attention() -> None:
    """DP 2 x TP 4 with EP 8: 16 experts [3072, 4096] a rank in the map's order; attention at TP4 on both DP halves."""
    side = engine(catalogue("qwen3-235b"), vllm(4, dp=2, experts=linear(128, 8)), 1, HOSTS)
    experts = "model.layers.0.mlp.experts.routed_experts."
    found = sizes(side, "engine/r0/6", f"{experts}w13_weight", f"{experts}w2_weight", "model.layers.0.mlp.gate.weight")
    assert found == [16 * 3072 * 4096, 16 * 4096 * 1536, 128 * 4096]
    layout = side.layout("engine/r0/6")
    at = {p.tensor: p.offset for p in layout.pieces() if p.storage == f"{experts}w13_weight"}
    assert at["model.layers.0.mlp.experts.96.gate_proj.weight"] == 0
    assert at["model.layers.0.mlp.experts.97.up_proj.weight"] == 3072 * 4096 + 1536 * 4096
    assert sizes(side, "engine/r0/2", "model.layers.0.self_attn.o_proj.weight") == [4096 * 2048]


def test_vllm_numbers_dp_before_pp() -> None:
    """DP 2, PP 2, TP 2: rank 2 is stage 1 of DP 0, rank 4 stage 0 of DP 1."""
    side = engine(catalogue("tiny"), vllm(2, dp=2, pp=2), 1, HOSTS)
    stages = [min(int(n.split(".")[2]) for n in side.layout(k).tensors if "model.layers" in n) // 2 for k in side.ranks]
    assert stages == [0, 0, 1, 1, 0, 0, 1, 1]


def test_sglang_with_dp_attention() -> None:
    """TP 8, DP 4, EP 2: attention over 2 ranks, embedding over 8, experts 64 a rank cut over 4, older expert names."""
    side = engine(catalogue("deepseek-v3"), sglang(8, dp=4, ep=2, experts=linear(256, 2)), 1, HOSTS)
    layer = "model.layers.3."
    assert sizes(
        side, "engine/r0/5", f"{layer}self_attn.q_b_proj.weight", "model.embed_tokens.weight",
        f"{layer}mlp.experts.w13_weight", f"{layer}mlp.experts.w2_weight",
        f"{layer}self_attn.fused_qkv_a_proj_with_mqa.weight",
    ) == [24576 // 2 * 1536, 129280 // 8 * 7168, 128 * 1024 * 7168, 128 * 7168 * 512, 2112 * 7168]  # fmt: skip
    held = [p for p in side.layout("engine/r0/5").pieces() if p.storage == f"{layer}mlp.experts.w2_weight"]
    assert {p.tensor for p in held} == {f"{layer}mlp.experts.{e}.down_proj.weight" for e in range(128, 256)}
    assert {p.box for p in held} == {Box((0, 512), (7168, 1024))}
    with pytest.raises(LayoutError, match="DP and EP that divide TP 8, got DP 3, EP 1"):
        sglang(8, dp=3)


def test_engine_sizes_that_do_not_fit_name_the_tensor() -> None:
    """TP 3 cannot cut 64 kv heads' rows; kv heads must divide the ranks; stages must add up."""
    with pytest.raises(
        LayoutError, match=r"tensor model.layers.{}.self_attn.q_proj.weight: expected a size that 3 ranks"
    ):
        engine(catalogue("qwen3-32b"), Engine(3, 3, 1, 3, 3, 3), 1, HOSTS)
    with pytest.raises(LayoutError, match="stage_layers: expected 3 stages with 64 layers in all"):
        engine(catalogue("qwen3-32b"), vllm(1, pp=3), 1, HOSTS)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            Engine(4, 3, 4, 4, 4, 4),
            "engine sizes: attention: expected a number of ranks that divides the stage's 4, got 3",
        ),
        (Engine(0, 1, 1, 1, 1, 1), "engine sizes: width: expected at least 1, got 0"),
        (Engine(1, 1, 1, 1, 1, 1, flavour="trt"), "engine flavour: expected vllm or sglang, got trt"),
    ],
)
def test_engine_sizes_that_contradict_each_other_are_refused(shape: Engine, message: str) -> None:
    """Parts that do not divide a stage, sizes below one, frameworks that are not known."""
    with pytest.raises(LayoutError) as caught:
        engine(catalogue("tiny"), shape, 1, HOSTS)
    assert str(caught.value) == message


def test_a_draft_needs_a_catalogue_with_mtp() -> None:
    """The MTP part of a model that was listed without it is refused, and so is an unknown part."""
    with pytest.raises(InputError, match="part: expected target, as tiny was listed without multi-token prediction"):
        engine(catalogue("tiny"), vllm(1), 1, HOSTS, part="draft")
    with pytest.raises(InputError, match="part: expected target or draft, got both"):
        engine(catalogue("tiny"), vllm(1), 1, HOSTS, part="both")
    assert len(engine(catalogue("tiny", mtp=True), vllm(2), 1, HOSTS, part="draft").tensors)


RANK = places(trainer_keys(1), "trainer", HOSTS)


def test_hugging_face_forms_of_experts() -> None:
    """Fused: gate then up in [E, 2I, H]; Automodel: transposed [E, H, 2I]; offsets as NumPy's own slices have them."""
    tiny = catalogue("tiny")  # E 8, I 32, H 64
    for form, shape, cut in ((FUSED, (8, 64, 64), 0), (AUTOMODEL, (8, 64, 64), 1)):
        layout = hugging_face(tiny, RANK, form).layout("trainer/run/0")
        layout.check()
        name = f"model.layers.2.mlp.experts.{form.gate_up}"
        assert layout.storages[name] == (8 * 64 * 64, BF16)
        flat = np.arange(8 * 64 * 64).reshape(shape)
        for part, rows in (("gate", slice(0, 32)), ("up", slice(32, 64))):
            (piece,) = [p for p in layout.pieces() if p.tensor == f"model.layers.2.mlp.experts.5.{part}_proj.weight"]
            expected = flat[5, rows] if cut == 0 else flat[5, :, rows].T
            steps = np.add.outer(np.arange(32) * piece.strides[0], np.arange(64) * piece.strides[1]) + piece.offset
            assert (piece.storage, steps.tolist()) == (name, expected.tolist())
    plain = hugging_face(tiny, RANK).layout("trainer/run/0")
    plain.check()
    assert set(plain.storages) == set(tiny.names)


@pytest.mark.parametrize("form", [FUSED, AUTOMODEL])
def test_unfused_layouts_equal_the_front_end_s(form: object) -> None:
    """A layout read off fused tensors, told in experts, equals the front end's; a cut of it holds the right boxes."""
    tiny = catalogue("tiny")
    expected = hugging_face(tiny, RANK, form).layout("trainer/run/0")
    pieces, facts = [], {}
    for name, (_, dtype) in expected.storages.items():
        shape = expected.tensors.get(name, (None,))[0]
        if shape is None:
            down = (8, 64, 32) if form is FUSED else (8, 32, 64)
            shape = (8, 64, 64) if "gate" in name else down
        facts[name] = (shape, dtype)
        pieces.append(dense(name, Box((0,) * len(shape), shape), name))
    assert unfuse(Layout.from_pieces(facts, expected.storages, pieces), form) == expected


def test_a_cut_of_a_fused_tensor_goes_to_gate_and_up() -> None:
    """Experts 1 and 2, rows 1 to 6 of [gate 4; up 4]: three rows of gate, two of up, for each."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    box = Box((1, 1, 0), (3, 6, 2))
    fused = Layout.from_pieces({name: ((4, 8, 2), "int8")}, {"s": (20, "int8")}, [dense(name, box, "s")])
    found = [(p.tensor.split("experts.")[1], p.box.lo, p.box.hi, p.offset) for p in unfuse(fused, FUSED).pieces()]
    assert found == [
        ("1.gate_proj.weight", (1, 0), (4, 2), 0), ("1.up_proj.weight", (0, 0), (2, 2), 6),
        ("2.gate_proj.weight", (1, 0), (4, 2), 10), ("2.up_proj.weight", (0, 0), (2, 2), 16),
    ]  # fmt: skip
    odd = Layout.from_pieces({name: ((4, 7, 2), "int8")}, {}, [])
    with pytest.raises(
        LayoutError, match=r"gate_up_proj: shape: expected \[experts, N, K\] with axis 1 a multiple of 2"
    ):
        unfuse(odd, FUSED)


def test_options_of_megatron_that_the_cases_leave_out() -> None:
    """CP and DP ranks are replicas; an unpadded vocabulary that TP does not divide is refused."""
    side = megatron(catalogue("tiny"), Parallel(tp=2, cp=2, dp=2, etp=1, ep=2), HOSTS)
    assert side.layout("trainer/run/0") == side.layout("trainer/run/2") == side.layout("trainer/run/6")
    assert side.layout("trainer/run/0") != side.layout("trainer/run/1")
    with pytest.raises(LayoutError, match="a padded vocabulary of at least 320 rows that 3 ranks divide"):
        megatron(catalogue("tiny"), Parallel(tp=3, etp=1), HOSTS, Options(vocab_multiple=0))
