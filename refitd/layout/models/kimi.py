"""Kimi K3, the text model: delta attention (KDA), gated MLA, experts on a latent, residual mixing."""

from __future__ import annotations

from typing import NamedTuple

from refitd.layout.models.catalogue import Block, Catalogue, Row, build
from refitd.layout.models.deepseek import mla
from refitd.layout.models.rows import glu, layer_norms, norm

_F32 = "float32"


class Sizes(NamedTuple):
    """Sizes of a Kimi K3 text model; every ``period``-th layer (counted from 1) and the last have MLA."""

    layers: int = 93
    dense: int = 1
    period: int = 4
    hidden: int = 7168
    heads: int = 96
    dim: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    rope: int = 64
    dense_inner: int = 33792
    experts: int = 896
    inner: int = 3072
    latent: int = 3584
    shared: int = 6144
    vocab: int = 163840


def catalogue(name: str, s: Sizes) -> Catalogue:
    """A model of these sizes."""
    layers = range(s.layers)
    full = [i for i in layers if i % s.period == s.period - 1 or i == s.layers - 1]
    prefix = "language_model.model.layers.{}."
    blocks = [
        Block("language_model.", (), _ends(s)),
        Block(prefix, layers, [*layer_norms(s.hidden), *_mixing(s)]),
        Block(prefix + "self_attn.", [i for i in layers if i not in full], _kda(s)),
        Block(prefix + "self_attn.", full, _mla(s)),
        Block(prefix, range(s.dense), glu("", s.hidden, s.dense_inner)),
        Block(prefix + "block_sparse_moe.", range(s.dense, s.layers), _moe(s)),
    ]
    return build(name, s.layers, s.vocab, blocks, experts=s.experts)


def _ends(s: Sizes) -> list[Row]:
    return [
        Row("embed", "model.embed_tokens.weight", (s.vocab, s.hidden), "vocab"),
        norm("final_norm", "model.norm", s.hidden),
        Row("head", "lm_head.weight", (s.vocab, s.hidden), "vocab"),
        norm("final_mix_norm", "model.output_attn_res_norm", s.hidden),
        Row("final_mix", "model.output_attn_res_proj.weight", (1, s.hidden)),
    ]


def _mixing(s: Sizes) -> list[Row]:
    return [
        norm("mix1_norm", "self_attention_res_norm", s.hidden),
        Row("mix1", "self_attention_res_proj.weight", (1, s.hidden)),
        norm("mix2_norm", "mlp_res_norm", s.hidden),
        Row("mix2", "mlp_res_proj.weight", (1, s.hidden)),
    ]


def _kda(s: Sizes) -> list[Row]:
    inner = s.heads * s.dim
    return [
        *(Row(f"kda_{c}", f"{c}_proj.weight", (inner, s.hidden), "rows") for c in "qkv"),
        *(Row(f"kda_{c}_conv", f"{c}_conv1d.weight", (inner, 1, 4), "rows", _F32) for c in "qkv"),
        # The live heads. Checkpoints store zeros behind them (128 in all): padding, which no piece names.
        Row("kda_A_log", "A_log", (s.heads,), "rows", _F32),
        Row("kda_dt_bias", "dt_bias", (inner,), "rows", _F32),
        Row("kda_f_a", "f_a_proj.weight", (s.dim, s.hidden)),
        Row("kda_f_b", "f_b_proj.weight", (inner, s.dim), "rows"),
        Row("kda_b", "b_proj.weight", (s.heads, s.hidden), "rows"),
        Row("kda_g", "g_proj.weight", (inner, s.hidden), "rows"),
        norm("kda_norm", "o_norm", s.dim, _F32),
        Row("kda_o", "o_proj.weight", (s.hidden, inner), "columns"),
    ]


def _mla(s: Sizes) -> list[Row]:
    rows = mla(s.hidden, s.heads, s.q_lora, s.kv_lora, s.dim, s.rope, s.dim)
    return [*rows, Row("g", "g_proj.weight", (s.heads * s.dim, s.hidden), "rows")]


def _moe(s: Sizes) -> list[Row]:
    return [
        Row("router", "gate.weight", (s.experts, s.hidden)),
        Row("router_bias", "gate.e_score_correction_bias", (s.experts,), dtype=_F32),
        Row("latent_in", "routed_expert_down_proj.weight", (s.latent, s.hidden)),
        Row("latent_out", "routed_expert_up_proj.weight", (s.hidden, s.latent)),
        norm("latent_norm", "routed_expert_norm", s.latent),
        Row("expert_gate", "experts.{}.w1.weight", (s.inner, s.latent), "rows", experts=s.experts),
        Row("expert_up", "experts.{}.w3.weight", (s.inner, s.latent), "rows", experts=s.experts),
        Row("expert_down", "experts.{}.w2.weight", (s.latent, s.inner), "columns", experts=s.experts),
        *glu("shared_", s.hidden, s.shared, "shared_experts."),
    ]
